"""Bits of single numbers, and the length of a row, for use in loops."""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.compiled.jit import inner

NAN = np.int32(0x7F80)  # bf16's infinity; NaN is above
_ROUNDER = np.float32(1.5 * 2.0**23)
_LEAST_NORMAL = np.int32((127 - 6) << 23)


@inner
def largest(row: Any) -> np.int32:
    """The largest of entries' sizes as bf16: without their sign they are in the order of their bits."""
    found = np.uint16(0)
    for column in range(row.size):
        size = np.uint16(row[column] & np.uint16(0x7FFF))
        found = size if size > found else found
    return np.int32(found)


@inner
def rounded(value: np.float32) -> np.float32:
    """To a number of bf16, ties to even."""
    bits = np.float32(value).view(np.int32)
    even = np.int32(np.int32(bits >> np.int32(16)) & np.int32(1))
    bits = np.int32(np.int32(np.int32(bits + np.int32(0x7FFF)) + even) & np.int32(-0x10000))
    return np.int32(bits).view(np.float32)


@inner
def e4m3(size: np.int32) -> np.int32:
    """Bits of a float32 without its sign -> its code: nearest, ties to even, at most 448. Both ways are
    computed for each: as a float's exponent and mantissa, and as how many 2^-9 there are."""
    odd = np.int32(np.int32(size >> np.int32(20)) & np.int32(1))
    code = np.int32(np.int32(np.int32(size + odd) + np.int32(0x7FFFF)) >> np.int32(20))
    code = np.int32(code - np.int32(120 << 3))
    steps = np.float32(np.float32(np.int32(size).view(np.float32) * np.float32(2.0**9)) + _ROUNDER)
    few = np.int32(np.float32(steps).view(np.int32) & np.int32(0xFF))
    code = few if size < _LEAST_NORMAL else code
    return code if code < np.int32(0x7E) else np.int32(0x7E)


@inner
def length_of(row: Any, size: np.float32) -> float:
    """The sum of squares of weights as parts of the largest."""
    total, inverse = np.float32(0), np.float32(np.float32(1) / size)
    for column in range(row.size):
        value = np.int32(np.int32(row[column]) << np.int32(16)).view(np.float32)
        part = np.float32(value * inverse)
        total = np.float32(total + np.float32(part * part))
    return np.float64(total)
