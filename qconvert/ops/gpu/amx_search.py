"""AMX's search for steps as a Triton kernel: `amx_search` of `qconvert.ops.compiled.loops.amx`, a
program for some rows at once, the columns of a row in the 64 lanes that sums are told to be in.

A sum of float64 goes over columns 64 apart in their order, then the upper half of the lanes is added to
the lower: two numbers at a time, so that their order is of no matter. What a histogram counts adds up
exactly (formats/amx/clip.py), in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from qconvert.ops.gpu.rounding import INTERPRETED, OPTIONS, from_bf16, whole

if TYPE_CHECKING:
    import numpy as np

    from qconvert.ops.gpu.staging import Staging

    Array = np.ndarray[tuple[int, ...], np.dtype[Any]]

_LANES = tl.constexpr(64)
_BINS = tl.constexpr(256)
# Rungs of the ladder that are weighed at once: with all, a program's 256 bins fill its registers.
_AT_ONCE = 8
_K_BLOCK = 3584  # formats/amx/tiles.py
# Rows of a program. In the interpreter a program is expensive, an element cheap.
_ROWS = 64 if INTERPRETED else 2
_STEPS = 16 if INTERPRETED else 4
_ONE_127TH = 0.007874015718698502  # fp32(1/127), bits 0x3C010204


@triton.jit  # type: ignore[untyped-decorator]
def _folded(lanes: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Sums [ROWS, 64] to one a row: the upper half to the lower until one is left."""
    lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 32]), axis=1)
    lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 16]), axis=1)
    lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 8]), axis=1)
    lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 4]), axis=1)
    lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, 2]), axis=1)
    return tl.sum(lanes, axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def _lanes(
    weight: tl.tensor, row: tl.tensor, here: tl.tensor, width: tl.tensor, first: tl.tensor
) -> tl.tensor:
    """Bits of 64 columns of each row, from `first` on."""
    at = row[:, None] * width + first + tl.arange(0, _LANES)[None, :]
    return tl.load(weight + at, mask=here[:, None], other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _code(value: tl.tensor, inverse: tl.tensor, MOST: tl.constexpr) -> tl.tensor:
    return whole(tl.minimum(tl.maximum(value * inverse, -MOST), MOST))


@triton.jit  # type: ignore[untyped-decorator]
def _inverse(step: tl.tensor) -> tl.tensor:
    safe = tl.where(step > 0, step, 1.0)
    return tl.where(step > 0, tl.div_rn(tl.full(step.shape, 1.0, tl.float32), safe), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _error(
    weight: tl.tensor,
    row: tl.tensor,
    here: tl.tensor,
    width: tl.tensor,
    step: tl.tensor,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """The sum of squared errors of each row under its step."""
    inverse = _inverse(step)
    total = tl.zeros([ROWS, _LANES], tl.float64)
    for first in range(0, width, _LANES):
        value = from_bf16(_lanes(weight, row, here, width, first))
        off = value - _code(value, inverse[:, None], MOST) * step[:, None]
        total += (off * off).to(tl.float64)
    return _folded(total, ROWS)


@triton.jit  # type: ignore[untyped-decorator]
def _better_step(
    weight: tl.tensor,
    row: tl.tensor,
    here: tl.tensor,
    width: tl.tensor,
    step: tl.tensor,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """The best step for the codes that a step gives: weights times codes by squared codes."""
    inverse = _inverse(step)
    along = tl.zeros([ROWS, _LANES], tl.float64)
    across = tl.zeros([ROWS, _LANES], tl.float64)
    for first in range(0, width, _LANES):
        value = from_bf16(_lanes(weight, row, here, width, first))
        code = _code(value, inverse[:, None], MOST)
        along += (value * code).to(tl.float64)
        across += (code * code).to(tl.float64)
    below = _folded(across, ROWS)
    found = (_folded(along, ROWS) / tl.where(below > 0, below, 1.0)).to(tl.float32)
    return tl.where(below > 0, found, step)


@triton.jit  # type: ignore[untyped-decorator]
def _from_histogram(
    weight: tl.tensor,
    row: tl.tensor,
    here: tl.tensor,
    width: tl.tensor,
    amax: tl.tensor,
    steps: tl.tensor,
    errors: tl.tensor,
    rungs: tl.tensor,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> tl.tensor:
    """The step of the ladder that loses the least on the bins that a row's weights are in."""
    exponent = amax.to(tl.int32, bitcast=True) >> 23
    low = (exponent - 7) * 128
    counts = tl.zeros([ROWS * _BINS], tl.int32)
    own = tl.arange(0, ROWS)[:, None] * _BINS
    for first in range(0, width, _LANES):
        size = _lanes(weight, row, here, width, first).to(tl.int32) & 0x7FFF
        # Those of rows that are declined may lie beyond the last bin.
        place = own + tl.minimum(tl.maximum((size - low[:, None]) >> 2, 0), _BINS - 1)
        counts += tl.histogram(tl.reshape(place, [ROWS * _LANES]), ROWS * _BINS)
    # The first bin holds all that hardly has a say.
    bins = tl.arange(0, _BINS)
    held = tl.where(bins[None, :] > 0, tl.reshape(counts, [ROWS, _BINS]), 0).to(tl.float64)
    unit = ((exponent.to(tl.int64) + (1023 - 126)) << 52).to(tl.float64, bitcast=True)
    widest = amax.to(tl.float64) / unit / MOST * (1 + 1e-6)
    least = tl.full([ROWS], float("inf"), tl.float64)
    chosen = tl.zeros([ROWS], tl.float64) + tl.load(steps)
    some = tl.arange(0, AT_ONCE)
    for first in range(0, rungs, AT_ONCE):
        error = tl.load(errors + bins[:, None] * rungs + first + some[None, :])
        total = tl.sum(held[:, :, None] * error[None, :, :], axis=1)
        step = tl.load(steps + first + some)
        total = tl.where(step[None, :] <= widest[:, None], total, float("inf"))
        best = tl.min(total, axis=1)
        # The first of equal ones; steps fall, so it is the largest.
        of_best = tl.max(tl.where(total == best[:, None], step[None, :], 0.0), axis=1)
        chosen = tl.where(best < least, of_best, chosen)
        least = tl.minimum(best, least)
    return (chosen * unit).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _amx(
    weight: tl.tensor,
    steps: tl.tensor,
    errors: tl.tensor,
    target: tl.tensor,
    scale: tl.tensor,
    flag: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    rungs: tl.tensor,
    one_127th: tl.tensor,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STEPS: tl.constexpr,
    HEIGHT: tl.constexpr,
    PER_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    size = tl.zeros([ROWS], tl.int32)
    for first in range(0, width, _LANES):
        bits = _lanes(weight, row, here, width, first).to(tl.int32) & 0x7FFF
        size = tl.maximum(size, tl.max(bits, axis=1))
    # NaN, infinity, and denormals or nearly: (127 - 110) << 7 is 2^-110.
    wrong = (size >= 0x7F80) | ((size > 0) & (size < 2176))
    tl.store(flag + tl.zeros([ROWS], tl.int32), 1, mask=here & wrong)
    size = tl.where(wrong, 0, size)
    amax = from_bf16(size)
    if MOST == 7:
        # fp32(amax / 112) as a product, as numpy's form has it, in sixteenths of a step.
        one_112th = tl.full([ROWS], 1.0, tl.float64) / 112.0
        plain = (amax.to(tl.float64) * one_112th).to(tl.float32) * 16.0
    else:
        plain = amax * one_127th
    safe = amax >= 8.881784197001252e-16  # 2^-50
    step = _from_histogram(
        weight, row, here, width, amax, steps, errors, rungs, MOST, ROWS, AT_ONCE
    )
    best = plain
    least = _error(weight, row, here, width, plain, MOST, ROWS)
    for turn in tl.static_range(3):
        error = _error(weight, row, here, width, step, MOST, ROWS)
        better = safe & (error < least)
        best = tl.where(better, step, best)
        least = tl.where(better, error, least)
        if turn < 2:
            step = _better_step(weight, row, here, width, step, MOST, ROWS)
    tl.store(scale + row, best * 0.0625 if MOST == 7 else best, mask=here)
    inverse = _inverse(best)
    # A word's bytes are codes side by side; of four bits the upper ones are of 64 columns on.
    EACH: tl.constexpr = 8 if MOST == 7 else 4
    code = tl.arange(0, EACH)
    shift = (code % 4) * 8 + (code // 4) * 4
    word = tl.arange(0, 16)
    inside = (4 * word[:, None] + (code % 4) + 64 * (code // 4))[None, None, :, :]
    count = width // HEIGHT
    block = row // HEIGHT * HEIGHT
    tile = row // 32 * 32
    line = (row % 32 // 16) * 256 + row % 16
    for first in range(0, count, STEPS):
        step_at = first + tl.arange(0, STEPS)
        mask = here[:, None] & (step_at < count)[None, :]
        column = (step_at * HEIGHT)[None, :, None, None] + inside
        at = row[:, None, None, None] * width + column
        value = from_bf16(tl.load(weight + at, mask=mask[:, :, None, None], other=0))
        whole_code = _code(value, inverse[:, None, None, None], MOST).to(tl.int32)
        held = (whole_code & (15 if MOST == 7 else 255)) << shift[None, None, None, :]
        words = tl.sum(held, axis=3)
        k_block = step_at // PER_BLOCK * PER_BLOCK
        in_block = tl.minimum(count - k_block, PER_BLOCK)
        goal = block[:, None] * count * 16 + (HEIGHT * k_block)[None, :] * 16
        goal += (tile - block)[:, None] * in_block[None, :] * 16
        goal += (step_at - k_block)[None, :] * 512 + line[:, None]
        tl.store(target + goal[:, :, None] + word[None, None, :] * 16, words, mask=mask[:, :, None])


# The ladders that are on a device, by it and the largest code.
_LADDERS: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}


def _ladder(
    device: torch.device, largest_code: int, steps: Array, errors: Array
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps [n] and losses [256, n] on the device, n a multiple of _AT_ONCE: those that are not there
    are larger than any that is usable."""
    found = _LADDERS.get((device, largest_code))
    if found is None:
        more = -steps.size % _AT_ONCE
        rungs = torch.nn.functional.pad(torch.from_numpy(steps), (0, more), value=float("inf"))
        losses = torch.nn.functional.pad(torch.from_numpy(errors), (0, more))
        found = rungs.to(device), losses.to(device)
        _LADDERS[device, largest_code] = found
    return found


def amx_search(
    staging: Staging, bits: Array, first: int, last: int, largest_code: int, steps: Array,
    errors: Array, target: Array, scale: Array,
) -> bool:  # fmt: skip
    """`amx_search` of `qconvert.ops.compiled.loops.amx`, with its arguments."""
    height = 128 if largest_code == 7 else 64
    blocks, width = bits.shape[0] // height, last - first

    def launch(
        ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], flag: torch.Tensor
    ) -> None:
        rows = ins[0].shape[0] * height
        rungs, losses = _ladder(staging.device, largest_code, steps, errors)
        _amx[(triton.cdiv(rows, _ROWS),)](
            ins[0], rungs, losses, *outs, flag, rows, width, rungs.numel(), _ONE_127TH,
            largest_code, _ROWS, _AT_ONCE, _STEPS, height, _K_BLOCK // height, **OPTIONS,
        )  # fmt: skip

    # Rows of a block lie together in the result: they travel together.
    weight = bits.reshape(blocks, height, -1)[:, :, first:last]
    made = [target.reshape(blocks, -1), scale.reshape(blocks, height)]
    return staging.run([weight], made, launch)
