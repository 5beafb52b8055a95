"""The validators' decoders against slow, plain ones: numbers one by one, in whole numbers or from
torch-free arithmetic on fractions."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Source
from qconvert.validators.reading.decode import (
    as_bf16,
    floats,
    fp8_floats,
    fp8_value,
    int4_floats,
    is_rounded,
    rounded,
    scale_floats,
)
from qconvert.validators.reading.forms import Form, Grid
from qconvert.validators.reading.matrices import Matrix
from qconvert.validators.reading.rows import bf16_rows
from qconvert.validators.weights.compare import Results, bf16_results, is_worth

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


# --- Results of codes under a scale --------------------------------------------------------------


class Memory:
    """Tensors that are read from memory."""

    def __init__(self, **tensors: bytes) -> None:
        self.tensors = tensors

    def read(self, tensor: Source, start: int, into: memoryview, /) -> None:
        into[:] = self.tensors[tensor.name][start : start + into.nbytes]


@given(scale=FLOAT32, dtype=st.sampled_from(["F8_E4M3", "F8_E5M2"]))
def test_every_result_of_a_scale(scale: int, dtype: str) -> None:
    """Codes times a scale in float32, rounded to bf16: by whole numbers, and by is_rounded."""
    values = np.array([scale], np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        exact = np.array([fp8_value(code, dtype) for code in range(256)], np.float32) * values
    found = bf16_results(values, dtype)
    wanted = [nearest_bf16(int(bits)) for bits in exact.view(np.uint32)]
    number = ~np.isnan(exact)
    assert found[number].tolist() == np.array(wanted, np.uint16)[number].tolist()
    assert is_rounded(exact, found.view(np.uint8))


GRIDS = {"blocks": (128, 128), "ragged": (96, 80), "rows": (1, 200), "whole": (300, 200)}


@pytest.mark.parametrize("block", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("runs", [((0, 300),), ((130, 300), (7, 100))], ids=["all", "moved"])
@example(seed=1_009_083_139)  # more rows at a time than 16 bits have numbers for
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_are_what_their_codes_and_scales_come_to(
    block: tuple[int, int], runs: tuple[tuple[int, int], ...], seed: int
) -> None:
    """One weight after another; and any other bits of any weight are told from them."""
    random = np.random.default_rng(seed)
    high, wide = block
    shape = -(-300 // high), -(-200 // wide)
    codes = random.integers(0, 256, (300, 200), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 1
    scale = random.uniform(1e-4, 1e-3, shape).astype(np.float32)
    memory = Memory(w=codes.tobytes(), s=scale.tobytes())
    grid = Grid(Source("s", TensorType("F32", shape), 0, 0), 0, *shape, block)
    form = Form("fp8", Source("w", TensorType("F8_E4M3", (300, 200)), 0, 0), 0, 300, 200, grid)
    matrix = Matrix(("m", None, None, ""), "w", "m", None, None, form, runs)
    over = np.repeat(np.repeat(scale, high, 0), wide, 1)[:300, :200]
    exact = np.array([fp8_value(code, "F8_E4M3") for code in range(256)], np.float32)[codes] * over
    bits = as_bf16(exact).view(np.uint32) >> 16
    rows = np.concatenate([bits[a:b] for a, b in runs]).astype("<u2")
    start, stop = sorted(random.integers(0, len(rows) + 1, 2).tolist())
    results = Results(memory, matrix)
    stored = rows[start:stop].copy()
    assert results.same(stored.reshape(-1).view(np.uint8), start, stop)
    if start < stop:
        row, column = int(random.integers(stop - start)), int(random.integers(200))
        stored[row, column] ^= 1 << int(random.integers(16))
        assert not results.same(stored.reshape(-1).view(np.uint8), start, stop)


def test_results_are_worth_it_where_scales_stand_for_much() -> None:
    weight = Source("w", TensorType("F8_E4M3", (64, 4096)), 0, 0)
    for columns, worth in ((1, True), (4, True), (32, False)):
        scale = Source("s", TensorType("F32", (64, columns)), 0, 0)
        grid = Grid(scale, 0, 64, columns, (1, 4096 // columns))
        form = Form("fp8", weight, 0, 64, 4096, grid)
        matrix = Matrix(("m", None, None, ""), "w", "m", None, None, form, ((0, 64),))
        assert is_worth(matrix) is worth


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("block", [*GRIDS.values(), (1, 8)], ids=[*GRIDS, "groups"])
@given(seed=st.integers(0, 2**32 - 1))
def test_rows_as_consumers_compute_with_them(block: tuple[int, int], dtype: str, seed: int) -> None:
    """Any rows of it, weight by weight; a cut inside a block too."""
    random = np.random.default_rng(seed)
    high, wide = block
    shape = -(-300 // high), -(-200 // wide)
    codes = random.integers(0, 256, (300, 200), np.uint8)
    scale = random.uniform(1e-4, 1e-3, shape).astype(np.float32)
    memory = Memory(w=codes.tobytes(), s=scale.tobytes())
    weight = Source("w", TensorType(dtype, (300, 200)), 0, 0)
    grid = Source("s", TensorType("F32", shape), 0, 0)
    form = Form("fp8", weight, 0, 300, 200, Grid(grid, 0, *shape, block))
    matrix = Matrix(("m", None, None, ""), "w", "m", None, None, form, ((0, 300),))
    over = np.repeat(np.repeat(scale, high, 0), wide, 1)[:300, :200]
    table = np.array([fp8_value(code, dtype) for code in range(256)], np.float32)
    with np.errstate(all="ignore"):
        exact = as_bf16(table[codes] * over)
    step = int(random.choice([10, 75, 100, 300]))
    for start in range(0, 300, step):
        found = bf16_rows(memory, matrix, start, start + step)
        np.testing.assert_array_equal(found, exact[start : start + step])
