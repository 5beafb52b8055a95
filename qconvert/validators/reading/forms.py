"""The stored form of each matrix of a checkpoint: in which numbers, with which scales.

Read from the config and from shapes, for any quantization config a runtime takes, without sharing code
with the passes' reader. Not a validator itself: it has no `VALIDATOR`, so discovery skips it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.dtypes import DTYPE_BITS, ceil_div
from qconvert.core.graph import Source
from qconvert.core.names import scale_candidates, split_parameter, weight_candidates
from qconvert.validators.reading.decode import FP8, SCALES
from qconvert.validators.reading.int8 import int8_scale
from qconvert.validators.reading.nvfp4 import (
    BLOCK,
    FP4,
    MX_BLOCK,
    MXFP4,
    NVFP4,
    GlobalScale,
    Parts,
    fault,
    parts_of,
)
from qconvert.validators.reading.prepared import blocks_of
from qconvert.validators.reading.quantization import (
    PackedInts,
    awq_ints,
    exponents_of,
    float_block,
    fp8_block_of,
    fp8_blocks,
    fp8_strategy_of,
    gptq_ints,
    ints_of,
    states_mxfp4,
)

_NAMES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}
RAW = "raw"  # not numbers, or in an unsupported form: bytes


@dataclass(slots=True, unsafe_hash=True)
class Grid:
    """Scales [rows, columns] of a matrix, from element `first` of a tensor on: that of weight [r, c]
    is [r // block[0], c // block[1]]. `transposed`: they are stored as [columns, rows]. `global_scale`
    multiplies or divides all of them."""

    scale: Source
    first: int
    rows: int
    columns: int
    block: tuple[int, int]
    transposed: bool = False
    global_scale: GlobalScale | None = None


@dataclass(slots=True, unsafe_hash=True)
class Codes:
    """The parts of packed integers other than words and scales.

    `zeros` I32: zero points packed along the rows, [ceil(rows / word), groups], transposed [groups,
    rows / word], each stored minus `less`; None: all are the middle of the range, as those of
    `symmetric` ones have to be that are stored. `order` I32 [columns]: the group of each column; None:
    groups lie side by side. `signed`: codes are I8, not packed, and so are zero points [rows, groups].
    `awq`: AutoAWQ's words [columns, rows / 8], of a transposed matrix, which hold rows in the order of
    rows.py's `AWQ_ORDER`; zeros [groups, rows / 8] too."""

    bits: int
    symmetric: bool = True
    zeros: Source | None = None
    less: int = 0
    order: Source | None = None
    signed: bool = False
    awq: bool = False

    @property
    def word(self) -> int:
        """Codes in a word."""
        return 32 // self.bits


@dataclass(slots=True, unsafe_hash=True)
class Form:
    """A stored matrix [rows, columns] that begins at byte `at` of a tensor. `transposed`: it is stored
    as [columns, rows], packed integers as words [columns / word, rows]. `codes` is of those."""

    format: str
    weight: Source
    at: int
    rows: int
    columns: int
    grid: Grid | None = None
    transposed: bool = False
    codes: Codes | None = None

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row, without scales."""
        if self.codes is not None:
            return self.columns * self.codes.bits // 8
        if self.format in FP4:
            return self.columns // 2
        return self.columns * DTYPE_BITS[self.weight.type.dtype] // 8 if self.format != RAW else 1


class Unread(Exception):
    """Why a weight's numbers cannot be read."""


@dataclass(frozen=True)
class Forms:
    """Statements of a checkpoint's config about its quantized weights, applied to its tensors."""

    checkpoint: Checkpoint

    @cached_property
    def _blocks(self) -> list[Mapping[str, Any]]:
        """All quantization blocks, and those inside them (`linear_fp8_config`)."""
        found: list[Mapping[str, Any]] = []
        for config in self.checkpoint.quantization_configs:
            inner = [v for k, v in config.block.items() if k.endswith("_config")]
            found += [config.block, *(v for v in inner if isinstance(v, Mapping))]
            found += blocks_of(config)
        return found

    @cached_property
    def _groups(self) -> list[Mapping[str, Any]]:
        """Statements of compressed-tensors' groups about weights."""
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
        found = {
            (size[0], size[1])
            for size in sizes
            if isinstance(size, list) and len(size) == 2 and all(type(n) is int for n in size)
            if min(size) > 0
        }
        found |= {block for w in self._groups if (block := float_block(w)) is not None}
        return found | set(fp8_blocks(self.checkpoint.quantization_configs))

    @cached_property
    def _awq(self) -> PackedInts | None:
        return awq_ints(self.checkpoint.quantization_configs)

    def u8_exponents(self, weight: str) -> bool:
        """Tell whether a weight's U8 scales are exponents."""
        stated = any(block.get("scale_fmt") == "ue8m0" for block in self._blocks)
        return stated or exponents_of(self.checkpoint, split_parameter(weight)[0])

    def scale_of(self, weight: str) -> Source:
        """The scale of an FP8 weight."""
        sources = self.checkpoint.sources
        found = [name for name in scale_candidates(weight) if name in sources]
        if len(found) > 1:  # beside a scale that only weights have, `scale` is the model's own
            found = [name for name in found if not name.endswith(".scale")]
        if len(found) != 1:
            raise Unread(f"it has {len(found)} scales")
        scale = sources[found[0]]
        if scale.type.dtype not in SCALES:
            raise Unread(f"its scale is {scale.type.dtype}")
        if scale.type.dtype == "U8" and not self.u8_exponents(weight):
            raise Unread("its scale is U8, but no scale_fmt says that those are exponents")
        return scale

    def of(self, name: str) -> Form:
        """A tensor that is not a stack of matrices, seen as [rows, columns]; a vector as a column.
        Raises Unread where its numbers cannot be told."""
        weight = self.checkpoint.sources[name]
        dtype, shape = weight.type.dtype, weight.type.shape
        nvfp4 = parts_of(self.checkpoint, name) if dtype == "U8" else None
        if nvfp4 is not None:
            return _nvfp4(nvfp4)
        if name.endswith(".weight_packed") and dtype == "U8":
            return self._mxfp4(name, weight)
        if name.endswith(".weight_packed"):
            return self._packed(name, weight)
        if name.endswith(".qweight"):
            return (self._gptq if self._awq is None else self._of_awq)(name, weight)
        if dtype == "I8":
            beside = self.checkpoint.get(f"{name.removesuffix('.weight')}.scale")
            if beside is not None and beside.type.dtype == "F8_E8M0":
                return _mx(weight, beside)
            scale = int8_scale(self.checkpoint, name)
            if scale is not None:
                return self._int8(name, weight, scale)
        rows, columns = _flat(shape)
        if dtype in FP8:
            if len(shape) != 2:
                raise Unread(f"FP8 of shape {list(shape)}")
            grid = self._grid(self.scale_of(name), (), rows, columns, 0, 1)
            return Form("fp8", weight, 0, rows, columns, grid)
        form = _NAMES.get(dtype)
        return self.raw(name) if form is None else Form(form, weight, 0, rows, columns)

    def _block_of(self, scale: str) -> tuple[int, int] | None:
        """The block of these scales, of those that are stated; None where a scale a tensor or a row is
        stated for their weight."""
        weight = next(iter(weight_candidates(scale)), scale)
        module = split_parameter(weight)[0]
        found = fp8_block_of(self.checkpoint, module)
        if found is None and fp8_strategy_of(self.checkpoint, module) is not None:
            return None
        if len(self.fp8_blocks) == 1:
            return next(iter(self.fp8_blocks))
        if found not in self.fp8_blocks:
            raise Unread(
                "the config states several block sizes for scales, and not which one applies"
            )
        return found

    def raw(self, name: str) -> Form:
        """A tensor as a column of bytes."""
        weight = self.checkpoint[name]
        return Form(RAW, weight, 0, weight.type.nbytes, 1)

    def of_stack(self, name: str, *, transposed: bool) -> Iterator[Form]:
        """The matrix of each expert in a stack [E, rows, columns]; [E, columns, rows] if
        `transposed`."""
        weight = self.checkpoint[name]
        experts, rows, columns = weight.type.shape
        size = weight.type.nbytes // max(1, experts)
        form = _NAMES.get(weight.type.dtype)
        scale = None
        if weight.type.dtype in FP8:
            form, scale = "fp8", self.scale_of(name)
        if form is None or (transposed and form == "fp8"):
            raise Unread(f"a stack of {weight.type.dtype}")
        if transposed:
            rows, columns = columns, rows
        for expert in range(experts):
            grid = None
            if scale is not None:
                grid = self._grid(scale, (experts,), rows, columns, expert, experts)
            yield Form(form, weight, expert * size, rows, columns, grid, transposed)

    def _grid(
        self, scale: Source, lead: tuple[int, ...], rows: int, columns: int, number: int, of: int
    ) -> Grid:
        """Scales of matrix `number` in a stack of `of`."""
        shape = scale.type.shape
        block = self._block_of(scale.name) if self.fp8_blocks else None
        if block is not None:
            high, wide = block
            grid = ceil_div(rows, high), ceil_div(columns, wide)
            if shape in ((*lead, *grid), (*lead, grid[0], 1, grid[1], 1)):
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

    def of_blocks(self, name: str) -> Iterator[Form]:
        """The matrix [rows, 32 * blocks] of each expert in gpt-oss's stack: codes U8 [E, rows, blocks,
        16] and exponents U8 [E, rows, blocks]."""
        codes = self.checkpoint[name]
        scale = self.checkpoint.get(f"{name.removesuffix('_blocks')}_scales")
        if codes.type.dtype != "U8" or len(codes.type.shape) != 4 or scale is None:
            raise Unread(f"a stack of {codes.type}, {'with' if scale else 'without'} scales")
        experts, rows, blocks, size = codes.type.shape
        if size != MX_BLOCK // 2 or scale.type.shape != codes.type.shape[:3]:
            raise Unread(f"{scale.name} {scale.type} does not fit {codes.type}")
        for expert in range(experts):
            grid = Grid(scale, expert * rows * blocks, rows, blocks, (1, MX_BLOCK))
            at = expert * rows * blocks * size
            yield Form(MXFP4, codes, at, rows, MX_BLOCK * blocks, grid)

    def _mxfp4(self, name: str, packed: Source) -> Form:
        """compressed-tensors' form, one exponent for 32 columns."""
        scale = self.checkpoint.get(f"{name.removesuffix('_packed')}_scale")
        if scale is None or not states_mxfp4(self.checkpoint.quantization_configs):
            raise Unread(f"packed as {packed.type}, but the config states no MXFP4")
        return _mx(packed, scale)

    def _int8(self, name: str, weight: Source, scale: Source) -> Form:
        """compressed-tensors' int-quantized form."""
        module = name.removesuffix(".weight")
        stated, zeros = ints_of(self.checkpoint, module), self.checkpoint.get(f"{name}_zero_point")
        if stated is None or stated.bits != 8 or stated.ordered:
            raise Unread("it is I8, and the config states no INT8 for it with groups side by side")
        if stated.symmetric != (zeros is None):
            has = "no zero points" if zeros is None else "zero points"
            raise Unread(f"it has {has}, and the config says symmetric: {stated.symmetric}")
        if len(weight.type.shape) != 2:
            raise Unread(f"INT8 of shape {list(weight.type.shape)}")
        rows, columns = weight.type.shape
        groups = _groups(stated, columns)
        _fit(scale, (rows, groups), SCALES[:3], stated)
        if zeros is not None:
            _fit(zeros, (rows, groups), ("I8",), stated)
        codes = Codes(8, stated.symmetric, zeros, signed=True)
        grid = Grid(scale, 0, rows, groups, (1, columns // groups))
        return Form("w8a8", weight, 0, rows, columns, grid, codes=codes)

    def _packed(self, name: str, packed: Source) -> Form:
        """compressed-tensors' form."""
        module = name.removesuffix(".weight_packed")
        scale, zeros, order = (
            self.checkpoint.get(f"{module}.weight_{part}")
            for part in ("scale", "zero_point", "g_idx")
        )
        if packed.type.dtype != "I32" or len(packed.type.shape) != 2 or scale is None:
            raise Unread(f"packed as {packed.type}" if scale else "it has no scale")
        stated = ints_of(self.checkpoint, module)
        if stated is None:
            raise Unread("the config states no form of packed integers for it, or several")
        if stated.symmetric != (zeros is None):
            has = "no zero points" if zeros is None else "zero points"
            raise Unread(f"it has {has}, and the config says symmetric: {stated.symmetric}")
        if stated.ordered != (order is not None):
            has = "no g_idx" if order is None else "a g_idx"
            raise Unread(f"it has {has}, and the config says actorder group: {stated.ordered}")
        rows, columns = packed.type.shape[0], packed.type.shape[1] * 32 // stated.bits
        groups = _groups(stated, columns)
        _fit(scale, (rows, groups), SCALES[:3], stated)
        codes = Codes(stated.bits, stated.symmetric, zeros, 0, order)
        if zeros is not None:
            _fit(zeros, (ceil_div(rows, codes.word), groups), ("I32",), stated)
        if order is not None:
            _fit(order, (columns,), ("I32", "I64"), stated)
        grid = Grid(scale, 0, rows, groups, (1, columns // groups))
        return Form(_named(stated), packed, 0, rows, columns, grid, codes=codes)

    def _of_awq(self, name: str, words: Source) -> Form:
        """AutoAWQ's own form."""
        module, stated = name.removesuffix(".qweight"), self._awq
        assert stated is not None
        zeros, scale = (self.checkpoint.get(f"{module}.{part}") for part in ("qzeros", "scales"))
        if words.type.dtype != "I32" or len(words.type.shape) != 2 or scale is None:
            raise Unread(f"packed as {words.type}" if scale else "it has no scales")
        if stated.symmetric != (zeros is None):
            has = "no qzeros" if zeros is None else "qzeros"
            raise Unread(f"it has {has}, and the config says zero_point: {not stated.symmetric}")
        columns, rows = words.type.shape[0], words.type.shape[1] * 8
        groups = _groups(stated, columns)
        _fit(scale, (groups, rows), SCALES[:3], stated)
        if zeros is not None:
            _fit(zeros, (groups, rows // 8), ("I32",), stated)
        grid = Grid(scale, 0, rows, groups, (1, columns // groups), transposed=True)
        codes = Codes(4, stated.symmetric, zeros, awq=True)
        return Form(_named(stated), words, 0, rows, columns, grid, transposed=True, codes=codes)

    def _gptq(self, name: str, words: Source) -> Form:
        """GPTQ's own form. Consumers read g_idx only if the config says desc_act."""
        module = name.removesuffix(".qweight")
        zeros, scale, order = (
            self.checkpoint.get(f"{module}.{part}") for part in ("qzeros", "scales", "g_idx")
        )
        found = gptq_ints(self.checkpoint.quantization_configs, module)
        if found is None:
            raise Unread("the config states no form of GPTQ weights that is read here")
        stated, version = found
        if words.type.dtype != "I32" or len(words.type.shape) != 2:
            raise Unread(f"packed as {words.type}")
        if scale is None or zeros is None or (stated.ordered and order is None):
            raise Unread("it has no scales, qzeros or g_idx")
        columns, rows = words.type.shape[0] * 32 // stated.bits, words.type.shape[1]
        groups = _groups(stated, columns)
        taken = order if stated.ordered else None
        codes = Codes(stated.bits, stated.symmetric, zeros, 2 - version, taken)
        _fit(scale, (groups, rows), SCALES[:3], stated)
        _fit(zeros, (groups, ceil_div(rows, codes.word)), ("I32",), stated)
        if codes.order is not None:
            _fit(codes.order, (columns,), ("I32", "I64"), stated)
        grid = Grid(scale, 0, rows, groups, (1, columns // groups), transposed=True)
        return Form(_named(stated), words, 0, rows, columns, grid, transposed=True, codes=codes)


def _mx(packed: Source, scale: Source) -> Form:
    rows, columns = packed.type.shape[0], 2 * packed.type.shape[-1]
    groups = columns // MX_BLOCK
    if len(packed.type.shape) != 2 or columns % MX_BLOCK or scale.type.shape != (rows, groups):
        raise Unread(
            f"{scale.name} {scale.type} does not fit {packed.type} in blocks of {MX_BLOCK}"
        )
    if scale.type.dtype not in ("U8", "F8_E8M0"):
        raise Unread(f"its scale is {scale.type.dtype}")
    return Form(MXFP4, packed, 0, rows, columns, Grid(scale, 0, rows, groups, (1, MX_BLOCK)))


def _nvfp4(parts: Parts) -> Form:
    wrong = fault(parts)
    if wrong is not None:
        raise Unread(f"{wrong[0]}: {wrong[1]}")
    assert parts.scale is not None
    assert parts.global_scale is not None
    rows, columns = parts.weight.type.shape[0], 2 * parts.weight.type.shape[1]
    global_scale = GlobalScale(parts.global_scale, parts.dialect.divisor)
    grid = Grid(parts.scale, 0, rows, columns // BLOCK, (1, BLOCK), global_scale=global_scale)
    return Form(NVFP4, parts.weight, 0, rows, columns, grid)


def _named(stated: PackedInts) -> str:
    return f"w{stated.bits}a16"


def _groups(stated: PackedInts, columns: int) -> int:
    """Scales in a row."""
    width = stated.group or columns
    if width < 1 or columns % width:
        raise Unread(f"{columns} columns are not whole groups of {width}")
    return columns // width


def _fit(part: Source, shape: tuple[int, ...], dtypes: Collection[str], stated: PackedInts) -> None:
    if part.type.dtype not in dtypes or part.type.shape != shape:
        what = f"groups of {stated.group}" if stated.group else "one scale a row"
        raise Unread(f"{part.name} {part.type} does not fit {list(shape)}, for {what}")


def _flat(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) == 2:
        return shape
    if len(shape) < 2:
        return prod(shape), 1
    return prod(shape[:-1]), shape[-1]
