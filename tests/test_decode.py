"""The validators' decoders against slow, plain ones: numbers one by one, in whole numbers or from
torch-free arithmetic on fractions."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.validators._decode import (
    as_bf16,
    floats,
    fp8_floats,
    fp8_value,
    int4_floats,
    is_rounded,
    rounded,
    scale_floats,
)

FLOAT32 = st.integers(0, 2**32 - 1)
CODES = st.lists(st.integers(0, 255), max_size=70)


def float32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def nearest_bf16(bits: int) -> int:
    """The upper half of a float32, rounded with whole numbers: to nearest, ties to even."""
    size, sign = bits & 0x7FFFFFFF, bits >> 31 << 15
    if size > 0x7F800000:
        return 0x7FC0
    kept, rest = divmod(size, 1 << 16)
    if rest > 0x8000 or (rest == 0x8000 and kept % 2):
        kept += 1
    return sign | kept


def e4m3(code: int) -> Fraction | None:
    """By the format's table: S.EEEE.MMM, bias 7, no infinity, one NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    size = (
        Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
        if exponent
        else Fraction(mantissa, 8) / 64
    )
    return -size if code >> 7 else size


def test_every_fp8_code() -> None:
    for code in range(256):
        wanted = e4m3(code)
        found = fp8_value(code, "F8_E4M3")
        assert math.isnan(found) if wanted is None else Fraction(found) == wanted
        # E5M2 is the upper half of a float16.
        half = struct.unpack("<e", bytes([0, code]))[0]
        other = fp8_value(code, "F8_E5M2")
        assert math.isnan(other) if math.isnan(half) else other == half
        for value in (found, other):
            assert math.isnan(value) or math.copysign(1, value) == (-1 if code >> 7 else 1)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
@given(codes=CODES)
def test_fp8_in_bulk(dtype: str, codes: list[int]) -> None:
    found = fp8_floats(np.array(codes, np.uint8), dtype)
    wanted = np.array([fp8_value(code, dtype) for code in codes], np.float32)
    np.testing.assert_array_equal(found, wanted)
    assert np.array_equal(np.signbit(found[wanted == 0]), np.signbit(wanted[wanted == 0]))


@given(words=st.lists(FLOAT32, max_size=9))
def test_int4_first_code_lowest(words: list[int]) -> None:
    found = int4_floats(np.array(words, "<u4").view(np.uint8))
    wanted = [(word >> 4 * i) % 16 - 8 for word in words for i in range(8)]
    assert found.tolist() == wanted


@given(st.lists(FLOAT32, min_size=1, max_size=40))
def test_bf16_rounds_to_nearest_even(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    wanted = np.array([nearest_bf16(one) for one in bits], np.uint16)
    found = (as_bf16(values).view(np.uint32) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    assert np.array_equal(found[~nan], wanted[~nan])
    assert np.isnan(as_bf16(values)[nan]).all()
    assert is_rounded(values, wanted.view(np.uint8))


@given(st.lists(FLOAT32, min_size=1, max_size=20), st.data())
def test_a_bf16_next_to_the_nearest_is_not_it(bits: list[int], data: st.DataObject) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    wanted = np.array([nearest_bf16(one) for one in bits], np.uint16)
    at = data.draw(st.integers(0, len(bits) - 1))
    wanted[at] ^= 1 << data.draw(st.integers(0, 15))
    both_nan = math.isnan(float32(bits[at])) and math.isnan(float32(int(wanted[at]) << 16))
    assert is_rounded(values, wanted.view(np.uint8)) is both_nan


@pytest.mark.parametrize("low", [0x7FFF, 0x8000, 0x8001])
@pytest.mark.parametrize("high", [0x3F80, 0x3F81, 0x0000, 0x0001, 0x7F7F, 0xBF80, 0xFF7F, 0x7FC0])
def test_halves_and_edges(low: int, high: int) -> None:
    """Ties upwards and downwards, denormals, and what rounds to infinity."""
    values = np.array([high << 16 | low], np.uint32).view(np.float32)
    wanted = np.array([nearest_bf16(high << 16 | low)], np.uint16)
    assert is_rounded(values, wanted.view(np.uint8))
    if high != 0x7FC0:
        assert not is_rounded(values, (wanted ^ 1).view(np.uint8))


@given(st.lists(st.integers(0, 65535), max_size=30))
def test_floats(bits: list[int]) -> None:
    halves = np.array(bits, "<u2")
    found = floats(halves.view(np.uint8), "F16")
    np.testing.assert_array_equal(
        found, [struct.unpack("<e", struct.pack("<H", b))[0] for b in bits]
    )
    found = floats(halves.view(np.uint8), "BF16")
    np.testing.assert_array_equal(found, [float32(b << 16) for b in bits])


def test_exponents() -> None:
    found = scale_floats(np.arange(256, dtype=np.uint8), "F8_E8M0")
    assert math.isnan(found[255])
    assert all(Fraction(float(found[e])) == Fraction(2) ** (e - 127) for e in range(255))
    assert np.array_equal(scale_floats(np.arange(255, dtype=np.uint8), "U8"), found[:255])


def test_other_roundings() -> None:
    values = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 70000.0], np.float32)
    assert rounded(values, "F16").tolist() == [1.0, 1 + 2.0**-9, math.inf]
    assert rounded(values, "F32") is values
