"""Codes times scales as float32: what validators/reading/rows.py and amx.py do, in one pass.

The scales of a row are those of line (`skip` + row) // `high`, each for `wide` columns. All loops
decline where a result is NaN: its bits would depend on the order of a product's factors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.compiled.jit import inner, loop

_SIZE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
# Bits of a code moved to those of a float32 are too small by the difference of the exponents' biases.
_E4M3_BIAS = np.float32(2.0**120)
_E4M3_BITS = np.int32(-(1 << 31) | 0x7F << 20)


@inner
def _bf16(value: np.float32) -> np.float32:
    """The nearest bf16, ties to even."""
    bits = np.float32(value).view(np.int32)
    even = np.int32(np.int32(bits >> np.int32(16)) & np.int32(1))
    bits = np.int32(np.int32(bits + np.int32(0x7FFF)) + even)
    return np.int32(bits & np.int32(-0x10000)).view(np.float32)


@inner
def _fp8_block(codes: Any, scale: np.float32, rounded: bool, out: Any) -> np.int32:
    """Columns of one scale. The answer is above infinity's bits where a code or a result is NaN."""
    seen, last = np.int32(0), np.int32(0)
    for column in range(codes.size):
        code = np.int32(codes[column])
        last = max(last, np.int32(code & np.int32(0x7F)))
        value = np.int32(np.int32(code << np.int32(20)) & _E4M3_BITS).view(np.float32)
        value = np.float32(np.float32(value * _E4M3_BIAS) * scale)
        seen = max(seen, np.int32(np.float32(value).view(np.int32) & _SIZE))
        out[column] = _bf16(value) if rounded else value
    return _SIZE if last == np.int32(0x7F) else seen


@loop("ri1[2]", "rf4[2]", "int", "int", "int", "bool", "f4[2]")
def fp8_rows(
    codes: Any, scale: Any, skip: int, high: int, wide: int, rounded: bool, out: Any
) -> bool:
    """E4M3 [n, K]."""
    rows, columns = codes.shape
    seen = np.int32(0)
    for row in range(rows):
        line = (skip + row) // high
        for block in range(scale.shape[1]):
            first, last = block * wide, min(columns, (block + 1) * wide)
            found = _fp8_block(
                codes[row, first:last], scale[line, block], rounded, out[row, first:last]
            )
            seen = max(seen, found)
    return bool(seen <= _INFINITY)


@inner
def _int4_block(packed: Any, scale: np.float32, rounded: bool, out: Any) -> np.int32:
    seen = np.int32(0)
    for at in range(packed.size):
        both = np.int32(packed[at])
        low = np.float32(np.int32(np.int32(both & np.int32(15)) - np.int32(8)))
        high = np.float32(np.int32(np.int32(both >> np.int32(4)) - np.int32(8)))
        low, high = np.float32(low * scale), np.float32(high * scale)
        seen = max(seen, np.int32(low.view(np.int32) & _SIZE))
        seen = max(seen, np.int32(high.view(np.int32) & _SIZE))
        out[2 * at] = _bf16(low) if rounded else low
        out[2 * at + 1] = _bf16(high) if rounded else high
    return seen


