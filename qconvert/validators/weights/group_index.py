"""The group of each column, if it is stored.

QC090 a g_idx names an invalid group, or has groups of unequal sizes, or an order that is not stated.

GPTQ's g_idx and compressed-tensors' weight_g_idx: I32 [K]. Loaders use them only if the config says
desc_act (actorder: group), and kernels that sort columns by group assume equal groups.

The shape that packed weights store about themselves.

QC086 a weight_shape is not the shape of its packed weight.

compressed-tensors (`pack_quantized`) stores a weight [N, K] as words [N, ceil(K * bits / 32)], and
with it `weight_shape`, two integers: N and K. Loaders unpack to that shape.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.graph import Source
from qconvert.core.names import split_parameter
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Yield, validator
from qconvert.validation.workers import Folders
from qconvert.validators.formats.packed import PackedInts, ints_of
from qconvert.validators.formats.qweight import qweight_ints

_INTEGERS = {"I64": "<2q", "I32": "<2i"}


@dataclass(frozen=True, slots=True)
class ReadShape:
    """Reads one shape of two integers. It fits if it states `rows` and from `fewest` to `most`
    columns."""

    shape: Source
    rows: int
    fewest: int
    most: int
    scratch: ClassVar[int] = 0

    @property
    def where(self) -> str:
        return self.shape.name

    @property
    def nbytes(self) -> int:
        return self.shape.type.nbytes

    def run(self, folders: Folders) -> Iterator[Finding]:
        data = bytearray(self.nbytes)
        folders.output.read(self.shape, 0, memoryview(data))
        rows, columns = struct.unpack(_INTEGERS[self.shape.type.dtype], data)
        if rows != self.rows or not self.fewest <= columns <= self.most:
            message = f"expected [{self.rows}, {self.most}] as packed, found [{rows}, {columns}]"
            yield Finding("QC086", "error", self.shape.name, message)


@validator("packed weights have the shape that is stored with them", "data", "model")
def packed_shapes(folder: Folder) -> Iterator[ReadShape]:
    yield from folder.some(list(_shapes(folder.checkpoint)))


def _shapes(checkpoint: Checkpoint) -> Iterator[ReadShape]:
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


_A_FEW = 8


@validator(
    "columns are in the groups that the config gives, where g_idx states them", "data", "model"
)
def group_index(folder: Folder) -> Iterator[Yield]:
    yield from folder.some(list(_tasks(folder.checkpoint)), _A_FEW)


def _tasks(checkpoint: Checkpoint) -> Iterator[Groups]:
    for name, source in checkpoint.items():
        module, parameter = split_parameter(name)
        stated: PackedInts | None = None
        if parameter == "g_idx":
            found = qweight_ints(checkpoint, module)
            stated = None if found is None else found[0]
        elif parameter == "weight_g_idx":
            stated = ints_of(checkpoint, module)
        kind = source.type
        if stated is None or kind.dtype not in ("I32", "I64") or len(kind.shape) != 1:
            continue  # QC088, QC089
        columns = kind.shape[0]
        width = stated.group or columns
        if columns and columns % width == 0:
            yield Groups(source, width, stated.ordered)


@dataclass(frozen=True, slots=True)
class Groups:
    """One g_idx: groups of `width` columns, adjacent unless `ordered`."""

    index: Source
    width: int
    ordered: bool

    @property
    def where(self) -> str:
        return self.index.name

    @property
    def nbytes(self) -> int:
        return self.index.type.nbytes

    @property
    def scratch(self) -> int:
        return 4 * self.nbytes

    def run(self, folders: Folders) -> Iterator[Finding]:
        import numpy as np

        raw = np.empty(self.nbytes, np.uint8)
        folders.output.read(self.index, 0, raw.data)
        found = raw.view("<i4" if self.index.type.dtype == "I32" else "<i8")
        count = found.size // self.width
        outside = (found < 0) | (found >= count)
        if outside.any():
            at = int(np.argmax(outside))
            message = f"column {at}: expected a group from 0 to {count - 1}, found {found[at]}"
            yield Finding("QC090", "error", self.where, message)
            return
        sizes = np.bincount(found, minlength=count)
        if (sizes != self.width).any():
            group = int(np.argmax(sizes != self.width))
            message = f"group {group}: expected {self.width} columns, found {sizes[group]}"
            yield Finding("QC090", "error", self.where, message)
            return
        plain = np.arange(found.size) // self.width
        if not self.ordered and not np.array_equal(found, plain):
            at = int(np.argmax(found != plain))
            message = (
                f"column {at}: expected group {plain[at]}, because the config states adjacent groups, "
                f"found {found[at]}"
            )
            yield Finding("QC090", "error", self.where, message)
