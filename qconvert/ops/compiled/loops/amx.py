"""AMX codes in tiles: what formats/amx does, in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.compiled.jit import inner, loop
from qconvert.ops.compiled.loops.bits import NAN, largest

_ROUNDER = np.float32(12582912.0)
_ROUNDER_128 = np.float32(12582912.0 + 128)
_FLUSH_BELOW = np.int32((127 - 110) << 7)  # formats/amx/encode.py says why
_ONE_127TH = np.int32(0x3C010204).view(np.float32)
_ONE_112TH = 1.0 / 112.0
_K_BLOCK = 3584
# Of the search: formats/amx/encode.py says what they are.
_LANES = 64
_BINS = 256
_TINY = np.float32(2.0**-50)


@inner
def _int8_row(row: Any, inverse: np.float32, out: Any) -> None:
    for column in range(row.size):
        value = np.int32(np.int32(row[column]) << np.int32(16)).view(np.float32)
        value = np.float32(np.float32(value * inverse) + _ROUNDER)
        out[column] = np.uint8(value.view(np.int32))


@inner
def _int4_row(row: Any, inverse: np.float32, out: Any) -> None:
    """Codes in sixteenths of a step plus 128, one a byte: `_sixteenths` makes codes of them."""
    for column in range(row.size):
        value = np.int32(np.int32(row[column]) << np.int32(16)).view(np.float32)
        value = np.float32(np.float32(value * inverse) + _ROUNDER_128)
        out[column] = np.uint8(value.view(np.int32))


@inner
def _sixteenths(codes: Any, out: Any) -> None:
    """`_pair` of codes that are rounded to sixteenths here, halves away from zero: in bytes, of which a
    vector holds four for each number of 32 bits (both together 0.10 ns a weight in cache for 0.14)."""
    for step in range(codes.size // 128):
        for byte in range(64):
            low = codes[128 * step + byte]
            low = np.uint8(np.uint8(low + np.uint8(low >> np.uint8(7))) + np.uint8(7))
            high = codes[128 * step + 64 + byte]
            high = np.uint8(np.uint8(high + np.uint8(high >> np.uint8(7))) + np.uint8(7))
            both = np.uint8(np.uint8(low >> np.uint8(4)) | np.uint8(high & np.uint8(0xF0)))
            out[64 * step + byte] = np.uint8(both ^ np.uint8(0x88))


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
            _sixteenths(codes, lines[row - top])
        _place(words, top, 128, target)
    return True


@inner
def _code(value: np.float32, inverse: np.float32, most: np.float32) -> np.float32:
    code = np.float32(value * inverse)
    code = code if code > -most else np.float32(-most)
    code = code if code < most else most
    return np.float32(np.float32(code + _ROUNDER) - _ROUNDER)


@inner
def _error(row: Any, step: np.float32, most: np.float32, lanes: Any) -> Any:
    """The sum of squared errors of a row under a step."""
    inverse = np.float32(np.float32(1) / step) if step > np.float32(0) else np.float32(0)
    lanes[:] = 0.0
    for start in range(0, row.size, _LANES):
        for lane in range(_LANES):
            value = np.int32(np.int32(row[start + lane]) << np.int32(16)).view(np.float32)
            off = np.float32(value - np.float32(_code(value, inverse, most) * step))
            lanes[lane] += np.float64(np.float32(off * off))
    return _folded(lanes)


@inner
def _better_step(row: Any, step: np.float32, most: np.float32, lanes: Any, more: Any) -> np.float32:
    """The best step for the codes that a step gives: weights times codes by squared codes."""
    inverse = np.float32(np.float32(1) / step) if step > np.float32(0) else np.float32(0)
    lanes[:] = 0.0
    more[:] = 0.0
    for start in range(0, row.size, _LANES):
        for lane in range(_LANES):
            value = np.int32(np.int32(row[start + lane]) << np.int32(16)).view(np.float32)
            code = _code(value, inverse, most)
            lanes[lane] += np.float64(np.float32(value * code))
            more[lane] += np.float64(np.float32(code * code))
    across = _folded(more)
    return np.float32(_folded(lanes) / across) if across > 0 else step


@inner
def _folded(lanes: Any) -> Any:
    width = _LANES // 2
    while width > 0:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    return lanes[0]


@inner
def _from_histogram(
    row: Any, amax: np.float32, most: np.float32, steps: Any, errors: Any, counts: Any, totals: Any
) -> np.float32:
    exponent = np.int32(np.float32(amax).view(np.int32) >> np.int32(23))
    low = np.int32(np.int32(exponent - np.int32(7)) * np.int32(128))
    counts[:] = 0
    for column in range(row.size):
        place = np.int32(np.int32(np.int32(row[column] & np.uint16(0x7FFF)) - low) >> np.int32(2))
        counts[max(place, np.int32(0))] += 1
    totals[:] = 0.0
    for filled in range(1, _BINS):  # the first holds all that hardly has a say
        if counts[filled]:
            count = np.float64(counts[filled])
            for rung in range(steps.size):
                totals[rung] += count * errors[filled, rung]
    # 2^(exponent - 126). (math.ldexp would be a call of a function of numba's runtime.)
    power = np.int64(np.int64(exponent) + np.int64(1023 - 126))
    unit = np.int64(power << np.int64(52)).view(np.float64)
    largest = np.float64(np.float64(amax) / unit) / np.float64(most) * (1 + 1e-6)
    least, best = np.inf, 0
    for rung in range(steps.size):
        if steps[rung] <= largest and totals[rung] < least:
            least, best = totals[rung], rung
    return np.float32(steps[best] * unit)


@inner
def _search(
    row: Any, whole: np.float32, amax: np.float32, most: np.float32, steps: Any, errors: Any,
    counts: Any, totals: Any, lanes: Any, more: Any,
) -> np.float32:  # fmt: skip
    """The step of a row: formats/amx/encode.py's `best_steps`."""
    if not amax >= _TINY:
        return whole
    best, least = whole, _error(row, whole, most, lanes)
    step = _from_histogram(row, amax, most, steps, errors, counts, totals)
    for turn in range(3):
        error = _error(row, step, most, lanes)
        if error < least:
            best, least = step, error
        if turn < 2:
            step = _better_step(row, step, most, lanes, more)
    return best