@loop("ru1[2]", "rf4[2]", "int", "int", "int", "bool", "f4[2]")
def int4_rows(
    packed: Any, scale: Any, skip: int, high: int, wide: int, rounded: bool, out: Any
) -> bool:
    """Packed INT4 [n, K / 2], the even column in the low half, each code plus 8; `wide` is even."""
    rows, columns = out.shape
    seen = np.int32(0)
    for row in range(rows):
        line = (skip + row) // high
        for block in range(scale.shape[1]):
            first, last = block * wide, min(columns, (block + 1) * wide)
            part = packed[row, first // 2 : last // 2]
            seen = max(seen, _int4_block(part, scale[line, block], rounded, out[row, first:last]))
    return bool(seen <= _INFINITY)


@inner
def _e2m1(code: np.int32) -> np.float32:
    """Twice the number is an integer: two bits of exponent above one of mantissa, 0 and 1 denormal."""
    size = np.int32(code & np.int32(7))
    power = np.int32(size >> np.int32(1))
    normal = np.int32(np.int32(np.int32(size & np.int32(1)) | np.int32(2)) << power)
    twice = np.int32(normal >> np.int32(1)) if power > np.int32(0) else size
    bits = np.float32(np.float32(twice) * np.float32(0.5)).view(np.int32)
    sign = np.int32(np.int32(code & np.int32(8)) << np.int32(28))
    return np.int32(bits | sign).view(np.float32)


@inner
def _fp4_row(packed: Any, scale: Any, rounded: bool, out: Any) -> np.int32:
    """A row, `scale` being that of each byte."""
    seen = np.int32(0)
    for at in range(packed.size):
        both = np.int32(packed[at])
        low = np.float32(_e2m1(both) * scale[at])
        high = np.float32(_e2m1(np.int32(both >> np.int32(4))) * scale[at])
        seen = max(seen, np.int32(low.view(np.int32) & _SIZE))
        seen = max(seen, np.int32(high.view(np.int32) & _SIZE))
        out[2 * at] = _bf16(low) if rounded else low
        out[2 * at + 1] = _bf16(high) if rounded else high
    return seen


@loop("ru1[2]", "rf4[2]", "int", "int", "int", "bool", "f4[2]")
def fp4_rows(
    packed: Any, scale: Any, skip: int, high: int, wide: int, rounded: bool, out: Any
) -> bool:
    """E2M1 [n, K / 2], the even column in the low half; `wide` is even."""
    rows, columns = packed.shape
    each = np.empty(
        columns, np.float32
    )  # blocks of 16 columns are too short for a loop of their own
    shown, seen = -1, np.int32(0)
    for row in range(rows):
        line = (skip + row) // high
        if line != shown:
            shown = line
            for block in range(scale.shape[1]):
                each[block * wide // 2 : (block + 1) * wide // 2] = scale[line, block]
        seen = max(seen, _fp4_row(packed[row], each, rounded, out[row]))
    return bool(seen <= _INFINITY)


@inner
def _amx_int4(word: np.uint32, step: np.float32, out: Any, row: int, column: int) -> np.int32:
    """Four bytes of a row: four codes of the first 64 columns, four of the next."""
    seen = np.int32(0)
    for part in range(4):
        byte = np.int32(np.int32(word >> np.uint32(8 * part)) & np.int32(0xFF))
        low = np.int32(np.int32(np.int32(byte & np.int32(15)) ^ np.int32(8)) - np.int32(8))
        high = np.int32(np.int32(np.int32(byte >> np.int32(4)) ^ np.int32(8)) - np.int32(8))
        first, second = np.float32(np.float32(low) * step), np.float32(np.float32(high) * step)
        seen = max(seen, np.int32(first.view(np.int32) & _SIZE))
        seen = max(seen, np.int32(second.view(np.int32) & _SIZE))
        out[row, column + part] = first
        out[row, column + 64 + part] = second
    return seen


@inner
def _amx_int8(word: np.uint32, step: np.float32, out: Any, row: int, column: int) -> np.int32:
    seen = np.int32(0)
    for part in range(4):
        byte = np.int32(np.int32(word >> np.uint32(8 * part)) & np.int32(0xFF))
        code = np.int32(np.int32(byte ^ np.int32(0x80)) - np.int32(0x80))
        value = np.float32(np.float32(code) * step)
        seen = max(seen, np.int32(value.view(np.int32) & _SIZE))
        out[row, column + part] = value
    return seen


@loop("ru4[1]", "rf4[1]", "int", "int", "f4[2]")
def amx_tiles(words: Any, step: Any, height: int, wide: int, out: Any) -> bool:
    """AMX codes of whole blocks of `height` rows (128: INT4, 64: INT8) in column blocks of `wide`, and
    the step of each row, -> [n, K]. The order of the words is that of validators/reading/amx.py."""
    rows, columns = out.shape
    at, seen = 0, np.int32(0)
    for block in range(0, rows, height):
        for first in range(0, columns, wide):
            last = min(first + wide, columns)
            for tile in range(block, block + height, 32):
                for column in range(first, last, height):
                    for half in range(tile, tile + 32, 16):
                        for word in range(16):
                            for row in range(half, half + 16):
                                place = column + 4 * word
                                if height == 128:
                                    found = _amx_int4(words[at], step[row], out, row, place)
                                else:
                                    found = _amx_int8(words[at], step[row], out, row, place)
                                seen = max(seen, found)
                                at += 1
    return bool(seen <= _INFINITY)
