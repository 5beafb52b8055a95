"""Values of stored numbers, as float32, from the formats' definitions: no code is shared with the
code that makes outputs.

FP8 is OCP 8-bit Floating Point (E4M3: bias 7, 0x7F NaN; E5M2: bias 15, infinity 0x7C), or AMD's FNUZ
(biases 8 and 16; 0x80 is NaN, all others are finite: ml_dtypes), E8M0 is OCP MX
1.0 (2^(e - 127), 255 NaN), packed integers of 2 to 8 bits are compressed-tensors's pack-quantized
(codes side by side from a word's lowest bit on, each stored plus half its range, some of 3, 5, 6 and 7
bits in two words); GPTQ's words are the same. Which scale belongs to which block is in
validators/reading/rows.py.
"""

from __future__ import annotations

from functools import cache
from math import inf, nan
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Floats = np.ndarray[Any, np.dtype[np.float32]]
    Words = np.ndarray[Any, np.dtype[np.uint32]]

FLOATS = ("BF16", "F16", "F32", "F64")
FNUZ = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")
FP8 = ("F8_E4M3", "F8_E5M2", *FNUZ)
SCALES = (*FLOATS[:3], "F8_E8M0", "U8")

_NUMPY = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
_KEPT = 31 << 20  # glibc's rule holds for blocks below 32 MiB
# Bits of the mantissa, bias of the exponent.
_BIAS = {"F8_E4M3": (3, 7), "F8_E5M2": (2, 15), "F8_E4M3FNUZ": (3, 8), "F8_E5M2FNUZ": (2, 16)}


@cache
def warm() -> None:
    """Have this process keep memory that it frees. glibc returns blocks larger than the largest yet
    freed to the kernel, and fresh pages cost several times what is computed in them."""
    import numpy as np

    np.empty(_KEPT, np.uint8)


def fp8_value(code: int, dtype: str) -> float:
    mantissa_bits, bias = _BIAS[dtype]
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = divmod(code & 0x7F, 1 << mantissa_bits)
    if dtype in FNUZ and code == 0x80:
        return nan
    if dtype == "F8_E4M3" and code & 0x7F == 0x7F:
        return nan
    if dtype == "F8_E5M2" and exponent == 31:
        return nan if mantissa else sign * inf
    share = mantissa / (1 << mantissa_bits)
    if exponent == 0:
        return sign * share * 2.0 ** (1 - bias)
    return sign * (1 + share) * 2.0 ** (exponent - bias)


@cache
def fp8_table(dtype: str) -> Floats:
    import numpy as np

    return np.array([fp8_value(code, dtype) for code in range(256)], np.float32)


@cache
def _nibbles() -> np.ndarray[Any, Any]:
    """Two codes, minus 8 each, as float32 (one complex64) for every byte, low nibble first."""
    import numpy as np

    both = np.arange(256, dtype=np.uint32)[:, None] >> np.array([0, 4], np.uint32)
    return ((both & 15).astype(np.float32) - np.float32(8)).view(np.complex64).reshape(-1)


def fp8_floats(codes: Bytes, dtype: str) -> Floats:
    """Codes [n] as float32 [n]. E4M3's exponent and mantissa are moved to float32's, which gives
    the value times 2^(7 - 127), subnormals too: 2 GB per second and core. Its NaN would become 480,
    so if there is one, and for E5M2, a table is used: 0.8 GB."""
    import numpy as np

    if dtype != "F8_E4M3" or (codes.size and int((codes & np.uint8(0x7F)).max()) == 0x7F):
        return fp8_table(dtype)[codes]
    bits = codes.view(np.int8).astype(np.int32)  # the sign fills the upper bits
    np.left_shift(bits, 20, out=bits)
    np.bitwise_and(bits, -(1 << 31) | 0x7F << 20, out=bits)
    values = bits.view(np.float32)
    np.multiply(values, np.float32(2.0**120), out=values)
    return values


def int4_floats(packed: Bytes) -> Floats:
    """Packed codes, bytes [n] -> codes -8 to 7 as float32 [2n]."""
    import numpy as np

    out = np.empty(2 * packed.size, np.float32)
    np.take(_nibbles(), packed.astype(np.intp), out=out.view(np.complex64), mode="clip")
    return out


def int8_floats(packed: Bytes) -> Floats:
    """Packed codes of 8 bits, bytes [n] -> codes minus the middle of their range, as float32."""
    import numpy as np

    return packed.astype(np.float32) - np.float32(128)


