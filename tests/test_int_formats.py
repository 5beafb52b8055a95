"""Integer formats both ways: packers, rounding to nearest, and decoding. The oracle is int_forms.py,
words taken apart one field at a time; that rounding is llm-compressor's: test_w4a16_rtn_peer.py."""

from __future__ import annotations

from typing import Literal

import int_forms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from int_forms import Array, bf16_bits, rtn, to_array, weight
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import Codes, IntScheme, Packer
from qconvert.formats.int_packed import encode
from qconvert.formats.int_packed.decode import DequantInts
from qconvert.formats.int_packed.encode import encoder
from qconvert.formats.int_packed.gptq import DequantGptq
from qconvert.formats.int_packed.packers import PackGptq, Packing, PackQuantized, packer
from qconvert.ops.rowwise import Recode, RowOp

LIMITS = (None, 1, 4_000, 1 << 20)


def packed_parts(kind: Packer, codes: Codes, rows: int, columns: int) -> dict[str, Buffer]:
    types = kind.infer(TensorType("BF16", (rows, columns)))
    outs = [buffer(t, bytes(t.nbytes)) for t in types]
    kind.pack(codes, outs)
    return dict(zip(kind.suffixes, outs, strict=True))


def arrays(parts: dict[str, Buffer]) -> dict[str, Array]:
    return {name: to_array(bytes(part.data), part.type) for name, part in parts.items()}


def decoder(scheme: IntScheme, packing: Packing, rows: int) -> RowOp:
    if packing == "compressed-tensors":
        ordered = scheme.actorder == "group"
        return DequantInts(scheme.bits, scheme.group, scheme.symmetric, ordered)
    return DequantGptq(scheme.bits, scheme.group, 1 if packing == "gptq" else 2, 0, rows)


