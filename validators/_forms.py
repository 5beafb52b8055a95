"""How a checkpoint stores each of its matrices: in which numbers, with which scales.

Read from the config and from shapes, for any quantization config a runtime takes, and apart from what
the passes read it with. Not a validator itself: it has no `VALIDATOR`, so discovery passes it by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from qconvert.checkpoint import Checkpoint
from qconvert.graph import Source
from qconvert.names import scale_candidates
from qconvert.spec import DTYPE_BITS, ceil_div
from qconvert.validators._decode import FP8, SCALES

_NAMES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
RAW = "raw"  # no numbers, or in a form that is not read here: bytes


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales [rows, columns] of a matrix, from element `first` of a tensor on: that of weight [r, c]
    is [r // block[0], c // block[1]]."""

    scale: Source
    first: int
    rows: int
    columns: int
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Form:
    """A stored matrix [rows, columns] that begins at byte `at` of a tensor. `turned`: it is stored as
    [columns, rows]."""

    format: str
    weight: Source
    at: int
    rows: int
    columns: int
    grid: Grid | None = None
    turned: bool = False

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row, scales apart."""
        if self.format == "w4a16":
            return self.columns // 2
        return self.columns * DTYPE_BITS[self.weight.type.dtype] // 8 if self.format != RAW else 1


class Unread(Exception):
    """Why a weight's numbers cannot be told."""


