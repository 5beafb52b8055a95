"""FP8: what formats/fp8/decode.py and formats/fp8/encode.py do, in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.compiled.jit import inner, loop
from qconvert.ops.compiled.loops.bits import NAN, e4m3, largest, rounded

_SIGN_AND_CODE = np.int32(0x87F00000 - (1 << 32))
_BIAS = np.float32(2.0**120)
_LEAST_SCALE = np.float32(2.0**-126)
_LARGE = np.int32(np.float32(2.0**7).view(np.int32))
_GROUP = 32  # MXFP8's columns of one scale


@inner
def _seen(source: Any) -> np.uint8:
    """Bit 7: one of a row's codes is NaN. In a loop of its own, of bytes: beside decoding it takes a
    lane of 32 bits for each code, and a quarter of the time."""
    seen = np.uint8(0)
    for column in range(source.size):
        code = np.uint8(np.uint8(source[column]) & np.uint8(0x7F))
        seen = np.uint8(seen | np.uint8(code + np.uint8(1)))
    return seen


@inner
def _size_of_largest(factor: Any) -> np.int32:
    """Bits of the largest magnitude."""
    found = np.int32(0)
    for column in range(factor.size):
        size = np.int32(np.float32(factor[column]).view(np.int32) & np.int32(0x7FFFFFFF))
        found = size if size > found else found
    return found


@inner
def _decode_row(source: Any, factor: Any, target: Any) -> np.uint8:
    """One row's codes times 2^-120 times their factors. Bit 7 of the answer: a code is NaN."""
    for column in range(source.size):
        code = np.int32(source[column])
        value = np.int32(np.int32(code << np.int32(20)) & _SIGN_AND_CODE).view(np.float32)
        bits = np.float32(value * factor[column]).view(np.int32)
        even = np.int32(np.int32(bits >> np.int32(16)) & np.int32(1))
        bits = np.int32(np.int32(bits + np.int32(0x7FFF)) + even)
        target[column] = np.uint16(np.int32(bits >> np.int32(16)))
    return _seen(source)


@inner
def _decode_block(source: Any, factor: np.float32, target: Any) -> np.uint8:
    """The same for columns that have one factor."""
    for column in range(source.size):
        code = np.int32(source[column])
        value = np.int32(np.int32(code << np.int32(20)) & _SIGN_AND_CODE).view(np.float32)
        bits = np.float32(value * factor).view(np.int32)
        even = np.int32(np.int32(bits >> np.int32(16)) & np.int32(1))
        bits = np.int32(np.int32(bits + np.int32(0x7FFF)) + even)
        target[column] = np.uint16(np.int32(bits >> np.int32(16)))
    return _seen(source)


@inner
def _decode_groups(source: Any, factor: Any, target: Any) -> None:
    """The same for groups [n, 32] with a factor each, where a call for each costs more than it does
    (MXFP8: 5.2 GB/s of a core for 2.3)."""
    for group in range(source.shape[0]):
        each = np.float32(factor[group] * _BIAS)
        for column in range(_GROUP):
            code = np.int32(source[group, column])
            value = np.int32(np.int32(code << np.int32(20)) & _SIGN_AND_CODE).view(np.float32)
            bits = np.float32(value * each).view(np.int32)
            even = np.int32(np.int32(bits >> np.int32(16)) & np.int32(1))
            bits = np.int32(np.int32(bits + np.int32(0x7FFF)) + even)
            target[group, column] = np.uint16(np.int32(bits >> np.int32(16)))


