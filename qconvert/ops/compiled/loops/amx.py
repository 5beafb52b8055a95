"""AMX codes in tiles: what formats/amx does, in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.ops.compiled.loops.bits import NAN, largest
from qconvert.ops.compiled.loops.jit import inner, loop

_ROUNDER = np.float32(12582912.0)
_ROUNDER_128 = np.float32(12582912.0 + 128)
_FLUSH_BELOW = np.int32((127 - 110) << 7)  # formats/amx/encode.py says why
_ONE_127TH = np.int32(0x3C010204).view(np.float32)
_ONE_112TH = 1.0 / 112.0
_K_BLOCK = 3584


@inner
def _int8_row(row: Any, inverse: np.float32, out: Any) -> None:
    for column in range(row.size):
        value = np.int32(np.int32(row[column]) << np.int32(16)).view(np.float32)
        value = np.float32(np.float32(value * inverse) + _ROUNDER)
        out[column] = np.uint8(value.view(np.int32))


@inner
def _int4_row(row: Any, inverse: np.float32, out: Any) -> None:
    """Codes plus 8, one a byte."""
    for column in range(row.size):
        value = np.int32(np.int32(row[column]) << np.int32(16)).view(np.float32)
        value = np.float32(np.float32(value * inverse) + _ROUNDER_128)
        code = np.int32(value.view(np.int32) & np.int32(0xFF))
        away = np.int32(np.int32(code >> np.int32(7)) + np.int32(7))
        out[column] = np.uint8(np.int32(np.int32(code + away) >> np.int32(4)))


@inner
def _pair(codes: Any, out: Any) -> None:
    for step in range(codes.size // 128):
        for byte in range(64):
            low = np.uint8(codes[128 * step + byte] & np.uint8(0x0F))
            high = np.uint8(codes[128 * step + 64 + byte] << np.uint8(4))
            out[64 * step + byte] = np.uint8(np.uint8(low | high) ^ np.uint8(0x88))


@inner
def _place(lines: Any, row: int, height: int, target: Any) -> None:
    """Words [32, steps * 16 + 16] of the tile at `row` to where `place` of formats/amx/tiles.py puts it;
    `height` rows are a block, and as many columns a step. (Were rows of words a power of two apart, they
    would share one set of a core's cache.)"""
    steps = lines.shape[1] // 16 - 1
    most = _K_BLOCK // height
    block = row // height * height
    for first in range(0, steps, most):
        count = min(most, steps - first)
        at = (block * steps * 16) + (height * first + (row - block) * count) * 16
        if steps <= most:
            at = row * steps * 16
        for step in range(count):
            for half in range(2):
                goal = at + (step * 2 + half) * 256
                for word in range(16):
                    column = (first + step) * 16 + word
                    for line in range(16):
                        target[goal + word * 16 + line] = lines[half * 16 + line, column]


@loop("ru2[2]", "int", "int", "u4[1]", "f4[1]")
def amx_int8(bits: Any, first: int, last: int, target: Any, scale: Any) -> bool:
    """Columns [first, last) of BF16 [N, K] -> one shard's codes and scales [N]. Declines NaN, infinity
    and rows that are denormals, or nearly."""
    lines = np.empty((32, last - first + 64), np.uint8)
    words = lines.view(np.uint32)
    rows = bits.shape[0]
    for top in range(0, rows, 32):
        for row in range(top, top + 32):
            size = largest(bits[row, first:last])
            if size >= NAN or 0 < size < _FLUSH_BELOW:
                return False
            step = np.float32(np.int32(size << np.int32(16)).view(np.float32) * _ONE_127TH)
            scale[row] = step
            inverse = np.float32(np.float32(1) / step) if size else np.float32(0)
            _int8_row(bits[row, first:last], inverse, lines[row - top])
        _place(words, top, 64, target)
    return True


@loop("ru2[2]", "int", "int", "u4[1]", "f4[1]")
def amx_int4(bits: Any, first: int, last: int, target: Any, scale: Any) -> bool:
    """As `amx_int8`, with codes of four bits."""
    lines = np.empty((32, (last - first) // 2 + 64), np.uint8)
    codes = np.empty(last - first, np.uint8)
    words = lines.view(np.uint32)
    rows = bits.shape[0]
    for top in range(0, rows, 32):
        for row in range(top, top + 32):
            size = largest(bits[row, first:last])
            if size >= NAN or 0 < size < _FLUSH_BELOW:
                return False
            amax = np.int32(size << np.int32(16)).view(np.float32)
            step = np.float32(np.float64(amax) * _ONE_112TH)
            scale[row] = step
            inverse = np.float32(np.float32(1) / step) if size else np.float32(0)
            _int4_row(bits[row, first:last], inverse, codes)
            _pair(codes, lines[row - top])
        _place(words, top, 128, target)
    return True
