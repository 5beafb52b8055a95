"""E2M1 codes, and NVFP4: what ops/fp4.py and formats/nvfp4 do. Encoders of MX formats: mx.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.compiled.jit import inner, loop
from qconvert.ops.compiled.loops.bits import NAN, largest, length_of, rounded

_LEAST_SCALE = np.float32(2.0**-9)
_LEAST = np.float32(2.0**-149)


# The bits of a rounder for the power 1, less those of the power itself and of its codes.
_ROUNDER = np.int32((22 << 23) - 254)
# Of blocks: what a loop keeps of them, and factors spread over their bytes, stays in the first cache.
_TILE = 64


@inner
def _decode(source: Any, factors: Any, target: Any) -> None:
    """Two codes a byte times its factor -> two bf16 a word, the even column's in its lower half."""
    for at in range(source.size):
        byte = np.int32(source[at])
        low = _product(np.int32(byte & np.int32(0x0F)), factors[at])
        high = _product(np.int32(byte >> np.int32(4)), factors[at])
        target[at] = np.uint32(np.int32(low | np.int32(high << np.int32(16))))


@inner
def _product(code: np.int32, factor: np.float32) -> np.int32:
    """Bits of bf16(code * factor). From 1.0 on a code's bits are those of a float, moved."""
    size = np.int32(code & np.int32(7))
    bits = np.int32(np.int32(size << np.int32(22)) + np.int32(126 << 23))
    bits = bits if size > np.int32(1) else np.int32(size * np.int32(126 << 23))
    bits = np.int32(bits | np.int32(np.int32(code & np.int32(8)) << np.int32(28)))
    product = np.float32(np.int32(bits).view(np.float32) * factor).view(np.int32)
    even = np.int32(np.int32(product >> np.int32(16)) & np.int32(1))
    product = np.int32(np.int32(product + np.int32(0x7FFF)) + even)
    return np.int32(np.int32(product >> np.int32(16)) & np.int32(0xFFFF))


@loop("ru1[2]", "rf4[1]", "u4[2]")
def fp4_decode(source: Any, factor: Any, target: Any) -> bool:
    """Bytes [n, B] of n blocks and a factor for each -> pairs of BF16 [n, B]."""
    width = source.shape[1]
    spread = np.empty((_TILE, width), np.float32)
    each, codes = spread.reshape(spread.size), source.reshape(source.size)
    made = target.reshape(target.size)
    for first in range(0, source.shape[0], _TILE):
        count = min(_TILE, source.shape[0] - first)
        for block in range(count):
            for byte in range(width):
                spread[block, byte] = factor[first + block]
        part = slice(first * width, (first + count) * width)
        _decode(codes[part], each[: count * width], made[part])
    return True


@inner
def _factors(scales: Any, own: np.float32, modelopt: bool, factors: Any) -> np.int32:
    """`factors` of ops/fp4.py. Bit 7 of the answer: a scale is NaN."""
    seen = np.int32(0)
    for block in range(scales.size):
        code = np.int32(scales[block])
        seen = np.int32(seen | np.int32(np.int32(code & np.int32(0x7F)) + np.int32(1)))
        bits = np.int32(np.int32(code & np.int32(0x7F)) << np.int32(20))
        bits = np.int32(bits | np.int32(np.int32(code & np.int32(0x80)) << np.int32(24)))
        scale = np.float32(np.int32(bits).view(np.float32) * np.float32(2.0**120))
        factors[block] = np.float32(scale * own) if modelopt else np.float32(scale / own)
    return seen


@loop("ru1[2]", "ru1[1]", "float", "bool", "u4[2]")
def nvfp4_decode(source: Any, scales: Any, own: np.float32, modelopt: bool, target: Any) -> bool:
    """Bytes [n, 8] of n blocks, their E4M3 scales [n] and the matrix's own -> pairs of BF16 [n, 8].
    Declines scales that are NaN; no product may be beyond bf16."""
    factors, spread = np.empty(_TILE, np.float32), np.empty((_TILE, 8), np.float32)
    each, codes = spread.reshape(spread.size), source.reshape(source.size)
    made = target.reshape(target.size)
    for first in range(0, source.shape[0], _TILE):
        count = min(_TILE, source.shape[0] - first)
        if _factors(scales[first : first + count], own, modelopt, factors[:count]) & 0x80:
            return False
        for block in range(count):
            for byte in range(8):
                spread[block, byte] = factors[block]
        part = slice(first * 8, (first + count) * 8)
        _decode(codes[part], each[: count * 8], made[part])
    return True