@loop("ri1[2]", "rf4[2]", "int", "int", "u2[2]")
def fp8_decode(source: Any, factor: Any, height: int, width: int, target: Any) -> bool:
    """E4M3 [N, K] and float32 scales, one for each `height` x `width`, -> BF16. Declines NaN codes, and
    scales of 2^7 and more, NaN among them: times 2^120 they must be finite."""
    rows, columns = source.shape
    for line in range(factor.shape[0]):
        if _size_of_largest(factor[line]) >= _LARGE:
            return False
    spread = np.empty(columns, np.float32)
    shown = -1
    if height == 1 and width == _GROUP and columns % _GROUP == 0:
        found = np.uint8(0)
        for row in range(rows):
            found |= _seen(source[row])
        groups = (rows * columns // _GROUP, _GROUP)
        _decode_groups(source.reshape(groups), factor.reshape(groups[0]), target.reshape(groups))
        return not found & 0x80
    if height == 1:
        seen = np.uint8(0)
        for row in range(rows):
            for block in range(factor.shape[1]):
                first, last = block * width, min(columns, (block + 1) * width)
                each = np.float32(factor[row, block] * _BIAS)
                seen |= _decode_block(source[row, first:last], each, target[row, first:last])
        return not seen & 0x80
    for row in range(rows):
        if row // height != shown:
            shown = row // height
            for block in range(factor.shape[1]):
                for column in range(block * width, min(columns, (block + 1) * width)):
                    spread[column] = np.float32(factor[shown, block] * _BIAS)
        if _decode_row(source[row], spread, target[row]) & 0x80:
            return False
    return True


@inner
def _code(quotient: np.float32, whole: bool) -> np.uint8:
    """A weight over its scale -> E4M3, by way of bf16 unless `whole`."""
    bits = np.float32(quotient).view(np.int32)
    sign = np.int32(np.int32(bits >> np.int32(24)) & np.int32(0x80))
    size = np.int32(bits & np.int32(0x7FFFFFFF))
    if not whole:
        size = np.int32(np.int32(size + np.int32(0x8000)) & np.int32(-0x10000))
    return np.uint8(np.int32(e4m3(size) | sign))


@inner
def _codes(weight: Any, step: np.float32, whole: bool, codes: Any) -> None:
    """Weights of one scale -> E4M3."""
    for column in range(weight.size):
        value = np.int32(np.int32(weight[column]) << np.int32(16)).view(np.float32)
        codes[column] = _code(np.float32(value / step), whole)


@inner
def _scale(size: np.int32, exponents: bool, whole: bool) -> np.float32:
    """`scales_of` of formats/fp8/encode.py, for one."""
    step = np.float32(np.int32(size << np.int32(16)).view(np.float32) / np.float32(448.0))
    if whole:
        if not size:
            return np.float32(1)
        step = step if step > _LEAST_SCALE else _LEAST_SCALE
        if exponents:
            up = np.int32(np.float32(step).view(np.int32) + np.int32((1 << 23) - 1))
            step = np.int32(up & np.int32(-(1 << 23))).view(np.float32)
        return step
    step = rounded(step)
    return step if step > np.float32(0) else np.float32(2.0**-7)


@inner
def _codes_spread(weight: Any, steps: Any, whole: bool, codes: Any) -> None:
    """A row of weights, with a scale for each -> E4M3."""
    for column in range(weight.size):
        value = np.int32(np.int32(weight[column]) << np.int32(16)).view(np.float32)
        codes[column] = _code(np.float32(value / steps[column]), whole)


@inner
def _larger(row: Any, most: Any) -> None:
    """Sizes as bf16, each the larger of the row's and what was found before."""
    for column in range(row.size):
        size = np.uint16(row[column] & np.uint16(0x7FFF))
        most[column] = size if size > most[column] else most[column]


@loop("ru2[2]", "int", "int", "bool", "bool", "u1[2]", "f4[2]")
def fp8_encode(
    weight: Any, height: int, width: int, exponents: bool, whole: bool, codes: Any, scale: Any
) -> bool:
    """BF16 [N, K] -> E4M3 and the scale of each `height` x `width`, as float32. `whole`: of dialect fp8.
    Declines NaN and infinity. Blocks take whole rows at a time, with maxima and scales of columns: row
    by row of a block is a vector's end every 128 columns, and 0.25 to 0.5 of the speed."""
    rows, columns = weight.shape
    if height == 1:
        for row in range(rows):
            for block in range(scale.shape[1]):
                first, last = block * width, min(columns, (block + 1) * width)
                size = largest(weight[row, first:last])
                if size >= NAN:
                    return False
                step = _scale(size, exponents, whole)
                scale[row, block] = step
                _codes(weight[row, first:last], step, whole, codes[row, first:last])
        return True
    most, steps = np.empty(columns, np.uint16), np.empty(columns, np.float32)
    for top in range(0, rows, height):
        bottom = min(rows, top + height)
        most[:] = 0
        for row in range(top, bottom):
            _larger(weight[row], most)
        for block in range(scale.shape[1]):
            first, last = block * width, min(columns, (block + 1) * width)
            size = largest(most[first:last])
            if size >= NAN:
                return False
            step = _scale(size, exponents, whole)
            scale[top // height, block] = step
            steps[first:last] = step
        for row in range(top, bottom):
            _codes_spread(weight[row], steps, whole, codes[row])
    return True


@loop("ru2[2]", "float", "bool", "u1[2]")
def fp8_codes(weight: Any, step: np.float32, whole: bool, codes: Any) -> bool:
    """BF16 [N, K], no NaN and no infinity, and one scale -> E4M3."""
    for row in range(weight.shape[0]):
        _codes(weight[row], step, whole, codes[row])
    return True