@st.composite
def quantized(draw: st.DrawFn) -> tuple[IntScheme, Packing, Codes]:
    """Any scheme that a form can hold, and any codes: a matrix of some words, rows whole or ragged."""
    bits: Literal[4, 8] = draw(st.sampled_from([4, 8]))
    packing: Packing = draw(st.sampled_from(["compressed-tensors", "gptq", "gptq-v2"]))
    symmetric = True if packing == "gptq" else draw(st.booleans())
    word = 32 // bits
    group = word * draw(st.integers(1, 5))
    groups = draw(st.integers(1, 4))
    rows = draw(st.integers(1, 21))
    if packing != "compressed-tensors":
        rows = -(-rows // word) * word
    per_row = draw(st.booleans())
    order: Literal["group"] | None = None if per_row else draw(st.sampled_from([None, "group"]))
    dtype: Literal["BF16", "F16", "F32"] = draw(st.sampled_from(["BF16", "F16", "F32"]))
    scheme = IntScheme(bits, None if per_row else group, symmetric, order, dtype)
    columns, scales = group * groups, 1 if per_row else groups
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    scale = (random.standard_t(3, (rows, scales)) * 0.02).astype(np.float32)
    scale = (bf16_bits(scale).astype(np.uint32) << 16).view(np.float32)
    if dtype == "F16":
        scale = scale.astype(np.float16).astype(np.float32)
    codes = Codes(
        random.integers(low, high, (rows, columns)).astype(np.int8),
        scale,
        None if symmetric else random.integers(low, high, (rows, scales)).astype(np.int8),
        random.permutation(np.arange(columns) // group).astype(np.int32) if order else None,
    )
    return scheme, packing, codes


@given(quantized())
@settings(max_examples=200)
def test_what_is_packed_is_read_back(case: tuple[IntScheme, Packing, Codes]) -> None:
    """Packed, taken apart by the oracle, and decoded by the op whole and in parts: one value."""
    scheme, packing, codes = case
    rows, columns = codes.codes.shape
    kind = packer(packing, scheme)
    parts = packed_parts(kind, codes, rows, columns)
    zero = np.zeros(codes.scale.shape, np.int64) if codes.zero is None else codes.zero.astype(int)
    side_by_side = np.arange(columns) // scheme.width(columns)
    group_of = side_by_side if codes.g_idx is None else codes.g_idx.astype(np.int64)
    expected = int_forms.quantized_values(codes.codes.astype(int), zero, codes.scale, group_of)
    if packing == "compressed-tensors":
        found = int_forms.from_compressed_tensors(arrays(parts), scheme.bits, columns)
    else:
        found = int_forms.from_gptq(arrays(parts), scheme.bits, 1 if packing == "gptq" else 2)
    assert np.array_equal(found, expected)
    for limit in LIMITS:
        (data,), remarks = run_op(decoder(scheme, packing, rows), list(parts.values()), limit)
        assert not remarks
        assert np.array_equal(np.frombuffer(data, np.uint16), bf16_bits(expected).reshape(-1))


SCHEMES = [
    IntScheme(bits, group, symmetric)
    for bits in (4, 8)
    for group in (32, 128, None)
    for symmetric in (True, False)
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rounding_does_not_depend_on_parts(scheme: IntScheme) -> None:
    source = weight(53, 256)
    op = encoder(scheme, PackQuantized(scheme))
    whole, _ = run_op(op, [source])
    for limit in (1, 3_000, 1 << 20):
        assert run_op(op, [source], limit)[0] == whole
        assert run_op(Recode(None, (op,)), [source], limit)[0] == whole


def positive(source: Buffer) -> Buffer:
    """Weights of which none is below 0: asymmetric groups start at their zero point."""
    bits = np.frombuffer(source.data, np.uint16) & np.uint16(0x7FFF)
    return buffer(source.type, bits.tobytes())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("packing", ["compressed-tensors", "gptq", "gptq-v2"])
def test_rounding_errs_by_half_a_step(scheme: IntScheme, packing: Packing) -> None:
    if packing == "gptq" and not scheme.symmetric:
        with pytest.raises(RowError, match=r"zero point of 0 in group .*: take gptq-v2"):
            run_op(encoder(scheme, packer(packing, scheme)), [positive(weight(56, 256))])
        return
    if packing != "compressed-tensors":
        scheme = IntScheme(scheme.bits, scheme.group, scheme.symmetric, scale_dtype="F16")
    source = weight(56, 256)
    kind = packer(packing, scheme)
    data, _ = run_op(encoder(scheme, kind), [source])
    types = kind.infer(source.type)
    found = dict(zip(kind.suffixes, map(to_array, data, types), strict=True))
    if packing == "compressed-tensors":
        values = int_forms.from_compressed_tensors(found, scheme.bits, 256)
        scale = found["weight_scale"]
    else:
        values = int_forms.from_gptq(found, scheme.bits, 1 if packing == "gptq" else 2)
        scale = found["scales"].astype(np.float32).T
    step = np.repeat(scale, 256 // scale.shape[1], axis=1)
    error = np.abs(values - to_array(bytes(source.data), source.type)) / step
    # A group's largest weight lies half a step beyond the largest code, and a rounded zero point moves
    # an asymmetric group by as much. A scale rounded to its dtype moves it by a part of the range; so
    # do, in bf16, the quotient, the zero point and their sum.
    reach = (1 << scheme.bits) / (2 if scheme.symmetric else 1)
    bf16 = scheme.scale_dtype == "BF16"
    roundings = 1 if not bf16 else 2 if scheme.symmetric else 4
    slack = reach * roundings * (2**-9 if bf16 else 2**-11)
    assert error.max() <= 0.5 + (0 if scheme.symmetric else 0.5) + slack
    # Of a uniform error the mean square is 1/12: 0.289.
    assert np.sqrt((error**2).mean()) < (0.31 if slack < 1 else 0.45)


def test_golden_int8() -> None:
    """Worked by hand, one row of four: 1, -1, 0.5, -0.3 (bf16: BE9A = -0.30078125).

    Scale: 1 / 127.5 = 0.00784314 = 1.00392 * 2^-7; 0.00392 * 128 = 0.502 -> 1: 3C01 = 0.00787354.
    1 / s = 127.008, in bf16 (steps of 1/2) 127 -> 127. -1 -> -127. 0.5 / s = 63.504, in bf16 (steps of
    1/4) 63.5 -> to even 64. -0.30078125 / s = -38.2015, in bf16 -38.25 -> -38.
    Stored as code + 128: FF 01 C0 5A, the first one lowest.
    """
    source = buffer(TensorType("BF16", (1, 4)), bytes.fromhex("803f80bf003f9abe"))
    (packed, scale), _ = run_op(rtn(8, None), [source])
    assert packed.hex() == "ff01c05a"
    assert scale.hex() == "013c"


def test_golden_int8_is_held_to_its_range() -> None:
    """Three of 3F81 = 1.0078125 and its negative. Scale: / 127.5 = 0.00790441 = 1.0117647 * 2^-7;
    0.0117647 * 128 = 1.50588 -> 2: 3C02 = 0.0079345703. Quotient 127.0154, in bf16 127: FF;
    negative -127: 01. The largest there is, 3FFF = 1.9921875: / 127.5 = 0.015625 = 2^-6 exactly: 3C80;
    quotient 127.5, in bf16 as it is, to even 128, held to 127: FF; and -128: 00.
    """
    source = buffer(TensorType("BF16", (2, 4)), bytes.fromhex("813f813f813f81bfff3fff3fff3fffbf"))
    (packed, scale), _ = run_op(rtn(8, None), [source])
    assert packed.hex() == "ffffff01ffffff00"
    assert scale.hex() == "023c803c"


def test_golden_asymmetric() -> None:
    """Worked by hand, one group of eight: 0, 1, 2, 3, -1, 0.5, 3.75, -0.75.

    Range -1 to 3.75: 4.75 / 15 = 0.316667 = 1.26667 * 2^-2; 0.26667 * 128 = 34.13 -> 34: 3EA2 =
    0.31640625. Zero: -1 / s = -3.1605, in bf16 (steps of 1/64: 202.27) -3.15625; -8 + 3.15625 =
    -4.84375, in bf16 as it is, to nearest -5. w / s + zero, each rounded to bf16: 0 -> -5;
    3.16 -> -1.84 -> -2; 6.32 -> 1.32 -> 1; 9.48 (in bf16, steps of 1/16: 9.5) -> 4.5 -> to even 4;
    -3.16 -> -8.16 -> -8; 1.58 -> -3.42 -> -3; 11.85 (11.875) -> 6.875 -> 7; -2.37 -> -7.37 -> -7.
    Stored + 8: 3 6 9 C 0 5 F 1, the first one lowest. Zero + 8 = 3, alone in its word.
    """
    text = "0000803f0040404080bf003f704040bf"
    source = buffer(TensorType("BF16", (1, 8)), bytes.fromhex(text))
    scheme = IntScheme(4, 8, symmetric=False)
    (packed, scale, zero), _ = run_op(encoder(scheme, PackQuantized(scheme)), [source])
    assert packed.hex() == "63c9501f"
    assert scale.hex() == "a23e"
    assert zero.hex() == "03000000"


def golden_codes(zero: int) -> Codes:
    """Eight rows of eight columns in two groups: row n holds n - 4 everywhere, but -8 in column 1."""
    codes = np.repeat(np.arange(-4, 4, dtype=np.int8)[:, None], 8, axis=1)
    codes[:, 1] = -8
    scale = np.full((8, 2), 0.5, np.float32)
    scale[:, 1] = 2
    return Codes(codes, scale, np.full((8, 2), zero, np.int8) if zero else None)


def test_golden_gptq() -> None:
    """Codes + 8 are 4 to 11 for rows 0 to 7, column 1 is 0: a row's word is 44444404, ..., BBBBBB0B,
    the lowest byte of which comes first. The symmetric zero point 8 is stored as 7 in version 1
    (77777777) and as 8 in version 2. fp16: 0.5 is 3800, 2.0 is 4000."""
    for version, zeros in ((1, "77777777"), (2, "88888888")):
        kind = PackGptq(IntScheme(4, 4, scale_dtype="F16"), version)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match=r"whole words of 8, found BF16 \[\d+, 4\]"):
            kind.infer(TensorType("BF16", (8, 4)))
        parts = packed_parts(kind, golden_codes(0), 8, 8)
        words = [part.data.hex() for part in parts.values()]
        assert words == [
            "".join(f"0{n:x}" + f"{n:x}{n:x}" * 3 for n in range(4, 12)),
            zeros * 2,
            "0038" * 8 + "0040" * 8,
            "00000000" * 4 + "01000000" * 4,
        ]


def test_golden_gptq_asymmetric() -> None:
    """Zero -5 is 3 as stored in version 2, and 2 in version 1, which has no room for one of 0."""
    scheme = IntScheme(4, 4, symmetric=False, scale_dtype="F16")
    parts = packed_parts(PackGptq(scheme, 2), golden_codes(-5), 8, 8)
    assert parts["qzeros"].data.hex() == "33333333" * 2
    parts = packed_parts(PackGptq(scheme, 1), golden_codes(-5), 8, 8)
    assert parts["qzeros"].data.hex() == "22222222" * 2
    with pytest.raises(RowError, match=r"zero point of 0 in group 0, .* take gptq-v2"):
        packed_parts(PackGptq(scheme, 1), golden_codes(-8), 8, 8)


def test_golden_zero_points_beyond_the_rows_are_nothing() -> None:
    """Three rows, zero points -8, 0 and 7: stored 0, 8, F in one word, and nothing above: 00000F80."""
    scheme = IntScheme(4, None, symmetric=False)
    codes = Codes(
        np.zeros((3, 8), np.int8), np.ones((3, 1), np.float32), np.array([[-8], [0], [7]], np.int8)
    )
    parts = packed_parts(PackQuantized(scheme), codes, 3, 8)
    assert parts["weight_zero_point"].type == TensorType("I32", (1, 1))
    assert parts["weight_zero_point"].data.hex() == "800f0000"


def test_the_quick_arithmetic_is_the_general_one(monkeypatch: pytest.MonkeyPatch) -> None:
    source = weight(37, 512)
    for bits in (4, 8):
        for group in (32, 128, None):
            quick, _ = run_op(rtn(bits, group), [source])
            with monkeypatch.context() as patch:
                patch.setattr(encode, "_is_plain", lambda scheme: False)
                assert run_op(rtn(bits, group), [source])[0] == quick


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("scheme", [IntScheme(), IntScheme(symmetric=False), IntScheme(8, None)])
def test_what_is_not_finite_is_refused_with_its_row(scheme: IntScheme, bad: str) -> None:
    source = weight(300, 1024)
    array = np.frombuffer(source.data, np.uint16).reshape(300, 1024)
    array[257, 1000] = 0x7FC0 if bad == "nan" else 0xFF80
    with pytest.raises(RowError, match="row 257 holds NaN or infinity"):
        run_op(encoder(scheme, PackQuantized(scheme)), [source])


def test_weights_beyond_fp16_scales_are_refused() -> None:
    source = buffer(TensorType("BF16", (8, 8)), bytes.fromhex("0000004a") * 32)
    scheme = IntScheme(4, 8, scale_dtype="F16")
    with pytest.raises(RowError, match="needs a scale beyond F16"):
        run_op(encoder(scheme, PackGptq(scheme)), [source])


def test_a_zero_point_that_readers_differ_on_is_refused() -> None:
    scheme = IntScheme(4, 8, symmetric=False, scale_dtype="F16")
    codes = Codes(
        np.zeros((8, 8), np.int8), np.ones((8, 1), np.float32), np.full((8, 1), 7, np.int8)
    )
    parts = list(packed_parts(PackGptq(scheme, 2), codes, 8, 8).values())
    assert run_op(DequantGptq(4, 8, 2, 0, 8), parts)
    with pytest.raises(RowError, match="column 3 has a stored zero point of 15"):
        run_op(DequantGptq(4, 8, 1, 3, 2), parts)


def test_a_column_of_no_group_is_refused() -> None:
    scheme = IntScheme(4, 8, actorder="group")
    codes = Codes(
        np.zeros((2, 16), np.int8), np.ones((2, 2), np.float32), None, np.full(16, 2, np.int32)
    )
    parts = list(packed_parts(PackQuantized(scheme), codes, 2, 16).values())
    with pytest.raises(RowError, match="has g_idx 2 for column 0, and there are 2 groups"):
        run_op(DequantInts(4, 8, g_idx=True), parts)


def test_a_cut_of_gptq_is_those_rows() -> None:
    scheme = IntScheme(4, 32, symmetric=False, scale_dtype="F16")
    source = weight(64, 128)
    parts = [
        buffer(kind, data)
        for kind, data in zip(
            PackGptq(scheme, 2).infer(source.type),
            run_op(encoder(scheme, PackGptq(scheme, 2)), [source])[0],
            strict=True,
        )
    ]
    (whole,), _ = run_op(DequantGptq(4, 32, 2, 0, 64), parts)
    (cut,), _ = run_op(DequantGptq(4, 32, 2, 5, 9), parts)
    assert cut == whole[5 * 256 : 14 * 256]


def test_schemes_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(PlanError, match="2 to 8 bits, found 9"):
        IntScheme(9)
    with pytest.raises(PlanError, match="one or more columns, found 0"):
        IntScheme(4, 0)
    with pytest.raises(PlanError, match="actorder group needs groups"):
        IntScheme(4, None, actorder="group")
    with pytest.raises(PlanError, match="has none: leave it out, or calibrate"):
        encoder(IntScheme(actorder="static"), PackQuantized(IntScheme(actorder="static")))
    with pytest.raises(PlanError, match="rows in whole words, found 12"):
        PackGptq(IntScheme()).infer(TensorType("BF16", (12, 128)))


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("scales", ["amax", "search"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_below_any_scale_are_counted(
    symmetric: bool, scales: encode.Scales, limit: int | None
) -> None:
    """Half of F16's least number is 2^-25: where the step of a group's largest weight is below it, all
    codes are 0, and what a group of zeros has for a scale says nothing of that."""
    scheme = IntScheme(4, 32, symmetric, scale_dtype="F16")
    step = 2.0**-25 * (7.5 if symmetric else 15)  # of weights above 0 alone
    # The last but one has the scale of a group of zeros as its own.
    largest = [0.0, 0.9 * step, 2.0 * step, 2.0**-8, 2.0**15 * step, 1.0]
    weights = np.zeros((8, 32 * len(largest)), np.float32)
    weights[:, ::32] = largest
    source = buffer(TensorType("BF16", weights.shape), bf16_bits(weights).tobytes())
    _, remarks = run_op(encoder(scheme, packer("gptq-v2", scheme), scales), [source], limit)
    assert remarks == {f"{encode.LOST} F16": 8}
