"""F16 and F32 to BF16, columns of a matrix as rows, and constants. Oracles: torch's conversion, exact
fractions, numpy's transpose, struct."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Op
from qconvert.ops.cast import TILE_ELEMENTS, ToBf16
from qconvert.ops.constant import Constant, constant_i64
from qconvert.ops.rowwise import RowOp
from qconvert.ops.transpose import Columns

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
UInt16s = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]

LIMITS = (None, 1, 5_000, 1 << 20)


def by_torch(raw: bytes, dtype: str) -> UInt16s:
    """torch's bf16 bits; NaN as the quiet one with its sign, which torch does not always keep."""
    kind = {"F32": torch.float32, "F16": torch.float16}[dtype]
    values = torch.frombuffer(bytearray(raw), dtype=kind)
    bits = values.bfloat16().view(torch.int16).numpy().view(np.uint16)
    width = np.dtype(np.uint32 if dtype == "F32" else np.uint16)
    signs = np.frombuffer(raw, width) >> (8 * width.itemsize - 1)
    nan = (0x7FC0 | signs.astype(np.uint16) << 15).astype(np.uint16)
    return np.where(torch.isnan(values).numpy(), nan, bits)


def cast(raw: bytes, dtype: str, shape: tuple[int, ...], limit: int | None = None) -> UInt16s:
    (result,), remarks = run_op(ToBf16(), [buffer(TensorType(dtype, shape), raw)], limit)
    assert not remarks
    return np.frombuffer(result, np.uint16)


def test_golden_f32() -> None:
    """Worked by hand: a float32's upper half is its bf16 when the lower half is zero.

    3F80 0000 = 1 stays.   3F80 8000 is halfway between 3F80 and 3F81: the even one, 3F80.
    3F81 8000 is halfway between 3F81 and 3F82: 3F82.   3F80 8001 is above halfway: 3F81.
    8000 0000 = -0 stays.  0000 8000 (denormal, halfway between 0 and 0001): 0.
    0000 8001: 0001, the smallest bf16.   7F7F 7FFF: the largest, 7F7F.   FF80 0000 = -infinity stays.
    7F80 0001, a signalling NaN: 7FC0.   FFFF FFFF, a NaN whose bits would carry over: FFC0.
    """
    words = "3F800000 3F808000 3F818000 3F808001 80000000 00008000 00008001 7F7F7FFF "
    words += "FF800000 7F800001 FFFFFFFF"
    raw = b"".join(struct.pack("<I", int(word, 16)) for word in words.split())
    expected = "3F80 3F80 3F82 3F81 8000 0000 0001 7F7F FF80 7FC0 FFC0"
    assert [f"{x:04X}" for x in cast(raw, "F32", (1, 11))] == expected.split()


def test_golden_f16() -> None:
    """Worked by hand. float16: bias 15, 10 mantissa bits, of which bf16 keeps 7.

    3C00 = 1: 3F80.   3C04 = 1 + 4/1024, halfway to 1 + 1/128: even, 3F80.   3C0C = 1 + 12/1024,
    halfway between 1/128 and 2/128: 3F82.   7BFF = 65504 rounds up to 65536 = 2^16: 4780.
    8001 = -2^-24: exponent 127 - 24 = 103 = 67h: 1 01100111 0000000 = B380.
    7C00 = infinity: 7F80.   FE00 = NaN: FFC0.   8000 = -0.
    """
    raw = bytes.fromhex("003c043c0c3cff7b0180007c00fe0080")
    expected = "3F80 3F80 3F82 4780 B380 7F80 FFC0 8000"
    assert [f"{x:04X}" for x in cast(raw, "F16", (2, 4))] == expected.split()
    assert [f"{x:04X}" for x in cast(raw[:10], "F16", (1, 5))] == expected.split()[:5]


def test_every_f16() -> None:
    """All of them, and those without infinity and NaN, which go a quicker way."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    for chosen in (codes, codes[codes & 0x7C00 != 0x7C00]):
        raw = chosen.tobytes()
        assert np.array_equal(cast(raw, "F16", (chosen.size // 256, 256)), by_torch(raw, "F16"))


def test_every_f32_near_every_bf16() -> None:
    """Around every bf16 and every halfway point: denormals, infinities and NaNs among them."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        raw = within((upper | lower).astype(np.uint32).tobytes())
        assert np.array_equal(cast(raw, "F32", (64, 1024)), by_torch(raw, "F32"))


