"""NVFP4's arithmetic against its definition: byte goldens, every halfway case, torch's own E4M3, and the
inverse. Against compressed-tensors and modelopt themselves: test_nvfp4_peer.py."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvfp4_rows import DTYPES, KINDS, Array, matrix, ours, stored
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError, RunError
from qconvert.core.parameter_names import Dialect
from qconvert.formats.fp8.decode import DequantFp8
from qconvert.formats.nvfp4.decode import DequantNvfp4
from qconvert.formats.nvfp4.encode import PackNvfp4, inverse
from qconvert.formats.nvfp4.format import input_scale
from qconvert.formats.nvfp4.scales import DecodedMaxima, OwnScale, RowMaxima
from qconvert.ops.fp4 import SIZES, e4m3, from_e4m3, pack, to_codes

DIALECTS: list[Dialect] = ["compressed-tensors", "modelopt"]
both = pytest.mark.parametrize("dialect", DIALECTS)


# --- codes and scales --------------------------------------------------------------------------


def codes_of(values: Array) -> Array:
    out, spare = np.empty(values.size, np.uint8), np.empty(values.size, np.uint8)
    to_codes(np.array(values, np.float32), out, spare)
    return out


def nearest(value: float) -> int:
    """The code by exact arithmetic: nearest size, of two alike the even code, 6 for all beyond."""
    size = min(Fraction(abs(value)), Fraction(6))
    distances = [abs(size - Fraction(known)) for known in SIZES]
    least = min(distances)
    code = min((n for n in range(8) if distances[n] == least), key=lambda n: n % 2)
    return code | (8 if value < 0 else 0)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=300)
@given(st.lists(finite | st.floats(-8, 8, width=32), min_size=1, max_size=40))
def test_codes_are_the_nearest(values: list[float]) -> None:
    found = codes_of(np.array(values, np.float32))
    assert found.tolist() == [nearest(value) for value in values]


def test_every_halfway_case_and_its_neighbours() -> None:
    middles = [(a + b) / 2 for a, b in pairwise(SIZES)]
    values = np.array([*middles, *SIZES, 7.0, 1e30], np.float32)
    around = [values, np.nextafter(values, np.float32(-1)), np.nextafter(values, np.float32(9e30))]
    everything = np.concatenate([*around, *(-v for v in around)])
    assert codes_of(everything).tolist() == [nearest(float(value)) for value in everything]


def test_minus_zero_has_no_sign_and_what_rounds_to_zero_keeps_it() -> None:
    assert codes_of(np.array([0.0, -0.0, -0.25, 0.25, -1e-45], np.float32)).tolist() == [
        0, 0, 8, 0, 8,
    ]  # fmt: skip


def test_the_even_column_is_the_low_half() -> None:
    codes, out = np.array([1, 15, 8, 7], np.uint8), np.empty(2, np.uint8)
    pack(codes, np.empty(4, np.uint8), out)
    assert out.tolist() == [0xF1, 0x78]


def test_e4m3_is_torchs() -> None:
    """Every number from 0 to 448 with 16 bits, and the 65,536 float32 around each boundary."""
    short = (np.arange(0x43E1, dtype=np.uint32) << 16).view(np.float32)
    assert short[-1] == 448
    bits = (np.arange(0x3A80, 0x43E0, 7, dtype=np.uint32) << 16)[:, None]
    near = (bits + np.array([0x7FFF, 0x8000, 0x8001, 1], np.uint32)).view(np.float32).reshape(-1)
    half = (np.arange(1, 127, dtype=np.uint8)).view(np.uint8)
    known = torch.from_numpy(half.copy()).view(torch.float8_e4m3fn).float().numpy()
    middles = (known[1:] + known[:-1]) / 2
    exact = np.concatenate(
        [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(449))]
    )
    values = np.concatenate([short, near[near <= 448], exact]).astype(np.float32)
    wanted = torch.from_numpy(values.copy()).to(torch.float8_e4m3fn)
    codes = np.empty(values.size, np.uint8)
    e4m3(values, codes)
    assert codes.tobytes() == wanted.view(torch.uint8).numpy().tobytes()
    assert values.tobytes() == wanted.float().numpy().tobytes()


def test_every_e4m3_code_is_read_as_torch_reads_it() -> None:
    codes = np.arange(256, dtype=np.uint8)
    wanted = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(from_e4m3(codes), wanted)


# --- bytes --------------------------------------------------------------------------------------

# A row of two blocks, largest weight 2688 = 6 * 448. modelopt: S = 2688 / 2688 = 1, the first block's
# scale is 2688 / (6 * 1) = 448, E4M3 0x7E. compressed-tensors: G = 1 / 2688 * 2688, in bf16 195 * 2^-19
# * 2688 = 0.99976 -> 1, the scale is 1 * bf16(2688 / 6) = 448 too. So the first block's codes are those
# of w / 448:
_QUOTIENTS = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -3, -6]
# ->          0  0     1    2     2  2     3    4     4    6    6  7  -0 (8) -1 (A) -3 (D) -6 (F)
_FIRST = bytes.fromhex("00 21 22 43 64 76 a8 fd".replace(" ", ""))
# The second block is zeros but for one -0: codes 0. Its scale is modelopt's 1 (0x38: exponent field 7,
# mantissa 0) or compressed-tensors' epsilon 1/8 (0x20: exponent field 4).
_GOLDEN_ROW = np.array([[*(448 * q for q in _QUOTIENTS), *([0.0] * 15), -0.0]], np.float32)


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_bytes(dialect: Dialect, dtype: str) -> None:
    (made,) = ours(dialect, dtype, _GOLDEN_ROW)
    assert made.packed == _FIRST + bytes(8)
    assert made.scale == bytes([0x7E, 0x38 if dialect == "modelopt" else 0x20])
    assert made.own == np.float32(1).tobytes()


def test_golden_bytes_where_the_dialects_differ() -> None:
    """Largest weight 1.75, a block of 29/256 and 193/4096. G: 1 / 1.75 = 146.29/256, in bf16 146/256;
    times 2688 that is 1533, in bf16, whose step is 8 there, 1536. S = 1.75 / 2688 = 1 / 1536.

    compressed-tensors: 29/256 / 6 = 29/1536 is 154.67 * 2^-13, in bf16 155 * 2^-13; times 1536 that is
    29.06, between E4M3's 28 and 30 nearer to 30: 16 * (1 + 7/8), 0x5F. 193/4096 / (30/1536) = 2.41, code
    4 (2), and 29/256 / (30/1536) = 5.8, code 7 (6).
    modelopt: 29/256 / (6 / 1536) = 29, halfway, to the even mantissa: 28, 0x5E.
    193/4096 / (28/1536) = 2.59, code 5 (3), and 6.2, code 7."""
    row = np.zeros((1, 32), np.float32)
    row[0, 0], row[0, 16], row[0, 17] = 1.75, 29 / 256, 193 / 4096
    (divided,), (multiplied,) = (ours(dialect, "BF16", row) for dialect in DIALECTS)
    assert divided.own == np.float32(1536).tobytes()
    assert multiplied.own == np.float32(1 / 1536).tobytes()
    assert divided.scale == bytes([0x7E, 0x5F])
    assert multiplied.scale == bytes([0x7E, 0x5E])
    assert divided.packed == bytes([7, *bytes(7), 0x47, *bytes(7)])
    assert multiplied.packed == bytes([7, *bytes(7), 0x57, *bytes(7)])


def test_the_dialects_differ_in_bytes() -> None:
    """Rounding to bf16 on the way moves block scales and codes: the conventions must not be mixed."""
    values = matrix("heavy", "BF16", (64, 512))
    packed, scaled = ours("compressed-tensors", "BF16", values)[0][:2]
    other, others = ours("modelopt", "BF16", values)[0][:2]
    assert packed != other
    assert scaled != others
    same = np.mean(np.frombuffer(packed, np.uint8) == np.frombuffer(other, np.uint8))
    assert same > 0.8, "and yet they are nearly the same numbers"


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_of_zeros_has_a_scale_that_is_a_number(dialect: Dialect, dtype: str) -> None:
    (made,) = ours(dialect, dtype, np.zeros((3, 32), np.float32))
    assert made.own == np.float32(1).tobytes()
    assert made.packed == bytes(48)
    assert set(made.scale) == {0x38 if dialect == "modelopt" else 0x20}


@both
def test_weights_next_to_zero_give_numbers(dialect: Dialect) -> None:
    values = np.full((2, 16), 2.0**-149, np.float32)
    (made,) = ours(dialect, "F32", values)
    own = np.frombuffer(made.own, np.float32)[0]
    assert 0 < own < np.inf
    assert np.isfinite(meaning(made, values.shape, dialect)).all()


# --- parts ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_change_nothing(dialect: Dialect, dtype: str, kind: str) -> None:
    values = matrix(kind, dtype, (67, 208))
    assert ours(dialect, dtype, values) == ours(dialect, dtype, values, limit=3000)


@both
def test_several_tiles(dialect: Dialect) -> None:
    """More than the 65,536 numbers that are worked on at a time."""
    values = matrix("heavy", "BF16", (37, 4096))
    whole = ours(dialect, "BF16", values)[0]
    rows = [
        run_op(
            PackNvfp4(None, dialect),
            [
                buffer(TensorType("BF16", (1, 4096)), stored(values[n : n + 1], "BF16")),
                buffer(TensorType("F32", (1,)), whole.own),
            ],
        )[0]
        for n in range(37)
    ]
    assert b"".join(packed for packed, _ in rows) == whole.packed
    assert b"".join(scale for _, scale in rows) == whole.scale


@both
def test_a_stored_form_is_decoded_on_the_way(dialect: Dialect) -> None:
    random = np.random.default_rng(5)
    codes = random.integers(0, 0x7F, 96 * 64).astype(np.uint8).tobytes()
    scales = random.uniform(0.5, 2, (3, 2)).astype(np.float32).tobytes()
    args = [
        buffer(TensorType("F8_E4M3", (96, 64)), codes), buffer(TensorType("F32", (3, 2)), scales)
    ]  # fmt: skip
    decoder = DequantFp8((32, 32))
    plain = buffer(TensorType("BF16", (96, 64)), run_op(decoder, args)[0][0])
    maxima = run_op(RowMaxima(), [plain])[0]
    assert run_op(DecodedMaxima(decoder, (RowMaxima(),)), args, 4000)[0] == maxima
    own = buffer(
        TensorType("F32", (1,)),
        run_op(OwnScale(dialect), [buffer(TensorType("BF16", (96,)), maxima[0])])[0][0],
    )
    wanted = run_op(PackNvfp4(None, dialect), [plain, own])[0]
    assert run_op(PackNvfp4(decoder, dialect), [*args, own], 4000)[0] == wanted


# --- one scale for several -----------------------------------------------------------------------


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_that_share_a_scale_have_the_larger_ones(dialect: Dialect, dtype: str) -> None:
    gate, up = matrix("heavy", dtype, (8, 64), 1), matrix("heavy", dtype, (24, 64), 2) * 4
    together, turned = ours(dialect, dtype, gate, up), ours(dialect, dtype, up, gate)
    assert together == turned[::-1]
    assert together[0].own == together[1].own == ours(dialect, dtype, up)[0].own
    assert together[1] == ours(dialect, dtype, up)[0]
    assert together[0].own != ours(dialect, dtype, gate)[0].own
    joined = ours(dialect, dtype, np.concatenate([gate, up]))[0]
    assert together[0].packed + together[1].packed == joined.packed
    assert together[0].scale + together[1].scale == joined.scale


def test_matrices_of_two_dtypes_share_no_scale() -> None:
    kinds = TensorType("BF16", (4,)), TensorType("F32", (4,))
    with pytest.raises(PlanError, match="must have one dtype, found BF16 and F32"):
        OwnScale("modelopt").infer(*kinds)


# --- the inverse ---------------------------------------------------------------------------------


def meaning(made: Any, shape: tuple[int, int], dialect: Dialect) -> Array:
    rows, columns = shape
    packed = np.frombuffer(made.packed, np.uint8).reshape(rows, columns // 2)
    scale = np.frombuffer(made.scale, np.uint8).reshape(rows, columns // 16)
    own = float(np.frombuffer(made.own, np.float32)[0])
    with np.errstate(over="ignore"):
        return inverse(packed, scale, own, dialect)


@both
@settings(max_examples=120)
@given(
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from([kind for kind in KINDS if kind != "mixed"]),
    rows=st.integers(2, 9),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 10_000),
)
def test_what_the_bytes_mean_is_within_half_a_step(
    dialect: Dialect, dtype: str, kind: str, rows: int, blocks: int, seed: int
) -> None:
    """Half the gap between two codes at the quotient. Beyond 6 there is what a block scale rounded down
    leaves: 6 / (1 - 2^-4) = 6.4 at most, within half the last gap; or 9 where the scale is a
    denormal of E4M3, which the smallest rounds down from 1.5."""
    shape = rows, 16 * blocks
    values = matrix(kind, dtype, shape, seed)
    (made,) = ours(dialect, dtype, values)
    own = np.frombuffer(made.own, np.float32)[0].astype(np.float64)
    scale = np.frombuffer(made.scale, np.uint8).reshape(rows, blocks)
    each = from_e4m3(scale).astype(np.float64)
    step = np.repeat(each * own if dialect == "modelopt" else each / own, 16, axis=1)
    size = np.abs(values) / step
    bound = np.where(size < 2, 0.25, np.where(size < 4, 0.5, np.maximum(size - 6, 1.0)))
    half = bound * step
    error = np.abs(meaning(made, shape, dialect).astype(np.float64) - values)
    assert (error <= half * (1 + 1e-5)).all()
    normal = np.repeat(each >= 2.0**-6, 16, axis=1)
    assert (size <= np.where(normal, 6.5, 9.1)).all()


@both
@pytest.mark.parametrize("limit", [None, 2000])
def test_decoding_is_the_inverse_rounded_to_bf16(dialect: Dialect, limit: int | None) -> None:
    shape = 70, 192
    (made,) = ours(dialect, "BF16", matrix("heavy", "BF16", shape))
    wanted = torch.from_numpy(meaning(made, shape, dialect)).bfloat16()
    args = [
        buffer(TensorType("U8", (70, 96)), made.packed),
        buffer(TensorType("F8_E4M3", (70, 12)), made.scale),
        buffer(TensorType("F32", (1,)), made.own),
    ]
    found = run_op(DequantNvfp4(dialect), args, limit)[0][0]
    assert found == wanted.view(torch.uint8).numpy().tobytes()


def test_decoding_takes_every_code_and_scale() -> None:
    """All 256 bytes of codes under all E4M3 scales that are numbers, the signed ones too."""
    scales = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    packed = np.tile(np.arange(256, dtype=np.uint8).reshape(32, 8), (1, scales.size))
    scale = np.tile(scales, (32, 1))
    shape = 32, 16 * scales.size
    args = [
        buffer(TensorType("U8", (32, shape[1] // 2)), packed.tobytes()),
        buffer(TensorType("F8_E4M3", scale.shape), scale.tobytes()),
        buffer(TensorType("F32", ()), np.float32(0.37).tobytes()),
    ]
    found = torch.frombuffer(
        bytearray(run_op(DequantNvfp4("modelopt"), args)[0][0]), dtype=torch.bfloat16
    )
    each = torch.from_numpy(scale).view(torch.float8_e4m3fn).float() * 0.37
    sizes = torch.tensor([*SIZES, *(-size for size in SIZES)])
    codes = torch.from_numpy(np.stack([packed & 15, packed >> 4], -1).reshape(shape)).long()
    wanted = (sizes[codes] * each.repeat_interleave(16, 1)).bfloat16()
    assert torch.equal(found.view(torch.int16), wanted.reshape(-1).view(torch.int16))


@pytest.mark.parametrize(("own", "scale"), [(0.0, 0x38), (-1.0, 0x38), (np.nan, 0x38), (1.0, 0x7F)])
def test_broken_scales_are_refused(own: float, scale: int) -> None:
    args = [
        buffer(TensorType("U8", (2, 8)), bytes(16)),
        buffer(TensorType("F8_E4M3", (2, 1)), bytes([0x38, scale])),
        buffer(TensorType("F32", ()), np.float32(own).tobytes()),
    ]
    with pytest.raises(RunError if scale == 0x38 else RowError, match="the checkpoint is broken"):
        run_op(DequantNvfp4("modelopt"), args)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_nan_and_infinity_name_their_row(dtype: str, value: float) -> None:
    values = matrix("heavy", dtype, (9, 32))
    values[5, 31] = value
    if dtype == "BF16" and np.isnan(value):
        values[5, 31] = np.array([0x7FC00000], np.uint32).view(np.float32)[0]
    weight = buffer(TensorType(dtype, (9, 32)), stored(values, dtype))
    with pytest.raises(RowError) as caught:
        run_op(RowMaxima(), [weight])
    assert caught.value.row == 5


@pytest.mark.parametrize(
    "kinds",
    [
        (TensorType("BF16", (4, 24)), TensorType("F32", (1,))),
        (TensorType("F8_E4M3", (4, 32)), TensorType("F32", (1,))),
        (TensorType("BF16", (4, 4, 32)), TensorType("F32", (1,))),
        (TensorType("BF16", (4, 32)), TensorType("F32", (2,))),
    ],
)
def test_what_does_not_fit_is_refused(kinds: tuple[TensorType, ...]) -> None:
    with pytest.raises(PlanError, match="expected"):
        PackNvfp4(None, "modelopt").infer(*kinds)


def test_input_scales_of_either_dialect() -> None:
    """A largest input of 21: 2688 / 21 = 128, a divisor; 21 / 2688 = 1 / 128, a multiplier."""
    assert input_scale(21, "compressed-tensors") == 128
    assert input_scale(21, "modelopt") == 1 / 128