@inner
def _size_code(quotient: np.float32) -> np.int32:
    """The code of a number without its sign, by one rounding: a rounder whose last bit is worth a step
    of E2M1 between the number's powers of two, 0.5 below 2. As `to_codes` of ops/fp4.py, of what is no
    NaN."""
    size = np.float32(abs(quotient))
    size = size if size < np.float32(6) else np.float32(6)
    power = np.int32(np.float32(size).view(np.int32) & np.int32(0x7F800000))
    power = power if power > np.int32(127 << 23) else np.int32(127 << 23)
    rounder = np.int32(power + np.int32(22 << 23))
    total = np.float32(size + np.int32(rounder).view(np.float32))
    steps = np.int32(np.float32(total).view(np.int32) - rounder)
    return np.int32(steps + np.int32(np.int32(power >> np.int32(22)) - np.int32(254)))


@inner
def byte_of(low: np.float32, high: np.float32) -> np.uint8:
    """The codes of two numbers."""
    code = np.int32(_size_code(low) | np.int32(_size_code(high) << np.int32(4)))
    code = np.int32(code | (np.int32(0x08) if low < np.float32(0) else np.int32(0)))
    return np.uint8(np.int32(code | (np.int32(0x80) if high < np.float32(0) else np.int32(0))))


@inner
def _nvfp4_codes(weight: Any, factors: Any, codes: Any) -> None:
    """Blocks [n, 16] of BF16 and what they are divided by -> a code for each weight, a block to a vector
    (3.0 ns a block for 4.3 two columns to a word). `_size_code`, with the power's own codes added to the
    rounder: they come out as the last bits of the sum."""
    for block in range(weight.shape[0]):
        factor = factors[block]
        for column in range(16):
            bits = np.int32(weight[block, column])
            size = np.int32(np.int32(bits & np.int32(0x7FFF)) << np.int32(16)).view(np.float32)
            quotient = np.float32(size / factor)
            quotient = quotient if quotient < np.float32(6) else np.float32(6)
            power = np.int32(np.float32(quotient).view(np.int32) & np.int32(0x7F800000))
            power = power if power > np.int32(127 << 23) else np.int32(127 << 23)
            rounder = np.int32(np.int32(power + np.int32(power >> np.int32(22))) + _ROUNDER)
            total = np.float32(quotient + np.int32(rounder).view(np.float32)).view(np.int32)
            sign = np.int32(np.int32(bits >> np.int32(12)) & np.int32(8))
            sign = sign if quotient > np.float32(0) else np.int32(0)
            codes[block, column] = np.uint8(np.int32(np.int32(total & np.int32(7)) | sign))


@inner
def _pack(pairs: Any, packed: Any) -> None:
    """Two codes in two bytes, the even column's in the lower one -> in one."""
    for at in range(packed.size):
        pair = np.uint16(pairs[at])
        packed[at] = np.uint8(np.uint16(pair | np.uint16(pair >> np.uint16(4))))


@inner
def _nvfp4_scales(sizes: Any, own: np.float32, modelopt: bool, codes: Any, factors: Any) -> None:
    """The largest weights of blocks, as float32 -> the codes of their scales, and what their weights are
    divided by."""
    for block in range(sizes.size):
        each = sizes[block]
        if modelopt:
            each = np.float32(each / np.float32(np.float32(6) * own))
            each = each if each != np.float32(0) else np.float32(1)
            each = each if each > _LEAST_SCALE else _LEAST_SCALE
        else:
            each = np.float32(rounded(np.float32(each / np.float32(6))) * own)
        each = each if each < np.float32(448) else np.float32(448)
        # `e4m3` of ops/fp4.py.
        power = np.int32(np.float32(each).view(np.int32) & np.int32(0x7F800000))
        power = power if power > np.int32(121 << 23) else np.int32(121 << 23)
        rounder = np.int32(power + np.int32(20 << 23)).view(np.float32)
        total = np.float32(each + rounder)
        steps = np.int32(np.float32(total).view(np.int32) & np.int32(0xFF))
        code = np.int32(np.int32(np.int32(power >> np.int32(23)) - np.int32(121)) * np.int32(8))
        code = np.int32(code + steps)
        each = np.float32(total - rounder)
        if modelopt:
            each = np.float32(each * own)
        else:
            code = code if each != np.float32(0) else np.int32(0x20)
            each = each if each != np.float32(0) else np.float32(0.125)
            each = np.float32(each / own)
        codes[block] = np.uint8(code)
        # Of 0 the least number makes the same codes: 0 of zeros, 7 of all others.
        factors[block] = each if each != np.float32(0) else _LEAST


@loop("ru2[2]", "u2[1]")
def row_maxima(weight: Any, maxima: Any) -> bool:
    """The bits of the largest size in each row of BF16 [N, K]. Declines NaN and infinity."""
    most = np.int32(0)
    for row in range(weight.shape[0]):
        size = largest(weight[row])
        most = size if size > most else most
        maxima[row] = np.uint16(size)
    return bool(most < NAN)


