"""Integer codes: what formats/int_packed does, in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.compiled.jit import inner, loop
from qconvert.ops.compiled.loops.bits import NAN, largest, rounded

_COARSE = np.int32((127 - 120) << 7)  # formats/int_packed/encode.py says why
_ROUNDER = np.float32(1.5 * 2.0**23)
# Columns that a vector or two take, and how many of them a loop does at a time.
_RUN, _TILE = 32, 128


@inner
def _codes(row: Any, step: np.float32, most: np.float32, out: Any) -> None:
    for column in range(row.size):
        value = np.int32(np.int32(row[column]) << np.int32(16)).view(np.float32)
        bits = np.float32(value / step).view(np.int32)
        bits = np.int32(np.int32(bits + np.int32(0x8000)) & np.int32(-0x10000))
        value = bits.view(np.float32)
        value = most if value > most else value
        out[column] = np.int8(np.float32(value + _ROUNDER).view(np.int32))


@inner
def _codes_of_runs(runs: Any, steps: Any, most: np.float32, out: Any) -> None:
    """The same of runs [n, 32] with a step each, without a call for each (groups of 32: 7.6 GB/s of a
    core for 4.9, of 128 11.5 for 9.3)."""
    for run in range(runs.shape[0]):
        step = steps[run]
        for column in range(_RUN):
            value = np.int32(np.int32(runs[run, column]) << np.int32(16)).view(np.float32)
            bits = np.float32(value / step).view(np.int32)
            bits = np.int32(np.int32(bits + np.int32(0x8000)) & np.int32(-0x10000))
            value = bits.view(np.float32)
            value = most if value > most else value
            out[run, column] = np.int8(np.float32(value + _ROUNDER).view(np.int32))


@inner
def _steps_of(groups: Any, half: np.float32, steps: Any) -> bool:
    """The step of each group. False where one has NaN, infinity, or may have a denormal one."""
    for group in range(groups.shape[0]):
        size = largest(groups[group])
        if size >= NAN or 0 < size < _COARSE:
            return False
        step = np.float32(np.int32(size << np.int32(16)).view(np.float32) / half)
        steps[group] = rounded(step) if size else np.float32(2.0**-7)
    return True


@inner
def _spread(steps: Any, spread: Any) -> None:
    """A step for each of a group's runs [groups, runs]."""
    for group in range(spread.shape[0]):
        for run in range(spread.shape[1]):
            spread[group, run] = steps[group]


