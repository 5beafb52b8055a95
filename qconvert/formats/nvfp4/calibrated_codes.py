"""NVFP4 from codes and scales that a calibration found, not by rounding. The bytes are those of
formats/nvfp4/encode.py: the same tensors, chosen otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import Codes, Nvfp4Scheme
from qconvert.core.parameter_names import NVFP4, Dialect
from qconvert.ops.base import array
from qconvert.ops.cast import FLOAT_DTYPES, TILE_ELEMENTS, matrix_to_quantize
from qconvert.ops.fp4 import BLOCK, SIZES, e4m3, pack

_SIGN = 8
_TWICE = 2  # codes come as twice their numbers


@dataclass(frozen=True, slots=True)
class PackNvfp4Codes:
    """Codes [N, K] -> packed U8 [N, K/2], block scales F8_E4M3 [N, K/16] and the matrix's own scale F32,
    shaped as the dialect has it. Raises PlanError where columns are not whole blocks of 16."""

    dialect: Dialect

    @property
    def suffixes(self) -> tuple[str, ...]:
        names = NVFP4[self.dialect]
        return names.weight, names.scale, names.global_scale

    @property
    def row_step(self) -> int:
        return 1

    def scheme_of(self, columns: int) -> Nvfp4Scheme:
        return Nvfp4Scheme(self.dialect)

    def infer(self, weight: TensorType) -> tuple[TensorType, ...]:
        rows, columns = matrix_to_quantize(weight, "NVFP4", FLOAT_DTYPES)
        blocks = self.scheme_of(columns).groups(columns)
        return (
            TensorType("U8", (rows, columns // 2)),
            TensorType("F8_E4M3", (rows, blocks)),
            TensorType("F32", NVFP4[self.dialect].scalar),
        )

    def loss(self, weight: TensorType) -> str:
        dtype = weight.dtype.lower().replace("f", "fp").replace("bfp", "bf")
        return f"rounds {dtype} to NVFP4 in blocks of {BLOCK} ({self.dialect} dialect)"

    def pack(self, codes: Codes, outs: Sequence[Buffer]) -> None:
        import numpy as np

        packed, scale, own = outs
        assert codes.global_scale is not None
        array(own.data, np.float32, (1,))[0] = codes.global_scale
        known = np.zeros(2 * _TWICE * int(SIZES[-1]) + 1, np.uint8)  # by twice a number, plus 12
        middle = known.size // 2
        for code, size in enumerate(SIZES):
            known[middle + round(_TWICE * size)] = code
            known[middle - round(_TWICE * size)] = code + _SIGN if code else 0
        rows, columns = codes.codes.shape
        half = array(packed.data, np.uint8, (rows, columns // 2))
        blocks = array(scale.data, np.uint8, codes.scale.shape)
        step = max(1, TILE_ELEMENTS // max(1, columns))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            nibbles = np.take(known, codes.codes[part].astype(np.int16) + middle).reshape(-1)
            pack(nibbles, np.empty_like(nibbles), half[part].reshape(-1))
            e4m3(codes.scale[part].astype(np.float32), blocks[part])