def within(raw: bytes) -> bytes:
    """float32 with 0 for the finite ones that bf16 has no room for."""
    bits = np.frombuffer(raw, np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    return np.where((size >= 0x7F7F8000) & (size < 0x7F800000), np.uint32(0), bits).tobytes()


@pytest.mark.parametrize("bits", [0x7F7F8000, 0xFF7F8000, 0x7F7FFFFF, 0xFF7FFFFF])
@pytest.mark.parametrize("others", [[0x7F800000], [0x7FC00000], []])
def test_what_bf16_has_no_room_for_is_refused_with_its_size(bits: int, others: list[int]) -> None:
    """7F7F 8000 is halfway to what would be 2^128. Infinities and NaN beside it are no reason."""
    words = np.zeros((5, 40_000), np.uint32)
    words[4, 39_999] = bits
    words[0, : len(others)] = others
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    ins = [buffer(TensorType("F32", words.shape), words.tobytes())]
    for limit in LIMITS:
        if limit is None:
            said = f"row 4 has weights of up to {abs(value):.5g}, beyond bf16".replace("+", r"\+")
        else:
            said = r"row \d has weights of up to"  # of a part
        with pytest.raises(RowError, match=said):
            run_op(ToBf16(), ins, limit)


def nearest_bf16(value: Fraction) -> int:
    """Bits of the bf16 nearest to a positive fraction, ties to even, by the definition."""
    exponent = -126
    while value >= Fraction(2) ** (exponent + 1):
        exponent += 1
    units = round(value / Fraction(2) ** (exponent - 7))  # Python rounds ties to even
    return ((exponent + 126) << 7) + units  # a hidden bit of one raises the exponent field by one


@settings(max_examples=300)
@given(bits=st.integers(0, 0x7F7F7FFF))
def test_the_nearest_is_taken(bits: int) -> None:
    raw = struct.pack("<I", bits)
    (value,) = struct.unpack("<f", raw)
    assert int(cast(raw, "F32", (1, 1))[0]) == nearest_bf16(Fraction(value))


@settings(max_examples=60)
@given(
    rows=st.integers(0, 40),
    columns=st.integers(0, 300),
    dtype=st.sampled_from(["F32", "F16"]),
    limit=st.sampled_from(LIMITS),
    seed=st.integers(0, 1000),
)
def test_any_shape(rows: int, columns: int, dtype: str, limit: int | None, seed: int) -> None:
    width = 4 if dtype == "F32" else 2
    raw = np.random.default_rng(seed).bytes(rows * columns * width)  # all kinds of numbers
    raw = within(raw) if dtype == "F32" else raw
    found = cast(raw, dtype, (rows, columns), limit)
    assert np.array_equal(found, by_torch(raw, dtype) if raw else found)


def test_more_than_a_tile() -> None:
    random = np.random.default_rng(0)
    values = random.standard_t(3, (7, TILE_ELEMENTS // 4 + 3)).astype(np.float32)
    values[6, -1] = np.nan
    for limit in LIMITS:
        raw = values.tobytes()
        assert np.array_equal(cast(raw, "F32", values.shape, limit), by_torch(raw, "F32"))


def test_vectors_and_stacks_too() -> None:
    raw = np.linspace(-3, 3, 24, dtype=np.float32).tobytes()
    for shape in ((24,), (2, 3, 4)):
        for limit in LIMITS:
            assert np.array_equal(cast(raw, "F32", shape, limit), by_torch(raw, "F32"))


@pytest.mark.parametrize("kind", [("BF16", (2, 2)), ("I32", (2, 2)), ("F32", ())])
def test_other_types_are_refused(kind: tuple[str, tuple[int, ...]]) -> None:
    with pytest.raises(PlanError, match=r"expected a tensor .*, found"):
        ToBf16().infer(TensorType(*kind))


def test_losses_name_the_dtype() -> None:
    assert "fp32" in str(ToBf16().loss(TensorType("F32", (1, 1))))
    assert "fp16" in str(ToBf16().loss(TensorType("F16", (1, 1))))
    assert Columns(0, 1).loss(TensorType("BF16", (1, 1))) is None
    assert constant_i64((1,)).loss() is None


# Columns


def columns(matrix: UInt16s, first: int, count: int, limit: int | None = None) -> UInt16s:
    source = buffer(TensorType("BF16", matrix.shape), matrix.tobytes())
    (result,), _ = run_op(Columns(first, count), [source], limit)
    return np.frombuffer(result, np.uint16).reshape(count, matrix.shape[0])


def test_golden_columns() -> None:
    """Rows 0102 0304 0506 / 1112 1314 1516: columns 1 and 2 are 0304 1314 / 0506 1516."""
    source = buffer(TensorType("BF16", (2, 3)), bytes.fromhex("020104030605121114131615"))
    (result,), _ = run_op(Columns(1, 2), [source])
    assert result.hex() == "0403141306051615"


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (3, 300), (256, 128), (257, 129), (1030, 515)])
def test_columns_of_many_shapes(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(1).integers(0, 1 << 16, shape, dtype=np.uint16)
    for first, count in {(0, shape[1]), (shape[1] // 3, shape[1] - shape[1] // 3), (0, 1)}:
        for limit in (None, 1):
            found = columns(matrix, first, count, limit)
            assert np.array_equal(found, matrix[:, first : first + count].T)


@settings(max_examples=60)
@given(rows=st.integers(1, 600), width=st.integers(1, 300), data=st.data())
def test_any_columns(rows: int, width: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, width - 1))
    count = data.draw(st.integers(1, width - first))
    matrix = np.random.default_rng(rows).integers(0, 1 << 16, (rows, width), dtype=np.uint16)
    assert np.array_equal(columns(matrix, first, count), matrix[:, first : first + count].T)


def test_columns_then_rows_is_the_matrix() -> None:
    matrix = np.random.default_rng(2).integers(0, 1 << 16, (70, 50), dtype=np.uint16)
    assert np.array_equal(columns(columns(matrix, 0, 50), 0, 70), matrix)


@pytest.mark.parametrize(
    ("kind", "first", "count"),
    [
        (("F32", (4, 4)), 0, 4),
        (("BF16", (4,)), 0, 1),
        (("BF16", (4, 4)), 2, 3),
        (("BF16", (4, 4)), -1, 2),
        (("BF16", (4, 4)), 0, 0),
    ],
)
def test_columns_that_are_not_there(
    kind: tuple[str, tuple[int, ...]], first: int, count: int
) -> None:
    with pytest.raises(PlanError, match=r"expected .*, found"):
        Columns(first, count).infer(TensorType(*kind))


def test_columns_are_one_step() -> None:
    """All the rows of the result are, which is what makes a chain wait for all of the source."""
    kind, op = TensorType("BF16", (8, 6)), Columns(2, 4)
    assert op.row_step(kind) == 4
    assert op.rows(0, 4, kind).args == ((0, kind),)
    assert [part.outs for part in op.parts(1, kind)] == [((0, TensorType("BF16", (4, 8))),)]


# Constants


def test_golden_constant() -> None:
    """5120 = 1400h and 13824 = 3600h as little-endian 64-bit integers."""
    op = constant_i64((5120, 13824))
    for limit in LIMITS:
        (result,), remarks = run_op(op, [], limit)
        assert result.hex() == "0014000000000000" + "0036000000000000"
        assert not remarks
    assert op.infer() == (TensorType("I64", (2,)),)
    assert repr(constant_i64((1,))) != repr(constant_i64((2,)))


@given(values=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=5))
def test_any_integers(values: list[int]) -> None:
    (result,), _ = run_op(constant_i64(tuple(values)), [])
    assert np.frombuffer(result, "<i8").tolist() == values


def test_constants_that_are_none() -> None:
    with pytest.raises(PlanError, match=r"expected 4 bytes for BF16 \[2\], found 2"):
        Constant("BF16", (2,), "803f").infer()
    with pytest.raises(PlanError, match=r"expected hexadecimal bytes for BF16 \[1\], found 'xy'"):
        Constant("BF16", (1,), "xy").infer()
    with pytest.raises(PlanError, match="expected no arguments for a constant, found 1"):
        Constant("BF16", (1,), "803f").infer(TensorType("BF16", (1,)))
    with pytest.raises(PlanError, match="expected signed 64-bit values, found"):
        constant_i64((1 << 63,))


def test_they_are_ops() -> None:
    ops: list[Op] = [constant_i64((1,)), ToBf16(), Columns(0, 1)]
    row_ops: list[RowOp] = [ToBf16(), Columns(0, 1)]
    assert all(isinstance(op, Op) for op in ops)
    assert not set(row_ops) - set(ops)