# Of lanes 0 to 15, in E4M3 codes: formats/nvfp4/encode.py.
_TRIED = 16


@inner
def _nvfp4_errors(weight: Any, lanes: Any) -> None:
    """Of 16 inverse factors the sums of squared errors, and of errors times weights, side by side;
    loops/search.py says why in one array."""
    for lane in range(_TRIED):
        lanes[_TRIED + lane] = lanes[3 * _TRIED + lane] = np.float32(0)
    for column in range(16):
        size = np.int32(np.int32(weight[column] & np.uint16(0x7FFF)) << np.int32(16))
        value = np.int32(size).view(np.float32)
        for lane in range(_TRIED):
            quotient = np.float32(value * lanes[lane])
            bits = np.int32(np.float32(quotient).view(np.int32) & np.int32(0x7F800000))
            bits = bits if bits > np.int32(127 << 23) else np.int32(127 << 23)
            bits = bits if bits < np.int32(129 << 23) else np.int32(129 << 23)
            rounder = np.int32(bits + np.int32((22 << 23) + (1 << 22))).view(np.float32)
            code = np.float32(np.float32(quotient + rounder) - rounder)
            code = code if code < np.float32(6) else np.float32(6)
            off = np.float32(quotient - code)
            lanes[_TRIED + lane] = np.float32(lanes[_TRIED + lane] + np.float32(off * off))
            along = np.float32(quotient * off)
            lanes[3 * _TRIED + lane] = np.float32(lanes[3 * _TRIED + lane] + along)


@inner
def _nvfp4_best(
    weight: Any, lanes: Any, code: np.int32, factor: np.float32, size: np.float32, own: np.float32,
    modelopt: bool,
) -> tuple[np.int32, np.float32]:  # fmt: skip
    """The best of the E4M3 codes around `code`, whose factor is `factor`, and its factor; `size`: of the
    largest weight."""
    if not (np.float32(2.0**-120) < factor < np.float32(2.0**120)):
        return code, factor
    for lane in range(_TRIED):
        other = np.int32(code + lane) if lane < 9 else np.int32(code - lane + 8)
        each = np.float32(np.int32(other << np.int32(20)).view(np.float32) * np.float32(2.0**120))
        each = np.float32(each * own) if modelopt else np.float32(each / own)
        each = each if lane > 0 else factor
        lanes[2 * _TRIED + lane] = each
        lanes[lane] = np.float32(np.float32(1) / each)
    _nvfp4_errors(weight, lanes)
    length = length_of(weight, size)
    least, best, found = np.inf, code, factor
    for lane in range(_TRIED):
        other = np.int32(code + lane) if lane < 9 else np.int32(code - lane + 8)
        wide = np.float64(lanes[2 * _TRIED + lane])
        along = np.float64(lanes[3 * _TRIED + lane]) * np.float64(wide / np.float64(size))
        error = np.float64(lanes[_TRIED + lane]) + np.float64(along * along / length)
        error = error * np.float64(wide * wide)
        if np.int32(1) <= other <= np.int32(0x7E) and error < least:
            least, best, found = error, other, lanes[2 * _TRIED + lane]
    return best, found


@loop("ru2[2]", "float", "bool", "bool", "u1[2]", "u1[1]")
def nvfp4_encode(
    weight: Any, own: np.float32, modelopt: bool, search: bool, packed: Any, scales: Any
) -> bool:
    """Blocks [n, 16] of BF16 and the matrix's own scale -> packed [n, 8] and E4M3 scales [n], or the
    best around them. Tiles of blocks: maxima, then scales side by side, then codes side by side."""
    lanes = np.empty(4 * _TRIED, np.float32)
    sizes, factors = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32)
    single, made = np.empty((_TILE, 16), np.uint8), packed.reshape(packed.size)
    pairs = single.reshape(single.size).view(np.uint16)
    for first in range(0, weight.shape[0], _TILE):
        count = min(_TILE, weight.shape[0] - first)
        most = np.int32(0)
        for block in range(count):
            size = largest(weight[first + block])
            most = size if size > most else most
            sizes[block] = np.int32(size << np.int32(16)).view(np.float32)
        if most >= NAN:
            return False
        codes = scales[first : first + count]
        _nvfp4_scales(sizes[:count], own, modelopt, codes, factors[:count])
        for block in range(count if search else 0):
            code, each = np.int32(codes[block]), factors[block]
            code, each = _nvfp4_best(
                weight[first + block], lanes, code, each, sizes[block], own, modelopt
            )
            codes[block], factors[block] = np.uint8(code), each
        _nvfp4_codes(weight[first : first + count], factors, single)
        _pack(pairs[: 8 * count], made[8 * first : 8 * (first + count)])
    return True
