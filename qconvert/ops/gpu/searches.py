"""The searches as Triton kernels: what `qconvert.ops.compiled.loops` does in `search` and `fp4`, a
program for some groups at once, a candidate a lane.

Each product and sum is rounded by itself (`enable_fp_fusion=False`), quotients are IEEE's, and bf16 and
fp16 are rounded on integers, so that bytes are numpy's. Errors are added column after column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from qconvert.ops.gpu.rounding import INTERPRETED, OPTIONS, bf16, from_bf16, held, whole

if TYPE_CHECKING:
    import numpy as np

    from qconvert.ops.gpu.staging import Staging

    Array = np.ndarray[tuple[int, ...], np.dtype[Any]]

_LANES = 64
_RUNGS = tl.constexpr(48)
# Groups that a program works on. In the interpreter a program is expensive, an element cheap.
_GROUPS = 256 if INTERPRETED else 16
_COLUMNS = 64
_BLOCKS = 4096 if INTERPRETED else 64


@triton.jit  # type: ignore[untyped-decorator]
def _ints(
    weight: tl.tensor,
    ladder: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    flag: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    least_size: tl.tensor,
    most_step: tl.tensor,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    SIGNED: tl.constexpr,
    DTYPE: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    here = group < count
    lane = tl.arange(0, LANES)
    inside = tl.arange(0, COLUMNS)
    most = tl.full([GROUPS], 0.0, tl.float32)
    least = tl.full([GROUPS], 0.0, tl.float32)
    broken = tl.full([GROUPS], 0, tl.int32)
    for first in range(0, width, COLUMNS):
        column = first + inside
        mask = here[:, None] & (column < width)[None, :]
        bits = tl.load(weight + group[:, None] * width + column[None, :], mask=mask, other=0)
        broken = tl.maximum(broken, tl.max(((bits & 0x7FFF) >= 0x7F80).to(tl.int32), axis=1))
        value = from_bf16(bits)
        # NaN and infinity are declined: what they compare to is of no matter.
        most = tl.maximum(most, tl.max(value, axis=1))
        least = tl.minimum(least, tl.min(value, axis=1))
    size = tl.maximum(most, -least)
    high_end = most[:, None] * tl.load(ladder + lane, mask=lane < _RUNGS, other=1.0)[None, :]
    low_end = least[:, None] * tl.load(ladder + lane, mask=lane < _RUNGS, other=1.0)[None, :]
    middle = tl.zeros([GROUPS, LANES], tl.float32)
    steps = tl.full([GROUPS, LANES], HIGH - LOW, tl.float32)
    if SYMMETRIC:
        step = held(tl.div_rn(tl.maximum(high_end, -low_end), steps * 0.5), DTYPE)
    else:
        spread = high_end - low_end
        if DTYPE == 0:
            spread = bf16(spread)
        step = held(tl.div_rn(spread, steps), DTYPE)
    usable = (step > 0) & (step <= most_step)
    step = tl.where(usable, step, 1.0)
    if not SYMMETRIC:
        middle = tl.div_rn(low_end, step)
        if DTYPE == 0:
            middle = bf16(middle)
        middle = LOW - middle
        if DTYPE == 0:
            middle = bf16(middle)
        middle = whole(tl.maximum(tl.minimum(middle, HIGH), LOW))
    first_usable = tl.max((usable & (lane == 0)[None, :]).to(tl.int32), axis=1)
    wrong = (broken > 0) | ((size > 0) & ((size < least_size) | (first_usable == 0)))
    tl.store(flag + tl.zeros([GROUPS], tl.int32), 1, mask=here & wrong)
    inverse = tl.div_rn(tl.full([GROUPS, LANES], 1.0, tl.float32), step)
    low, high = LOW - middle, HIGH - middle
    total = tl.zeros([GROUPS, LANES], tl.float32)
    turned = tl.zeros([GROUPS, LANES], tl.float32)
    for one in range(width):
        bits = tl.load(weight + group * width + one, mask=here, other=0)
        quotient = from_bf16(bits)[:, None] * inverse
        code = whole(tl.minimum(tl.maximum(quotient, low), high))
        off = quotient - code
        total = total + off * off
        if SIGNED:
            code = whole(tl.minimum(tl.maximum(-quotient, low), high))
            off = -quotient - code
            turned = turned + off * off
    wide = step.to(tl.float64)
    error = total.to(tl.float64) * (wide * wide)
    tried = usable & (lane < _RUNGS)[None, :]
    error = tl.where(tried, error, float("inf"))
    best = tl.min(error, axis=1)
    # The first of equal ones.
    chosen = tl.min(tl.where(error == best[:, None], lane[None, :], LANES), axis=1)
    sign = tl.full([GROUPS], 1.0, tl.float32)
    if SIGNED:
        error = tl.where(tried, turned.to(tl.float64) * (wide * wide), float("inf"))
        least_error = tl.min(error, axis=1)
        other = tl.min(tl.where(error == least_error[:, None], lane[None, :], LANES), axis=1)
        below = least_error < best
        chosen = tl.where(below, other, chosen)
        sign = tl.where(below, -1.0, 1.0)
    mine = lane[None, :] == chosen[:, None]
    nothing = size == 0
    own_step = tl.sum(tl.where(mine, step, 0.0), axis=1) * sign
    own_inverse = tl.sum(tl.where(mine, inverse, 0.0), axis=1) * sign
    own_middle = tl.sum(tl.where(mine, middle, 0.0), axis=1)
    own_middle = tl.where(nothing, 0.0, own_middle)
    tl.store(scale + group, tl.where(nothing, eps, own_step), mask=here)
    tl.store(zero + group, own_middle.to(tl.int32).to(tl.int8), mask=here)
    for first in range(0, width, COLUMNS):
        column = first + inside
        mask = here[:, None] & (column < width)[None, :]
        at = group[:, None] * width + column[None, :]
        value = from_bf16(tl.load(weight + at, mask=mask, other=0))
        quotient = value * own_inverse[:, None]
        code = tl.minimum(
            tl.maximum(quotient, LOW - own_middle[:, None]), HIGH - own_middle[:, None]
        )
        code = whole(code) + own_middle[:, None]
        code = tl.where(nothing[:, None], 0.0, code)
        tl.store(codes + at, code.to(tl.int32).to(tl.int8), mask=mask)


_EPS = (2.0**-7, 2.0**-10, 2.0**-23)
_MOST_STEP = (3.0e38, 65504.0, 3.0e38)


def ints_search(
    staging: Staging, weight: Array, ladder: Array, low: int, high: int, symmetric: bool, signed: bool,
    dtype: int, codes: Array, scale: Array, zero: Array,
) -> bool:  # fmt: skip
    """`ints_search` of `qconvert.ops.compiled.loops.search`, with its arguments."""
    rungs = torch.ones(_LANES)
    rungs[: ladder.size] = torch.from_numpy(ladder)
    rungs = rungs.to(staging.device)

    def launch(
        ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], flag: torch.Tensor
    ) -> None:
        count, width = ins[0].shape
        _ints[(triton.cdiv(count, _GROUPS),)](
            ins[0], rungs, *outs, flag, count, width, _EPS[dtype], 2.0**-100, _MOST_STEP[dtype],
            low, high, symmetric, signed, dtype, _GROUPS, _LANES, _COLUMNS, **OPTIONS,
        )  # fmt: skip

    return staging.run([weight], [codes, scale, zero], launch)


@triton.jit  # type: ignore[untyped-decorator]
def _e2m1(value: tl.tensor) -> tl.tensor:
    """The code of a number: `to_codes` of ops/fp4.py."""
    size = tl.abs(value)
    code = tl.where(value < 0, 8, 0)
    code += (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    return code + (size > 5.0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _nvfp4(
    weight: tl.tensor,
    packed: tl.tensor,
    scales: tl.tensor,
    flag: tl.tensor,
    count: tl.tensor,
    own: tl.tensor,
    MODELOPT: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    here = block < count
    lane = tl.arange(0, 16)
    bits = tl.load(weight + block[:, None] * 16 + lane[None, :], mask=here[:, None], other=0)
    size = tl.max((bits & 0x7FFF).to(tl.int32), axis=1)
    tl.store(flag + tl.zeros([BLOCKS], tl.int32), 1, mask=here & (size >= 0x7F80))
    each = from_bf16(size)
    ones = tl.full([BLOCKS], 1.0, tl.float32)
    if MODELOPT:
        each = tl.div_rn(each, ones * 6.0 * own)
        each = tl.where(each != 0, each, 1.0)
        each = tl.where(each > 0.001953125, each, 0.001953125)
    else:
        each = bf16(tl.div_rn(each, ones * 6.0)) * own
    each = tl.where(each < 448.0, each, 448.0)
    # `e4m3` of ops/fp4.py.
    power = tl.maximum(each.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    rounder = (power + (20 << 23)).to(tl.float32, bitcast=True)
    both = each + rounder
    code = ((power >> 23) - 121) * 8 + (both.to(tl.int32, bitcast=True) & 0xFF)
    each = both - rounder
    if MODELOPT:
        factor = each * own
    else:
        code = tl.where(each == 0, 0x20, code)
        factor = tl.div_rn(tl.where(each == 0, 0.125, each), ones * own)
    usual = (factor > 7.52316384526264e-37) & (factor < 1.329227995784916e36)
    other = tl.where(lane < 9, lane, 8 - lane)[None, :] + code[:, None]
    usable = usual[:, None] & (other >= 1) & (other <= 0x7E)
    known = tl.where(usable, other, 0x38)
    tried = (known << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    all_ones = tl.full([BLOCKS, 16], 1.0, tl.float32)
    tried = tried * own if MODELOPT else tl.div_rn(tried, all_ones * own)
    tried = tl.where((lane == 0)[None, :], factor[:, None], tried)
    inverse = tl.div_rn(all_ones, tried)
    total = tl.zeros([BLOCKS, 16], tl.float32)
    for column in tl.static_range(16):
        one = tl.load(weight + block * 16 + column, mask=here, other=0)
        quotient = from_bf16(one & 0x7FFF)[:, None] * inverse
        bits = quotient.to(tl.int32, bitcast=True) & 0x7F800000
        bits = tl.minimum(tl.maximum(bits, 127 << 23), 129 << 23)
        step = (bits + ((22 << 23) + (1 << 22))).to(tl.float32, bitcast=True)
        nearest = (quotient + step) - step
        off = quotient - tl.where(nearest < 6.0, nearest, 6.0)
        total = total + off * off
    wide = tried.to(tl.float64)
    error = tl.where(usable, total.to(tl.float64) * (wide * wide), float("inf"))
    least = tl.min(error, axis=1)
    chosen = tl.min(tl.where(error == least[:, None], lane[None, :], 16), axis=1)
    mine = (lane[None, :] == chosen[:, None]) & (error < float("inf"))
    found = tl.max(mine.to(tl.int32), axis=1) > 0
    code = tl.where(found, tl.sum(tl.where(mine, other, 0), axis=1), code)
    factor = tl.where(found, tl.sum(tl.where(mine, tried, 0.0), axis=1), factor)
    tl.store(scales + block, code.to(tl.uint8), mask=here)
    pair = tl.arange(0, 8)
    at = block[:, None] * 16 + 2 * pair[None, :]
    first = from_bf16(tl.load(weight + at, mask=here[:, None], other=0))
    second = from_bf16(tl.load(weight + at + 1, mask=here[:, None], other=0))
    divisor = tl.zeros([BLOCKS, 8], tl.float32) + factor[:, None]
    low, high = _e2m1(tl.div_rn(first, divisor)), _e2m1(tl.div_rn(second, divisor))
    bytes_ = (low | (high << 4)).to(tl.uint8)
    tl.store(packed + block[:, None] * 8 + pair[None, :], bytes_, mask=here[:, None])


def nvfp4_encode(
    staging: Staging, weight: Array, own: float, modelopt: bool, search: bool, packed: Array,
    scales: Array,
) -> bool:  # fmt: skip
    """`nvfp4_encode` of `qconvert.ops.compiled.loops.fp4`, with its arguments; declines where nothing is
    searched for."""
    if not search:
        return False

    def launch(
        ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], flag: torch.Tensor
    ) -> None:
        count = ins[0].shape[0]
        _nvfp4[(triton.cdiv(count, _BLOCKS),)](
            ins[0], *outs, flag, count, own, modelopt, _BLOCKS, **OPTIONS
        )

    return staging.run([weight], [packed, scales], launch)