@dataclass(frozen=True)
class Forms:
    """What a checkpoint's config says of its quantized weights, applied to its tensors."""

    checkpoint: Checkpoint

    @cached_property
    def _blocks(self) -> list[Mapping[str, Any]]:
        """All quantization blocks, and those inside them (`linear_fp8_config`)."""
        found: list[Mapping[str, Any]] = []
        for config in self.checkpoint.quantization_configs:
            inner = [v for k, v in config.block.items() if k.endswith("_config")]
            found += [config.block, *(v for v in inner if isinstance(v, Mapping))]
        return found

    @cached_property
    def _groups(self) -> list[Mapping[str, Any]]:
        """What compressed-tensors' groups say of weights."""
        found = []
        for block in self._blocks:
            groups = block.get("config_groups")
            for group in groups.values() if isinstance(groups, Mapping) else ():
                weights = group.get("weights") if isinstance(group, Mapping) else None
                if isinstance(weights, Mapping):
                    found.append(weights)
        return found

    @cached_property
    def fp8_blocks(self) -> set[tuple[int, int]]:
        """Every block size that is stated for FP8 weights."""
        sizes = [block.get("weight_block_size") for block in self._blocks]
        sizes += [w.get("block_structure") for w in self._groups if w.get("type") == "float"]
        return {
            (size[0], size[1])
            for size in sizes
            if isinstance(size, list) and len(size) == 2 and all(type(n) is int for n in size)
            if min(size) > 0
        }

    @cached_property
    def int4_groups(self) -> set[int]:
        """Every group size that is stated for symmetric INT4 weights."""
        return {
            w["group_size"]
            for w in self._groups
            if (w.get("type"), w.get("num_bits"), w.get("symmetric")) == ("int", 4, True)
            if type(w.get("group_size")) is int and w["group_size"] > 0
        }

    @cached_property
    def u8_exponents(self) -> bool:
        return any(block.get("scale_fmt") == "ue8m0" for block in self._blocks)

    def scale_of(self, weight: str) -> Source:
        """The scale beside an FP8 weight."""
        found = [name for name in scale_candidates(weight) if name in self.checkpoint]
        if len(found) != 1:
            raise Unread(f"it has {len(found)} scales")
        scale = self.checkpoint[found[0]]
        if scale.type.dtype not in SCALES:
            raise Unread(f"its scale is {scale.type.dtype}")
        if scale.type.dtype == "U8" and not self.u8_exponents:
            raise Unread("its scale is U8, and no scale_fmt says that those are exponents")
        return scale

    def of(self, name: str) -> Form:
        """A tensor that is not a stack of matrices, seen as [rows, columns]; a vector as a column.
        Raises Unread where its numbers cannot be told."""
        weight = self.checkpoint[name]
        shape = weight.type.shape
        if name.endswith(".weight_packed"):
            return self._int4(name, weight)
        rows, columns = _flat(shape)
        if weight.type.dtype in FP8:
            if len(shape) != 2:
                raise Unread(f"FP8 of shape {list(shape)}")
            grid = self._grid(self.scale_of(name), (), rows, columns, 0, 1)
            return Form("fp8", weight, 0, rows, columns, grid)
        form = _NAMES.get(weight.type.dtype)
        return self.raw(name) if form is None else Form(form, weight, 0, rows, columns)

    def raw(self, name: str) -> Form:
        """A tensor as a column of bytes."""
        weight = self.checkpoint[name]
        return Form(RAW, weight, 0, weight.type.nbytes, 1)

    def of_stack(self, name: str, *, turned: bool) -> Iterator[Form]:
        """The matrix of each expert in a stack [E, rows, columns]; [E, columns, rows] if `turned`."""
        weight = self.checkpoint[name]
        experts, rows, columns = weight.type.shape
        size = weight.type.nbytes // max(1, experts)
        form = _NAMES.get(weight.type.dtype)
        scale = None
        if weight.type.dtype in FP8:
            form, scale = "fp8", self.scale_of(name)
        if form is None or (turned and form == "fp8"):
            raise Unread(f"a stack of {weight.type.dtype}")
        if turned:
            rows, columns = columns, rows
        for expert in range(experts):
            grid = None
            if scale is not None:
                grid = self._grid(scale, (experts,), rows, columns, expert, experts)
            yield Form(form, weight, expert * size, rows, columns, grid, turned)

    def _grid(
        self, scale: Source, lead: tuple[int, ...], rows: int, columns: int, number: int, of: int
    ) -> Grid:
        """Scales of matrix `number` in a stack of `of`."""
        shape = scale.type.shape
        if len(self.fp8_blocks) == 1:
            ((high, wide),) = self.fp8_blocks
            grid = ceil_div(rows, high), ceil_div(columns, wide)
            if shape == (*lead, *grid):
                return Grid(scale, number * prod(grid), *grid, (high, wide))
        if scale.type.numel == 1:
            return Grid(scale, 0, 1, 1, (rows, columns))
        if shape in ((*lead, rows), (*lead, rows, 1)):
            return Grid(scale, number * rows, rows, 1, (1, columns))
        if lead and shape in (lead, (*lead, 1, 1)):
            return Grid(scale, number, 1, 1, (rows, columns))
        sizes = ", ".join(f"{a}x{b}" for a, b in sorted(self.fp8_blocks)) or "no size"
        raise Unread(
            f"a scale {scale.type} fits no matrix [{rows}, {columns}] in blocks of {sizes}"
        )

    def _int4(self, name: str, packed: Source) -> Form:
        module = name.removesuffix(".weight_packed")
        scale = self.checkpoint.get(f"{module}.weight_scale")
        if f"{module}.weight_zero_point" in self.checkpoint:
            raise Unread("INT4 with zero points")
        if packed.type.dtype != "I32" or len(packed.type.shape) != 2 or scale is None:
            raise Unread(f"packed as {packed.type}" if scale else "it has no scale")
        if len(self.int4_groups) != 1:
            raise Unread(f"INT4 in groups of {sorted(self.int4_groups)} by the config")
        (group,) = self.int4_groups
        rows, columns = packed.type.shape[0], 8 * packed.type.shape[1]
        if scale.type.dtype not in SCALES[:3] or scale.type.shape != (rows, columns // group):
            raise Unread(f"its scale {scale.type} does not fit groups of {group}")
        if columns % group:
            raise Unread(f"{columns} columns are not whole groups of {group}")
        grid = Grid(scale, 0, rows, columns // group, (1, group))
        return Form("w4a16", packed, 0, rows, columns, grid)


def _flat(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) < 2:
        return prod(shape), 1
    return prod(shape[:-1]), shape[-1]
