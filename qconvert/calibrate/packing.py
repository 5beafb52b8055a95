"""Codes of a matrix as what formats store for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import CodePacker

if TYPE_CHECKING:
    from qconvert.calibrate.settings import Matrix


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """One solved matrix as formats store it, in the order of their packers: types of the results and
    their bytes. `layer`, `expert`, `kind` and `sources` are the matrix's."""

    layer: int
    expert: int | None
    kind: str
    types: Sequence[TensorType]
    data: Sequence[bytes | bytearray]
    sources: Sequence[Mapping[str, Any]]

    def buffers(self) -> list[Buffer]:
        pairs = zip(self.types, self.data, strict=True)
        return [Buffer(each, memoryview(data)) for each, data in pairs]


@dataclass(frozen=True)
class Packers:
    """Packers of codes: of each kind of an expert's matrices (gate_proj, up_proj, down_proj), the
    same in all layers, and of each module beside the experts."""

    experts: Mapping[str, tuple[CodePacker, ...]]
    linears: Mapping[str, tuple[CodePacker, ...]]

    def pack(self, matrix: Matrix) -> Packed:
        packers = (self.linears if matrix.expert is None else self.experts)[matrix.kind]
        types: list[TensorType] = []
        made: list[bytearray] = []
        for packer, codes in zip(packers, matrix.codes, strict=True):
            parts = packer.infer(TensorType("BF16", codes.codes.shape))
            some = [bytearray(part.nbytes) for part in parts]
            pairs = zip(parts, some, strict=True)
            packer.pack(codes, [Buffer(part, memoryview(data)) for part, data in pairs])
            types += parts
            made += some
        return Packed(matrix.layer, matrix.expert, matrix.kind, types, made, matrix.sources)