def fields_of(words: Words, bits: int, first: int, count: int) -> Words:
    """Fields [n, count] of `bits` in strings of words [n, W], from bit `first` of each on: the two words
    that a field may lie in as one number, moved to its beginning."""
    import numpy as np

    start = first + bits * np.arange(count)
    word, shift = start // 32, (start % 32).astype(np.uint64)
    both = words[:, word].astype(np.uint64)
    over = np.flatnonzero(start % 32 + bits > 32)
    both[:, over] |= words[:, word[over] + 1].astype(np.uint64) << np.uint64(32)
    return (both >> shift & np.uint64((1 << bits) - 1)).astype(np.uint32)


def floats(data: Bytes, dtype: str) -> Floats:
    """Bytes of BF16, F16, F32 or F64 numbers as float32 (F64 rounds)."""
    import numpy as np

    if dtype == "BF16":
        bits = data.view("<u2").astype(np.uint32)
        np.left_shift(bits, 16, out=bits)
        return bits.view(np.float32)
    with np.errstate(all="ignore"):
        return data.view(_NUMPY[dtype]).astype(np.float32)


def scale_floats(data: Bytes, dtype: str) -> Floats:
    """Scales as float32; U8 and F8_E8M0 are exponents, F8_E4M3 (NVFP4's) numbers."""
    import numpy as np

    if dtype in FP8:
        return fp8_floats(data, dtype)
    if dtype not in ("F8_E8M0", "U8"):
        return floats(data, dtype)
    table = np.array([2.0 ** (e - 127) for e in range(255)] + [nan], np.float32)
    return table[data]


def bf16_bits(values: Floats) -> Words:
    """Nearest bf16, ties to even, as the upper half of float32 bits. A NaN stays one."""
    import numpy as np

    bits = values.view(np.uint32)
    # The kept part ends in bit 16. Adding that bit and 0x7FFF carries into it exactly if the
    # dropped part is more than half, or half and the bit is set.
    odd = bits >> np.uint32(16)
    np.bitwise_and(odd, 1, out=odd)
    np.add(odd, 0x7FFF, out=odd)
    np.add(odd, bits, out=odd)
    np.bitwise_and(odd, 0xFFFF0000, out=odd)
    low = bits & np.uint32(0x7FFFFFFF)
    if low.size and int(low.max()) > 0x7F800000:
        odd[low > 0x7F800000] = 0x7FC00000
    return odd


def is_rounded(values: Floats, stored: Bytes) -> bool:
    """Tell whether bf16 numbers, as bytes, are these float32 [n] rounded to nearest, ties to even; NaN
    if those are. Faster than rounding: the bits of a float32 order its size, so the nearest bf16
    is within 0x8000 of it, and of two at exactly that distance it is the even one."""
    import numpy as np

    bits = stored.view("<u2").astype(np.uint32)
    np.left_shift(bits, 16, out=bits)
    off = values.view(np.uint32) - bits
    np.add(off, 0x8000, out=off)
    if not off.size or (int(off.min()) > 0 and int(off.max()) < 0x10000):
        return True
    if int(off.max()) <= 0x10000:
        halfway = (off & np.uint32(0xFFFF)) == 0
        halfway &= (bits & np.uint32(0x10000)) != 0
        return not halfway.any()
    at = np.flatnonzero(off - np.uint32(1) >= 0xFFFF)
    right = bf16_bits(values[at]) == bits[at]
    return bool((right | (np.isnan(values[at]) & np.isnan(bits[at].view(np.float32)))).all())


def equal_bytes(mine: Bytes, yours: Bytes) -> bool:
    """Tell whether bytes are equal; eight at a time if possible."""
    import numpy as np

    if mine.size % 8 or yours.size != mine.size:
        return np.array_equal(mine, yours)
    return bool((mine.view(np.uint64) == yours.view(np.uint64)).all())


def as_bf16(values: Floats) -> Floats:
    """Rounded to bf16, as float32."""
    import numpy as np

    return bf16_bits(values).view(np.float32)


def fp8_results(scales: Floats, dtype: str) -> Floats:
    """The value of every code under each scale [n], rounded once to bf16: float32 [n * 256]."""
    import numpy as np

    with np.errstate(all="ignore"):
        products = fp8_table(dtype)[None, :] * scales.reshape(-1, 1)
    return as_bf16(products).reshape(-1)


def rounded(values: Floats, dtype: str) -> Floats:
    """Rounded once to BF16 or F16, as float32; F32 and F64 hold every float32."""
    import numpy as np

    if dtype == "BF16":
        return as_bf16(values)
    if dtype == "F16":
        with np.errstate(all="ignore"):
            return values.astype(np.float16).astype(np.float32)
    return values
