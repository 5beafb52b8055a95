"""The shape that packed weights store about themselves.

QC086 a weight_shape is not the shape of its packed weight.

compressed-tensors (`pack_quantized`) stores a weight [N, K] as words [N, ceil(K * bits / 32)], and
with it `weight_shape`, two integers: N and K. Loaders unpack to that shape.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.graph import Source
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Need
from qconvert.validation.workers import Folders
from qconvert.validators.formats.packed import ints_of

_INTEGERS = {"I64": "<2q", "I32": "<2i"}


@dataclass(frozen=True, slots=True)
class ReadShape:
    """Reads one shape of two integers. It fits if it states `rows` and from `fewest` to `most`
    columns."""

    shape: Source
    rows: int
    fewest: int
    most: int

    @property
    def where(self) -> str:
        return self.shape.name

    @property
    def nbytes(self) -> int:
        return self.shape.type.nbytes

    @property
    def scratch(self) -> int:
        return 0

    def run(self, folders: Folders) -> Iterator[Finding]:
        data = bytearray(self.nbytes)
        folders.output.read(self.shape, 0, memoryview(data))
        rows, columns = struct.unpack(_INTEGERS[self.shape.type.dtype], data)
        if rows != self.rows or not self.fewest <= columns <= self.most:
            message = f"expected [{self.rows}, {self.most}] as packed, found [{rows}, {columns}]"
            yield Finding("QC086", "error", self.shape.name, message)


@dataclass(frozen=True)
class PackedShapes:
    """One task per shape: 16 bytes."""

    name: str = "packed_shapes"
    proves: str = "packed weights have the shape that is stored with them"
    needs: frozenset[Need] = frozenset({"model", "data"})

    def __call__(self, folder: Folder) -> Iterator[ReadShape]:
        yield from folder.some(list(_tasks(folder.checkpoint)))


def _tasks(checkpoint: Checkpoint) -> Iterator[ReadShape]:
    """Weights packed as the config says; headers that do not fit have rules of their own."""
    for name, packed in checkpoint.items():
        stem, _, parameter = name.rpartition(".")
        shape = checkpoint.get(f"{stem}.weight_shape")
        if parameter != "weight_packed" or shape is None or packed.type.dtype != "I32":
            continue
        if len(packed.type.shape) != 2 or shape.type.shape != (2,):
            continue
        if shape.type.dtype not in _INTEGERS:
            continue
        ints = ints_of(checkpoint, stem)
        if ints is None:
            continue
        rows, words = packed.type.shape
        most, fewest = words * 32 // ints.bits, (words - 1) * 32 // ints.bits + 1
        scale = checkpoint.get(f"{stem}.weight_scale")
        # Whole groups determine the columns; otherwise the last word may be partly filled.
        columns = ints.columns(words, () if scale is None else scale.type.shape)
        whole = ints.group and columns % ints.group == 0
        if whole and scale is not None and scale.type.shape == (rows, ints.groups(columns)):
            fewest = most = columns
        yield ReadShape(shape, rows, fewest, most)


VALIDATOR = PackedShapes()