@loop("ru2[2]", "int", "i1[2]", "f4[2]")
def ints_round(weight: Any, bits: int, codes: Any, scale: Any) -> bool:
    """`_round_plain`: groups [n, G] of BF16 -> codes alike and scales [n, 1]. Declines NaN, infinity and
    groups whose scale may be a denormal. Of groups of whole runs, some thousand weights at a time."""
    half = np.float32((1 << (bits - 1)) - 0.5)
    most = np.float32((1 << (bits - 1)) - 1)
    groups, columns = weight.shape
    each = columns // _RUN if columns % _RUN == 0 else 0
    tile = max(1, _TILE // max(1, each))
    steps, spread = np.empty(tile, np.float32), np.empty((tile, each), np.float32)
    runs = weight.reshape((groups * each, _RUN)) if each else weight
    made = codes.reshape((groups * each, _RUN)) if each else codes
    for first in range(0, groups, tile):
        last = min(first + tile, groups)
        if not _steps_of(weight[first:last], half, steps):
            return False
        for group in range(first, last):
            scale[group, 0] = steps[group - first]
            if not each:
                _codes(weight[group], steps[group - first], most, codes[group])
        if each:
            part = slice(first * each, last * each)
            _spread(steps, spread[: last - first])
            _codes_of_runs(runs[part], spread.reshape(spread.size), most, made[part])
    return True


@loop("ru2[2]", "u1[2]", "u2[1]")
def ints_round_pack(weight: Any, packed: Any, scale: Any) -> bool:
    """`ints_round` to 4 bits and `ints_pack`, a tile of codes between them: groups [n, G] of BF16 ->
    packed [n, G / 2] and scales [n] in BF16. Declines groups that are no whole runs, too."""
    groups, columns = weight.shape
    if columns % _RUN or not columns:
        return False
    each, width = columns // _RUN, _RUN // 2
    tile = max(1, _TILE // each)
    steps, spread = np.empty(tile, np.float32), np.empty((tile, each), np.float32)
    codes = np.empty((tile * each, _RUN), np.int8)
    pairs = codes.reshape(codes.size).view(np.uint16)
    runs, made = weight.reshape((groups * each, _RUN)), packed.reshape(packed.size)
    for first in range(0, groups, tile):
        last = min(first + tile, groups)
        if not _steps_of(weight[first:last], np.float32(7.5), steps):
            return False
        for group in range(first, last):
            bits = np.float32(steps[group - first]).view(np.int32)
            scale[group] = np.uint16(np.int32(bits >> np.int32(16)))
        _spread(steps, spread[: last - first])
        start, stop = first * each, last * each
        _codes_of_runs(runs[start:stop], spread.reshape(spread.size), np.float32(7), codes)
        _pack_row(pairs[: (stop - start) * width], made[start * width : stop * width])
    return True


# Of a bf16's bits, which become the signed 16 bits in whose order the numbers are: infinity's.
_INFINITE = np.int16(0x7F80)


@inner
def ends(row: Any) -> tuple[np.float32, np.float32, bool]:
    """The largest and the smallest of bf16 numbers, and whether all are finite."""
    most, least = np.int16(-0x8000), np.int16(0x7FFF)
    for column in range(row.size):
        bits = np.int16(row[column])
        key = np.int16(bits ^ np.int16(np.int16(bits >> np.int16(15)) & np.int16(0x7FFF)))
        most = key if key > most else most
        least = key if key < least else least
    return _value(most), _value(least), bool(most < _INFINITE and least > ~_INFINITE)


@inner
def _value(key: np.int16) -> np.float32:
    bits = np.int16(key ^ np.int16(np.int16(key >> np.int16(15)) & np.int16(0x7FFF)))
    return np.int32(np.int32(bits) << np.int32(16)).view(np.float32)


@inner
def as_f16(value: np.float32) -> np.float32:
    """A number above 0 to the nearest of fp16, ties to even: multiples of 2^-24 below 2^-14."""
    bits = np.float32(value).view(np.int32)
    even = np.int32(np.int32(bits >> np.int32(13)) & np.int32(1))
    bits = np.int32(np.int32(np.int32(bits + np.int32(0xFFF)) + even) & np.int32(-0x2000))
    small = np.float32(np.float32(value + np.float32(0.75)) - np.float32(0.75))
    return small if value < np.float32(2.0**-14) else np.int32(bits).view(np.float32)


@inner
def _codes_bf16(
    row: Any, step: np.float32, zero: np.float32, low: np.float32, high: np.float32, out: Any
) -> None:
    for column in range(row.size):
        value = np.int32(np.int32(row[column]) << np.int32(16)).view(np.float32)
        value = rounded(np.float32(rounded(np.float32(value / step)) + zero))
        value = high if value > high else value
        value = low if value < low else value
        out[column] = np.int8(np.float32(value + _ROUNDER).view(np.int32))


@inner
def _codes_f32(
    row: Any, step: np.float32, zero: np.float32, low: np.float32, high: np.float32, out: Any
) -> None:
    for column in range(row.size):
        value = np.int32(np.int32(row[column]) << np.int32(16)).view(np.float32)
        value = np.float32(np.float32(value / step) + zero)
        value = high if value > high else value
        value = low if value < low else value
        out[column] = np.int8(np.float32(value + _ROUNDER).view(np.int32))


@loop("ru2[2]", "int", "int", "bool", "bool", "i1[2]", "f4[1]", "i1[1]")
def ints_round_any(
    weight: Any, low: int, high: int, symmetric: bool, bf16: bool, codes: Any, scale: Any, zero: Any
) -> bool:
    """`round_any` with scales in BF16, or (not `bf16`) in F16: groups [n, G] of BF16 -> codes alike,
    scales and zero points [n]. Declines NaN, infinity, scales that their dtype cannot hold, and those
    that it rounds to 0."""
    first, last, steps = np.float32(low), np.float32(high), np.float32(high - low)
    for group in range(weight.shape[0]):
        most, least, finite = ends(weight[group])
        if not finite:
            return False
        most = most if most > np.float32(0) else np.float32(0)
        least = least if least < np.float32(0) else np.float32(0)
        if symmetric:
            size = most if most > -least else np.float32(-least)
            step = np.float32(size / np.float32(steps / np.float32(2)))
        else:
            size = np.float32(most - least)
            size = rounded(size) if bf16 else size
            step = np.float32(size / steps)
        step = rounded(step) if bf16 else as_f16(step)
        largest_step = np.float32(3.0e38) if bf16 else np.float32(65504)
        if not step <= largest_step or (step == np.float32(0) and size != np.float32(0)):
            return False
        middle = np.float32(0)
        if not symmetric and size != np.float32(0):
            below = np.float32(least / step)
            below = rounded(below) if bf16 else below
            below = np.float32(first - below)
            below = rounded(below) if bf16 else below
            below = last if below > last else below
            below = first if below < first else below
            middle = np.float32(np.float32(below + _ROUNDER) - _ROUNDER)
        if size == np.float32(0):
            step = np.float32(2.0**-7) if bf16 else np.float32(2.0**-10)
        scale[group], zero[group] = step, np.int8(middle)
        if bf16:
            _codes_bf16(weight[group], step, middle, first, last, codes[group])
        else:
            _codes_f32(weight[group], step, middle, first, last, codes[group])
    return True


@inner
def _pack_row(codes: Any, packed: Any) -> None:
    for byte in range(packed.size):
        pair = np.int32(codes[byte])
        high = np.int32(np.int32(pair >> np.int32(4)) & np.int32(0xF0))
        low = np.int32(pair & np.int32(0x0F))
        packed[byte] = np.uint8(np.int32(np.int32(low | high) ^ np.int32(0x88)))


@loop("ru1[2]", "u1[2]")
def ints_pack(codes: Any, packed: Any) -> bool:
    """Signed 4-bit codes, one a byte, [n, K] -> two a byte, each plus 8."""
    pairs = codes.view(np.uint16)
    for row in range(codes.shape[0]):
        _pack_row(pairs[row], packed[row])
    return True


@inner
def _bf16(code: np.int32, zero: np.float32, scale: np.float32) -> np.int32:
    value = np.float32(np.float32(code) - zero)
    bits = np.float32(value * scale).view(np.int32)
    even = np.int32(np.int32(bits >> np.int32(16)) & np.int32(1))
    bits = np.int32(np.int32(bits + np.int32(0x7FFF)) + even)
    return np.int32(np.int32(bits >> np.int32(16)) & np.int32(0xFFFF))


@inner
def _decode4(packed: Any, zero: np.float32, scale: np.float32, target: Any) -> None:
    for at in range(packed.size):
        byte = np.int32(packed[at])
        low = _bf16(np.int32(byte & np.int32(0x0F)), zero, scale)
        high = _bf16(np.int32(byte >> np.int32(4)), zero, scale)
        target[at] = np.uint32(np.int32(low | np.int32(high << np.int32(16))))


@inner
def _decode8(packed: Any, zero: np.float32, scale: np.float32, target: Any) -> None:
    for at in range(packed.size):
        target[at] = np.uint16(_bf16(np.int32(packed[at]), zero, scale))


@loop("ru1[2]", "rf4[2]", "rf4[2]", "u4[2]")
def int4_decode(packed: Any, zero: Any, scale: Any, target: Any) -> bool:
    """Bytes of two codes [n, B], zero points as stored and scales [n, groups] -> pairs of BF16 [n, B].
    Declines groups that end within a byte."""
    rows, groups = scale.shape
    width = packed.shape[1] // groups
    if width * groups != packed.shape[1]:
        return False
    for row in range(rows):
        for group in range(groups):
            first, last = group * width, (group + 1) * width
            _decode4(
                packed[row, first:last], zero[row, group], scale[row, group],
                target[row, first:last],
            )  # fmt: skip
    return True


@loop("ru1[2]", "rf4[2]", "rf4[2]", "u2[2]")
def int8_decode(codes: Any, zero: Any, scale: Any, target: Any) -> bool:
    """The same of codes that are bytes: [n, K] -> BF16 [n, K]."""
    rows, groups = scale.shape
    width = codes.shape[1] // groups
    for row in range(rows):
        for group in range(groups):
            first, last = group * width, (group + 1) * width
            _decode8(
                codes[row, first:last], zero[row, group], scale[row, group], target[row, first:last]
            )
    return True