@inner
def _held_row(row: Any, step: np.float32, most: np.float32, more: np.float32, out: Any) -> None:
    """Codes held to a range, plus `more`."""
    inverse = np.float32(np.float32(1) / step) if step > np.float32(0) else np.float32(0)
    rounder = np.float32(_ROUNDER + more)
    for column in range(row.size):
        value = np.int32(np.int32(row[column]) << np.int32(16)).view(np.float32)
        value = np.float32(value * inverse)
        value = value if value > -most else np.float32(-most)
        value = value if value < most else most
        out[column] = np.uint8(np.float32(value + rounder).view(np.int32))


@loop("ru2[2]", "int", "int", "int", "rf8[1]", "rf8[2]", "u4[1]", "f4[1]")
def amx_search(
    bits: Any, first: int, last: int, largest_code: int, steps: Any, errors: Any, target: Any,
    scale: Any,
) -> bool:  # fmt: skip
    """As `amx_int8` (`largest_code` 127) or `amx_int4` (7), with each row's step searched for."""
    int4 = largest_code == 7
    width = (last - first) // 2 if int4 else last - first
    lines = np.empty((32, width + 64), np.uint8)
    codes = np.empty(last - first, np.uint8)
    words = lines.view(np.uint32)
    counts, totals = np.empty(_BINS, np.int32), np.empty(steps.size, np.float64)
    lanes, more = np.empty(_LANES, np.float64), np.empty(_LANES, np.float64)
    most = np.float32(largest_code)
    rows = bits.shape[0]
    for top in range(0, rows, 32):
        for row in range(top, top + 32):
            size = largest(bits[row, first:last])
            if size >= NAN or 0 < size < _FLUSH_BELOW:
                return False
            amax = np.int32(size << np.int32(16)).view(np.float32)
            if int4:
                whole = np.float32(np.float32(np.float64(amax) * _ONE_112TH) * np.float32(16))
            else:
                whole = np.float32(amax * _ONE_127TH)
            step = _search(
                bits[row, first:last], whole, amax, most, steps, errors, counts, totals, lanes, more
            )
            if int4:
                _held_row(bits[row, first:last], step, most, np.float32(8), codes)
                _pair(codes, lines[row - top])
                scale[row] = np.float32(step * np.float32(1 / 16))
            else:
                _held_row(bits[row, first:last], step, most, np.float32(0), lines[row - top])
                scale[row] = step
        _place(words, top, 128 if int4 else 64, target)
    return True
