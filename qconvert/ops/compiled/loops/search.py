"""Searches for scales: what formats/int_packed/search.py does, candidates side by side.

The scales that are tried are the lanes of vectors, so each one's errors are added column after column,
as numpy's form does. All that belongs to a lane lies in one array: of several LLVM would not know that
they do not overlap, and the loop ran at a fifteenth of the speed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.compiled.jit import inner, loop
from qconvert.ops.compiled.loops.bits import length_of, rounded
from qconvert.ops.compiled.loops.ints import as_f16, ends

_ROUNDER = np.float32(1.5 * 2.0**23)
_RUNGS = 48
_LEAST = np.float32(2.0**-100)
_BF16, _F16 = 0, 1


@inner
def _held(value: np.float32, dtype: int) -> np.float32:
    if dtype == _BF16:
        return rounded(value)
    return as_f16(value) if dtype == _F16 else value


@inner
def _zero(
    least: np.float32, step: np.float32, low: np.float32, high: np.float32, dtype: int
) -> Any:
    below = np.float32(least / step)
    below = rounded(below) if dtype == _BF16 else below
    below = np.float32(low - below)
    below = rounded(below) if dtype == _BF16 else below
    below = high if below > high else below
    below = low if below < low else below
    return np.float32(np.float32(below + _ROUNDER) - _ROUNDER)


@inner
def _errors(row: Any, lanes: Any) -> None:
    """Of 48 inverse scales, lowest and highest codes: the sums of squared errors, and of errors times
    weights, in steps."""
    for lane in range(2 * _RUNGS):
        lanes[3 * _RUNGS + lane] = np.float32(0)
    for column in range(row.size):
        value = np.int32(np.int32(row[column]) << np.int32(16)).view(np.float32)
        for lane in range(_RUNGS):
            quotient = np.float32(value * lanes[lane])
            low, high = lanes[_RUNGS + lane], lanes[2 * _RUNGS + lane]
            code = quotient if quotient > low else low
            code = code if code < high else high
            code = np.float32(np.float32(code + _ROUNDER) - _ROUNDER)
            off = np.float32(quotient - code)
            lanes[3 * _RUNGS + lane] = np.float32(lanes[3 * _RUNGS + lane] + np.float32(off * off))
            along = np.float32(quotient * off)
            lanes[4 * _RUNGS + lane] = np.float32(lanes[4 * _RUNGS + lane] + along)


@inner
def _least(
    tried: Any, lanes: Any, size: float, length: float, weight: float, best: float, chosen: int
) -> Any:
    """The least error and its lane, the first of equal ones; these, where none is less than `best`.
    `weight`: of the part of an error that lies along the weights, whose `length` is in parts of
    `size`."""
    for lane in range(_RUNGS):
        wide = np.float64(tried[lane])
        along = np.float64(lanes[4 * _RUNGS + lane]) * np.float64(wide / size)
        error = np.float64(lanes[3 * _RUNGS + lane]) + weight * np.float64(along * along / length)
        error = error * np.float64(wide * wide)
        if error < best:  # no number where a step is infinite
            best, chosen = error, lane
    return best, chosen


@inner
def _codes(
    row: Any, inverse: np.float32, zero: np.float32, low: np.float32, high: np.float32, out: Any
) -> None:
    for column in range(row.size):
        value = np.int32(np.int32(row[column]) << np.int32(16)).view(np.float32)
        quotient = np.float32(value * inverse)
        code = quotient if quotient > low else low
        code = code if code < high else high
        code = np.float32(np.float32(code + _ROUNDER) - _ROUNDER)
        out[column] = np.int8(np.float32(np.float32(code + zero) + _ROUNDER).view(np.int32))


@loop("ru2[2]", "rf4[1]", "double", "int", "int", "bool", "bool", "int", "i1[2]", "f4[1]", "i1[1]")
def ints_search(
    weight: Any, ladder: Any, along: float, low: int, high: int, symmetric: bool, signed: bool,
    dtype: int, codes: Any, scale: Any, zero: Any,
) -> bool:  # fmt: skip
    """Groups [n, G] of BF16 -> codes alike, scales and zero points [n], the scales in BF16 (`dtype` 0),
    F16 (1) or F32 (2), `signed`: below 0, too. Declines NaN, infinity, groups of little but zeros, and
    those whose scale of amax its dtype cannot hold or rounds to 0."""
    first, last, steps = np.float32(low), np.float32(high), np.float32(high - low)
    most_step = np.float32(65504) if dtype == _F16 else np.float32(3.0e38)
    lanes = np.empty(5 * _RUNGS, np.float32)
    tried = np.empty(_RUNGS, np.float32)
    zeros = np.empty(_RUNGS, np.float32)
    for group in range(weight.shape[0]):
        most, least, finite = ends(weight[group])
        if not finite:
            return False
        most = most if most > np.float32(0) else np.float32(0)
        least = least if least < np.float32(0) else np.float32(0)
        size = most if most > -least else np.float32(-least)
        if size == np.float32(0):
            eps = 2.0**-7 if dtype == _BF16 else 2.0**-10 if dtype == _F16 else 2.0**-23
            scale[group], zero[group] = np.float32(eps), np.int8(0)
            codes[group, :] = np.int8(0)
            continue
        if size < _LEAST:
            return False
        for lane in range(_RUNGS):
            high_end = np.float32(most * ladder[lane])
            low_end = np.float32(least * ladder[lane])
            middle = np.float32(0)
            if symmetric:
                end = high_end if high_end > -low_end else np.float32(-low_end)
                step = _held(np.float32(end / np.float32(steps / np.float32(2))), dtype)
            else:
                spread = np.float32(high_end - low_end)
                spread = rounded(spread) if dtype == _BF16 else spread
                step = _held(np.float32(spread / steps), dtype)
            usable = np.float32(0) < step <= most_step
            if not usable:
                if lane == 0:
                    return False
                step = np.float32(np.inf)
            elif not symmetric:
                middle = _zero(low_end, step, first, last, dtype)
            tried[lane], zeros[lane] = step, middle
            lanes[lane] = np.float32(np.float32(1) / step)
            lanes[_RUNGS + lane] = np.float32(first - middle)
            lanes[2 * _RUNGS + lane] = np.float32(last - middle)
        _errors(weight[group], lanes)
        wide, length = np.float64(size), length_of(weight[group], size)
        best, chosen = _least(tried, lanes, wide, length, along, np.inf, 0)
        step = tried[chosen]
        if signed:
            for lane in range(_RUNGS):
                lanes[lane] = -lanes[lane]
            _errors(weight[group], lanes)
            least_error, other = _least(tried, lanes, wide, length, along, best, chosen)
            if least_error < best:
                chosen, step = other, np.float32(-tried[other])
        scale[group], zero[group] = step, np.int8(zeros[chosen])
        _codes(
            weight[group], np.float32(np.float32(1) / step), zeros[chosen], lanes[_RUNGS + chosen],
            lanes[2 * _RUNGS + chosen], codes[group],
        )  # fmt: skip
    return True
