"""Encoders of MXFP4 and MXFP8: what formats/mx/encode.py does."""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.compiled.jit import inner, loop
from qconvert.ops.compiled.loops.bits import e4m3, largest
from qconvert.ops.compiled.loops.fp4 import byte_of

_HALF_LEAST = np.float32(2.0**-134)  # formats/mx/encode.py says why
# Of groups: what a loop keeps of them stays in the first cache.
_TILE = 64
# Bits of bf16's 1, and of the sizes from which on, or beyond which, a code is another than 0.
_ONE, _TO_ONE, _OVER_ZERO = np.int16(0x3F80), np.int16(0x3F40), np.int16(0x3E80)
# Exponents at which a weight and its code are related by bits alone: from the first on no denormal is
# more than zero, and up to the second none is so small that it has no sign.
_LOWEST, _HIGHEST = np.int32(4), np.int32(127)


@inner
def _exponent(size: np.int32, less: int) -> np.int32:
    """A group's, of the size of its largest weight; 255: none can hold it."""
    power = np.int32(np.int32(size + np.int32(1 << 5)) >> np.int32(7))
    if power >= np.int32(255):
        return np.int32(255)
    power = np.int32(power - np.int32(less))
    return power if power > np.int32(0) else np.int32(0)


@inner
def _codes(weight: Any, moved: Any, codes: Any) -> None:
    """Groups [n, 32] of BF16 and what their exponents are above 1's, as bits -> a code for each weight.

    All in 16 bits, 32 to a vector (9.5 GB/s of a core for 5.2 in float32): dividing by a power of two
    moves the exponent, and from 1 on a code is the exponent's last bits and the first of the mantissa,
    so that rounding adds to bits. Below 1 codes are 0.5 apart: 0.75 is nearer to 1, 0.25 a tie."""
    for group in range(weight.shape[0]):
        less = moved[group]
        for column in range(32):
            bits = np.int16(weight[group, column])
            size = np.int16(bits & np.int16(0x7FFF))
            scaled = np.int16(size - less)
            large = scaled if scaled > _ONE else _ONE
            odd = np.int16(np.int16(large >> np.int16(6)) & np.int16(1))
            code = np.int16(np.int16(np.int16(large + np.int16(0x1F)) + odd) >> np.int16(6))
            code = np.int16(code - np.int16(0xFC))
            code = code if code < np.int16(7) else np.int16(7)
            few = np.int16(1) if scaled > _OVER_ZERO else np.int16(0)
            code = code if scaled >= _TO_ONE else few
            sign = np.int16(8) if bits < np.int16(0) else np.int16(0)
            sign = sign if size > np.int16(0) else np.int16(0)
            codes[group, column] = np.uint16(np.int16(code | sign))


@inner
def _pack(pairs: Any, packed: Any) -> None:
    """Two codes a word -> two a byte, the even column's in its lower half."""
    for at in range(packed.size):
        word = np.uint32(pairs[at])
        packed[at] = np.uint8(np.uint32(word | np.uint32(word >> np.uint32(12))))


@inner
def _any_codes(pairs: Any, inverses: Any, packed: Any) -> None:
    """Two bf16 a word, the even column's in its lower half, and what they are multiplied by -> two codes
    a byte, of weights of any size."""
    for at in range(packed.size):
        word = np.int32(pairs[at])
        low = np.float32(np.int32(word << np.int32(16)).view(np.float32) * inverses[at])
        high = np.float32(np.int32(word & np.int32(-0x10000)).view(np.float32) * inverses[at])
        low = low if abs(low) > _HALF_LEAST else np.float32(0)
        high = high if abs(high) > _HALF_LEAST else np.float32(0)
        packed[at] = byte_of(low, high)


@inner
def _spread(exponents: Any, inverses: Any) -> None:
    """Return what the words of groups [n, 16] are multiplied by."""
    for group in range(exponents.size):
        power = np.int32(exponents[group])
        inverse = np.int32(np.int32(np.int32(254) - power) << np.int32(23)).view(np.float32)
        for word in range(16):
            inverses[16 * group + word] = inverse


@loop("ru2[2]", "u1[2]", "u1[1]")
def mxfp4_encode(weight: Any, packed: Any, exponents: Any) -> bool:
    """Groups [n, 32] of BF16 -> packed [n, 16] and exponents [n], in tiles as NVFP4's."""
    codes, moved = np.empty((_TILE, 32), np.uint16), np.empty(_TILE, np.int16)
    inverses, words = np.empty(_TILE * 16, np.float32), codes.reshape(codes.size).view(np.uint32)
    pairs, made = weight.reshape(weight.size).view(np.uint32), packed.reshape(packed.size)
    for first in range(0, weight.shape[0], _TILE):
        count = min(_TILE, weight.shape[0] - first)
        least, most = np.int32(255), np.int32(0)
        for group in range(count):
            power = _exponent(largest(weight[first + group]), 2)
            least = power if power < least else least
            most = power if power > most else most
            exponents[first + group] = np.uint8(power)
            moved[group] = np.int16(np.int32(power - np.int32(127)) << np.int32(7))
        if most == np.int32(255):
            return False
        part = slice(16 * first, 16 * (first + count))
        if least >= _LOWEST and most <= _HIGHEST:
            _codes(weight[first : first + count], moved, codes)
            _pack(words[: 16 * count], made[part])
        else:
            _spread(exponents[first : first + count], inverses)
            _any_codes(pairs[part], inverses[: 16 * count], made[part])
    return True


@inner
def _mxfp8_group(weight: Any, inverse: np.float32, codes: Any) -> None:
    for column in range(32):
        value = np.int32(np.int32(weight[column]) << np.int32(16)).view(np.float32)
        bits = np.float32(value * inverse).view(np.int32)
        sign = np.int32(np.int32(bits >> np.int32(24)) & np.int32(0x80))
        codes[column] = np.uint8(np.int32(e4m3(np.int32(bits & np.int32(0x7FFF0000))) | sign))


@loop("ru2[2]", "u1[2]", "u1[1]")
def mxfp8_encode(weight: Any, codes: Any, exponents: Any) -> bool:
    """Groups [n, 32] of BF16 -> codes [n, 32] and exponents [n]."""
    for group in range(weight.shape[0]):
        power = _exponent(largest(weight[group]), 8)
        if power == np.int32(255):
            return False
        exponents[group] = np.uint8(power)
        inverse = np.int32(np.int32(np.int32(254) - power) << np.int32(23)).view(np.float32)
        _mxfp8_group(weight[group], inverse, codes[group])
    return True
