"""Triton kernels of calibrations: the loops over columns, a block of columns in one launch, for some
rows of a matrix; normal equations of scales; products, and answers of experts, added up.

What solver/best.py does with an operator a step, which a GPU spends on launches: 2,048
columns are some 60,000 of them a batch of matrices. Here a program holds a block's columns of some rows
in registers, and walks through them. Quotients are IEEE's and codes ties to even, as there; products and
sums may be fused, so a code that lies between two may become the other one. parity.py's are not.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from qconvert.calibrate.kernel_choice import there

if TYPE_CHECKING:
    from qconvert.calibrate.solver.curvature import Grid
    from qconvert.calibrate.solver.parity import Lattice


# Answers of experts, weighted and added up by token, as a Triton kernel: each number is read once. By
# torch's operators an expert's answers are read and written four times, and its tokens' sums once
# more.


_WIDEST = 1024  # columns that a program works on


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(value: tl.tensor) -> tl.tensor:
    """Float32 to the nearest that BF16 holds, ties to even, as float32; NaN stays one. Triton's
    interpreter cuts bits off where it converts."""
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(value == value, bits.to(tl.float32, bitcast=True), value)


@triton.jit  # type: ignore[untyped-decorator]
def _add_answers(
    rows: tl.tensor, answers: tl.tensor, slots: tl.tensor, weights: tl.tensor, start: tl.tensor,
    stop: tl.tensor, width: tl.tensor, COUNT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(rows + token * width + column, mask=inside, other=0.0).to(tl.float32)
    for i in range(COUNT):
        slot = tl.load(slots + token * COUNT + i)
        if (slot >= start) & (slot < stop):
            answer = tl.load(answers + (slot - start) * width + column, mask=inside, other=0.0)
            weighted = answer.to(tl.float32) * tl.load(weights + slot).to(tl.float32)
            total = _rounded(total + _rounded(weighted))
    tl.store(rows + token * width + column, total.to(tl.bfloat16), mask=inside)


@there
def add_answers(
    rows: torch.Tensor,
    answers: torch.Tensor,
    of_token: torch.Tensor,
    weights: torch.Tensor,
    start: int,
) -> None:
    """As token_dispatch.add_answers: rows BF16 [T, H] and answers BF16 [S, H], which are contiguous; a
    token's slots int64 [T, k], ascending, and the weights of all slots."""
    if not (rows.dtype == answers.dtype == torch.bfloat16):
        raise TypeError(f"answers {answers.dtype} to rows {rows.dtype}: expected BF16")
    tokens, width = rows.shape
    block = min(_WIDEST, 1 << (width - 1).bit_length())
    kernel: Any = _add_answers
    kernel[tokens, -(-width // block)](
        rows, answers, of_token, weights, start, start + answers.shape[0], width,
        COUNT=of_token.shape[1], BLOCK=block,
    )  # fmt: skip


_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Rows that a program works on. In the interpreter a program is expensive, an element cheap.
_ROWS = 256 if _INTERPRETED else 32
_WITH_SPACE = ((9, 0), (10, 0), (10, 3))  # compute capabilities
_TALL = 128  # rows of Hessians that a program multiplies at a time
WIDEST = 256  # columns of a block, or of a group, that a program can hold
# Products and sums rounded one after the other, as llm-compressor's operators round them.
_APART = {} if _INTERPRETED else {"enable_fp_fusion": False}
_HELD = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@triton.jit  # type: ignore[untyped-decorator]
def _whole(value: tl.tensor) -> tl.tensor:
    """To a whole number below 2^22, ties to even."""
    return (value + 12582912.0) - 12582912.0


@triton.jit  # type: ignore[untyped-decorator]
def _bounded(value: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """To the nearest code. Bounds are whole numbers, so what is beyond them may be cut off first."""
    return _whole(tl.minimum(tl.maximum(value, low), high))


@triton.jit  # type: ignore[untyped-decorator]
def _held(value: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """As a scale's dtype holds it."""
    if DTYPE == 0:
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True)
    if DTYPE == 1:
        return value.to(tl.float16).to(tl.float32)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _gptq_block(
    left: tl.tensor, factor: tl.tensor, groups: tl.tensor, scale: tl.tensor, low: tl.tensor,
    high: tl.tensor, made: tl.tensor, lost: tl.tensor, columns: tl.tensor, rows: tl.tensor,
    count: tl.tensor, start: tl.tensor, width: tl.tensor, BOUNDS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, BLOCK)
    here = column < width
    at = batch * columns + start
    part = tl.load(
        left + (at + column)[:, None] * rows + row[None, :],
        mask=here[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    for i in range(width):
        group = batch * count + tl.load(groups + at + i)
        step = tl.load(scale + group * rows + row, mask=inside, other=1.0)
        if BOUNDS:
            least = tl.load(low + group * rows + row, mask=inside, other=0.0)
            most = tl.load(high + group * rows + row, mask=inside, other=0.0)
        else:
            least = tl.load(low)
            most = tl.load(high)
        line = (at + i) * columns + start
        own = tl.load(factor + line + i)
        others = tl.load(factor + line + column, mask=here & (column > i), other=0.0)
        value = tl.sum(tl.where(column[:, None] == i, part, 0.0), axis=0)
        code = _bounded(tl.div_rn(value, step), least, most)
        error = tl.div_rn(value - code * step, own + tl.zeros_like(value))
        tl.store(made + (at + i) * rows + row, code, mask=inside)
        tl.store(lost + (batch * width + i) * rows + row, error, mask=inside)
        part -= others[:, None] * error[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _parity_block(
    left: tl.tensor, factor: tl.tensor, groups: tl.tensor, scale: tl.tensor, zero: tl.tensor,
    made: tl.tensor, lost: tl.tensor, columns: tl.tensor, rows: tl.tensor, count: tl.tensor,
    start: tl.tensor, width: tl.tensor, low: tl.tensor, high: tl.tensor, ZERO: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, BLOCK)
    here = column < width
    at = batch * columns + start
    part = tl.load(
        left + (at + column)[:, None] * rows + row[None, :],
        mask=here[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    for i in range(width):
        group = batch * count + tl.load(groups + at + i)
        step = tl.load(scale + group * rows + row, mask=inside, other=1.0)
        line = (at + i) * columns + start
        own = tl.load(factor + line + i)
        others = tl.load(factor + line + column, mask=here & (column > i), other=0.0)
        value = tl.sum(tl.where(column[:, None] == i, part, 0.0), axis=0)
        code = tl.div_rn(value, step)
        if ZERO:
            nothing = tl.load(zero + group * rows + row, mask=inside, other=0).to(tl.float32)
            meant = _held((_bounded(code + nothing, low, high) - nothing) * step, DTYPE)
            code = _bounded(tl.div_rn(meant, step) + nothing, low, high)
        else:
            meant = _held(_bounded(code, low, high) * step, DTYPE)
            code = _bounded(tl.div_rn(meant, step), low, high)
        error = tl.div_rn(value - meant, own + tl.zeros_like(value))
        tl.store(made + (at + i) * rows + row, code.to(tl.int8), mask=inside)
        tl.store(lost + (batch * width + i) * rows + row, error, mask=inside)
        part -= others[:, None] * error[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _descent_block(
    slope: tl.tensor, hessian: tl.tensor, scale: tl.tensor, low: tl.tensor, high: tl.tensor,
    steps: tl.tensor, moved: tl.tensor, columns: tl.tensor, rows: tl.tensor, count: tl.tensor,
    wide: tl.tensor, start: tl.tensor, width: tl.tensor, BOUNDS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, BLOCK)
    here = column < width
    at = batch * columns + start
    near = tl.load(
        slope + (at + column)[:, None] * rows + row[None, :],
        mask=here[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    for i in range(width):
        group = batch * count + (start + i) // wide
        step = tl.load(scale + group * rows + row, mask=inside, other=1.0)
        if BOUNDS:
            least = tl.load(low + group * rows + row, mask=inside, other=0.0)
            most = tl.load(high + group * rows + row, mask=inside, other=0.0)
        else:
            least = tl.load(low)
            most = tl.load(high)
        line = (at + i) * columns + start
        own = tl.load(hessian + line + i)
        others = tl.load(hessian + line + column, mask=here & (column > i), other=0.0)
        old = tl.load(steps + (at + i) * rows + row, mask=inside, other=0.0)
        pull = tl.sum(tl.where(column[:, None] == i, near, 0.0), axis=0)
        new = _bounded(old - tl.div_rn(pull, own * step), least, most)
        change = (new - old) * step
        tl.store(steps + (at + i) * rows + row, new, mask=inside)
        tl.store(moved + (batch * width + i) * rows + row, change, mask=inside)
        near += others[:, None] * change[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _lost(
    cut: tl.tensor, share: tl.tensor, tried: tl.tensor, low: tl.tensor, high: tl.tensor
) -> tl.tensor:
    wide = tried[None, :] + tl.zeros_like(cut)
    off = _bounded(tl.div_rn(cut, wide), low, high) * wide - cut
    return tl.sum(off * off * share[:, None], axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _search(
    weight: tl.tensor, share: tl.tensor, scale: tl.tensor, ladder: tl.tensor, low: tl.tensor,
    high: tl.tensor, found: tl.tensor, rows: tl.tensor, width: tl.tensor, rungs: tl.tensor,
    half: tl.tensor, SIGNED: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, BLOCK)
    here = column < width
    at = group * width + column
    cut = tl.load(
        weight + at[:, None] * rows + row[None, :], mask=here[:, None] & inside[None, :], other=0.0
    )
    weighs = tl.load(share + at, mask=here, other=0.0)
    least, most = tl.load(low), tl.load(high)
    first = tl.load(scale + group * rows + row, mask=inside, other=1.0)
    largest = tl.div_rn(tl.max(tl.abs(cut), axis=0), half + tl.zeros_like(first))
    best = first
    loss = _lost(cut, weighs, first, least, most)
    for rung in range(rungs):
        tried = _held(largest * tl.load(ladder + rung), DTYPE)
        usable = (tl.abs(tried) > 0) if SIGNED else (tried > 0)
        tried = tl.where(usable & (tl.abs(tried) < float("inf")), tried, first)
        now = _lost(cut, weighs, tried, least, most)
        wins = now < loss
        best, loss = tl.where(wins, tried, best), tl.where(wins, now, loss)
    tl.store(found + group * rows + row, best, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _normal(
    steps: tl.tensor, hessian: tl.tensor, found: tl.tensor, columns: tl.tensor, rows: tl.tensor,
    count: tl.tensor, WIDTH: tl.constexpr, TALL: tl.constexpr, ROWS: tl.constexpr,
    HALVES: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    inside = row < rows
    own = group * WIDTH + tl.arange(0, WIDTH)
    lines = batch * columns
    right = tl.load(
        steps + (lines + own)[:, None] * rows + row[None, :], mask=inside[None, :], other=0.0
    )
    if HALVES:
        right = right.to(tl.bfloat16)
    for start in range(group * WIDTH // TALL * TALL, columns, TALL):
        column = start + tl.arange(0, TALL)
        here = column < columns
        part = tl.load(
            hessian + (lines + column)[:, None] * columns + own[None, :],
            mask=here[:, None],
            other=0.0,
        )
        if HALVES:
            high = part.to(tl.bfloat16)
            seen = tl.dot(high, right)
            seen = tl.dot((part - high.to(tl.float32)).to(tl.bfloat16), right, seen)
        else:
            seen = tl.dot(part, right, input_precision="ieee")
        seen *= tl.load(
            steps + (lines + column)[:, None] * rows + row[None, :],
            mask=here[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        each = tl.sum(tl.reshape(seen, (TALL // WIDTH, WIDTH, ROWS)), axis=1)
        other = start // WIDTH + tl.arange(0, TALL // WIDTH)
        at = (batch * count + other) * count + group
        tl.store(
            found + at[:, None] * rows + row[None, :], each,
            mask=(other < count)[:, None] & inside[None, :],
        )  # fmt: skip


@there
def gptq_block(
    left: torch.Tensor, factor: torch.Tensor, groups: torch.Tensor, scale: torch.Tensor, grid: Grid,
    made: torch.Tensor, start: int, stop: int,
) -> torch.Tensor:  # fmt: skip
    """Codes of the columns [start, stop) of `left` [B, K, N] into `made`, under scales [B, G, N] of the
    groups int64 [B, K]; what goes on inside the block is left out of `left`. Returns the errors
    [B, stop - start, N], each over its factor [B, K, K]."""
    batch, columns, rows = left.shape
    lost = left.new_empty(batch, stop - start, rows)
    low, high, bounds = _bounds(grid, left)
    _gptq_block[_programs(rows, batch)](
        left, factor, groups, scale, low, high, made, lost, columns, rows, scale.shape[1], start,
        stop - start, BOUNDS=bounds, BLOCK=_power(stop - start), ROWS=_ROWS,
    )  # fmt: skip
    return lost


@there
def parity_block(
    left: torch.Tensor, factor: torch.Tensor, groups: torch.Tensor, lattice: Lattice,
    made: torch.Tensor, start: int, stop: int,
) -> torch.Tensor:  # fmt: skip
    """Codes of the columns [start, stop) of `left` [B, K, N] into `made` int8, with the groups int64
    [B, K]; what goes on inside the block is left out of `left`. Returns the errors [B, stop - start, N],
    each over its factor [B, K, K]."""
    batch, columns, rows = left.shape
    lost = left.new_empty(batch, stop - start, rows)
    zero = lattice.scale if lattice.zero is None else lattice.zero
    _parity_block[_programs(rows, batch)](
        left, factor, groups.contiguous(), lattice.scale, zero, made, lost, columns, rows,
        lattice.scale.shape[1], start, stop - start, float(lattice.low), float(lattice.high),
        ZERO=lattice.zero is not None, DTYPE=_HELD[lattice.dtype], BLOCK=_power(stop - start),
        ROWS=_ROWS, **_APART,
    )  # fmt: skip
    return lost


@there
def descent_block(
    slope: torch.Tensor, hessian: torch.Tensor, scale: torch.Tensor, grid: Grid, steps: torch.Tensor,
    start: int, stop: int,
) -> torch.Tensor:  # fmt: skip
    """Better codes for the columns [start, stop) in `steps` [B, K, N], given the loss's `slope`
    [B, K, N] before. Returns by how much what they mean has changed [B, stop - start, N]."""
    batch, columns, rows = slope.shape
    moved = slope.new_empty(batch, stop - start, rows)
    low, high, bounds = _bounds(grid, slope)
    _descent_block[_programs(rows, batch)](
        slope, hessian, scale, low, high, steps, moved, columns, rows, scale.shape[1], grid.width,
        start, stop - start, BOUNDS=bounds, BLOCK=_power(stop - start), ROWS=_ROWS,
    )  # fmt: skip
    return moved


@there
def search(
    weight: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor, grid: Grid,
    ladder: torch.Tensor, half: float,
) -> torch.Tensor:  # fmt: skip
    """For each group of `weight` [B, K, N] the best of `scale` [B, G, N] and `ladder` times its largest
    over `half`, columns weighted by `weights` [B, K]. Groups have WIDEST columns at the most, and codes
    the same bounds everywhere."""
    batch, columns, rows = weight.shape
    found = torch.empty_like(scale, memory_format=torch.contiguous_format)
    low, high, _ = _bounds(grid, weight)
    _search[_programs(rows, batch * (columns // grid.width))](
        weight.contiguous(), weights.contiguous(), scale.contiguous(), ladder, low, high, found, rows,
        grid.width, ladder.shape[0], half, SIGNED=grid.signed, DTYPE=_HELD[grid.dtype],
        BLOCK=_power(grid.width), ROWS=_ROWS,
    )  # fmt: skip
    return found


def can_multiply(width: int) -> bool:
    """Return whether `normal` takes groups of so many columns."""
    return width in (16, 32, 64, 128)


@there
def normal(steps: torch.Tensor, hessian: torch.Tensor, width: int) -> torch.Tensor:
    """Of whole numbers up to 256 [B, K, N] and Hessians float32 [B, K, K]: float32 [B, N, G, G], for
    each row c_a H_ab c_b of its groups a and b where a is b or after it; the upper half may hold
    anything. Of H two numbers of BF16 each are multiplied, and added up in float32 (Triton's interpreter
    has no BF16 to multiply). Nothing of the size of `steps` is written in between."""
    batch, columns, rows = steps.shape
    count = columns // width
    found = steps.new_zeros(batch, count, count, rows)
    some = _ROWS if _INTERPRETED else 2 * _ROWS
    options = {} if _INTERPRETED else normal_options(torch.cuda.get_device_capability(steps.device))
    _normal[triton.cdiv(rows, some), count, batch](
        steps.contiguous(),
        hessian,
        found,
        columns,
        rows,
        count,
        WIDTH=width,
        TALL=_TALL,
        ROWS=some,
        HALVES=not _INTERPRETED,
        **options,
    )
    return found.permute(0, 3, 1, 2)


def normal_options(capability: tuple[int, int]) -> dict[str, int]:
    """Return how `_normal` is launched. Loads run ahead on an H100 or a B200: that takes 176 KB of
    shared memory for groups of 128, and a program of other GPUs can have 99 or 163 (CUDA C++ Programming
    Guide 13, table of technical specifications)."""
    return {} if capability in _WITH_SPACE else {"num_warps": 8, "num_stages": 1}


def _bounds(grid: Grid, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Lowest and highest codes, and whether these are of each group and row."""
    bounds = grid.low.shape[-1] != 1
    return (
        grid.low.to(like.device, torch.float32).contiguous(),
        grid.high.to(like.device, torch.float32).contiguous(),
        bounds,
    )


def _programs(rows: int, batch: int) -> tuple[int, int]:
    return (triton.cdiv(rows, _ROWS), batch)


def _power(width: int) -> int:
    found: Any = triton.next_power_of_2(width)
    return int(found)


# A product added to a float32 matrix in place, as a Triton kernel: each number of that is read and
# written once. As operators of torch it is twelve launches, and each is read or written four times.


_SIDE, _DEEP = 128, 64  # of what a program adds to, and what it multiplies at a time
OPTIONS = {"num_warps": 8, "num_stages": 2}


@triton.jit  # type: ignore[untyped-decorator]
def _add_product(
    to: tl.tensor, one: tl.tensor, other: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    inner: tl.tensor, sign: tl.tensor, to_batch: tl.tensor, to_row: tl.tensor, one_batch: tl.tensor,
    one_row: tl.tensor, one_inner: tl.tensor, other_batch: tl.tensor, other_inner: tl.tensor,
    SIDE: tl.constexpr, DEEP: tl.constexpr, HALVES: tl.constexpr,
) -> None:  # fmt: skip
    column = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    row = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    batch = tl.program_id(2).to(tl.int64)
    within = row < rows
    inside = column < columns
    found = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, inner, DEEP):
        depth = start + tl.arange(0, DEEP)
        left = tl.load(
            one + batch * one_batch + row[:, None] * one_row + depth[None, :] * one_inner,
            mask=within[:, None] & (depth < inner)[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            other + batch * other_batch + depth[:, None] * other_inner + column[None, :],
            mask=(depth < inner)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        if HALVES:
            high, above = left.to(tl.bfloat16), right.to(tl.bfloat16)
            low = (left - high.to(tl.float32)).to(tl.bfloat16)
            below = (right - above.to(tl.float32)).to(tl.bfloat16)
            found = tl.dot(high, above, found)
            found = tl.dot(high, below, found)
            found = tl.dot(low, above, found)
        else:
            found = tl.dot(left, right, found, input_precision="ieee")
    at = to + batch * to_batch + row[:, None] * to_row + column[None, :]
    mask = within[:, None] & inside[None, :]
    tl.store(at, tl.load(at, mask=mask, other=0.0) + sign * found, mask=mask)


@there
def add_product(to: torch.Tensor, one: torch.Tensor, other: torch.Tensor, sign: int) -> None:
    """As kernel_choice.add_product, of float32 `to` [B, N, M], `one` [B, N, K] and `other` [B, K, M],
    whose rows, but those of `one`, are contiguous. Triton's interpreter has no BF16 to multiply."""
    if to.stride(2) != 1 or other.stride(2) != 1:
        raise ValueError(f"expected contiguous rows, found strides {to.stride()}, {other.stride()}")
    batch, rows, columns = to.shape
    kernel: Any = _add_product
    kernel[triton.cdiv(columns, _SIDE), triton.cdiv(rows, _SIDE), batch](
        to, one, other, rows, columns, one.shape[2], float(sign), to.stride(0), to.stride(1),
        *one.stride(), other.stride(0), other.stride(1), SIDE=_SIDE, DEEP=_DEEP,
        HALVES=not _INTERPRETED, **OPTIONS,
    )  # fmt: skip
