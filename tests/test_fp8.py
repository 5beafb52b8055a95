"""FP8 -> BF16 against an oracle that shares nothing with it: codes decoded from their definition,
float32 products by numpy, rounding to bf16 by torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import PlanError, RunError
from qconvert.core.graph import Buffer
from qconvert.formats.fp8.decode import DequantFp8

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def decode_e4m3(code: int) -> float:
    """OCP FP8 E4M3: bias 7, no infinities, S.1111.111 is NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def decode_e5m2(code: int) -> float:
    """OCP FP8 E5M2: bias 15, IEEE infinities and NaNs."""
    sign, exponent, mantissa = code >> 7, code >> 2 & 31, code & 3
    if exponent == 31:
        size = float("nan") if mantissa else float("inf")
    elif exponent == 0:
        size = mantissa / 4 * 2.0**-14
    else:
        size = (1 + mantissa / 4) * 2.0 ** (exponent - 15)
    return -size if sign else size


TABLES = {
    "F8_E4M3": np.array([decode_e4m3(code) for code in range(256)], dtype=np.float32),
    "F8_E5M2": np.array([decode_e5m2(code) for code in range(256)], dtype=np.float32),
}


def to_bf16(values: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    """torch's rounding to bf16, to nearest with ties to even; every NaN as 0x7FC0."""
    rounded = torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


BEYOND = "values beyond bf16, written as infinite"


def oracle(codes: Bytes, scale: Floats, block: tuple[int, int], dtype: str = "F8_E4M3") -> Floats:
    """fp32(w) * fp32(s) for weight [N, K]."""
    rows, columns = codes.shape
    spread = scale[np.arange(rows) // block[0]][:, np.arange(columns) // block[1]]
    with np.errstate(all="ignore"):
        product: Floats = TABLES[dtype][codes] * spread
    return product


def scale_buffer(scale: Floats, dtype: str) -> tuple[Buffer, Floats]:
    """The scale stored in a dtype, and the float32 values that storage holds."""
    shape = tuple(scale.shape)
    if dtype in ("F8_E8M0", "U8"):
        exponents = np.clip(np.rint(np.log2(scale)) + 127, 0, 254).astype(np.uint8)
        values = np.ldexp(np.float32(1), exponents.astype(int) - 127).astype(np.float32)
        return buffer(TensorType(dtype, shape), exponents.tobytes()), values
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    stored = torch.from_numpy(scale.copy()).to(kinds[dtype])
    raw = stored.reshape(-1).view(torch.uint8).numpy().tobytes()
    return buffer(TensorType(dtype, shape), raw), stored.float().numpy()


def random_case(
    rows: int, columns: int, block: tuple[int, int], seed: int, spread: float = 4.0
) -> tuple[Bytes, Floats]:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 256, (rows, columns), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    grid = ceil_div(rows, block[0]), ceil_div(columns, block[1])
    scale = np.exp2(random.normal(-10, spread, grid)).astype(np.float32)
    return codes, scale


def check(
    codes: Bytes, scale: Floats, block: tuple[int, int], dtype: str, limit: int | None
) -> None:
    """Against the oracle. What overflows is written, and counted."""
    stored, values = scale_buffer(scale, dtype)
    weight = buffer(TensorType("F8_E4M3", tuple(codes.shape)), codes.tobytes())
    (result,), remarks = run_op(DequantFp8(block, overflow=True), [weight, stored], limit)
    expected = to_bf16(oracle(codes, values, block))
    assert np.array_equal(np.frombuffer(result, np.uint16).reshape(codes.shape), expected)
    infinite = int(np.count_nonzero((expected & 0x7FFF) == 0x7F80))
    assert remarks == ({BEYOND: infinite} if infinite else {})


def test_the_oracle_decodes_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for name, kind in (("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)):
        decoded = codes.view(kind).float().numpy()
        assert np.array_equal(decoded, TABLES[name], equal_nan=True)


def test_golden_block() -> None:
    """Worked by hand. Block (1, 2), weight row 38 B8 7E 01, scales 0.5 and 1/3.

    0x38 = 0 0111 000 = 1.0;   0xB8 = 1 0111 000 = -1.0;  times 0.5: 0.5, -0.5 = 3F00, BF00.
    0x7E = 0 1111 110 = 1.75 * 2^8 = 448;  0x01 = 2^-9.  1/3 as float32 = 0x3EAAAAAB.
    448/3 = 149.333 = 1.1666 * 2^7: bf16 1.1640625 * 2^7 = 149 = 4315.
    2^-9/3 = 1.3333 * 2^-11: bf16 1.3359375 * 2^-11 (AAAB rounds up to AB): exponent 127-11 = 116:
    0 01110100 0101011 = 3A2B.
    """
    weight = buffer(TensorType("F8_E4M3", (1, 4)), bytes.fromhex("38b87e01"))
    scale = buffer(TensorType("F32", (1, 2)), bytes.fromhex("0000003fabaaaa3e"))
    (result,), _ = run_op(DequantFp8((1, 2)), [weight, scale])
    assert result.hex() == "003f00bf15432b3a"


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F8_E8M0", "U8"])
@pytest.mark.parametrize("rows", [1, 128, 192, 576, 960])
@pytest.mark.parametrize("columns", [128, 200, 512])
def test_ragged_shapes_and_scale_dtypes(rows: int, columns: int, dtype: str) -> None:
    codes, scale = random_case(rows, columns, (128, 128), seed=rows + columns, spread=2.0)
    for limit in (None, 1, 100_000):
        check(codes, scale, (128, 128), dtype, limit)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E8M0"])
def test_every_code_with_every_scale_size(dtype: str) -> None:
    """All codes but NaN, under scales from the smallest subnormal to the largest: the fast path
    (s < 2^7) and the slow one, subnormal and overflowing products."""
    exponents = np.arange(-149, 128, dtype=np.float64)
    scale = (np.exp2(exponents) * 1.37).clip(max=3.3e38).astype(np.float32)[:, None]
    row = np.array([c for c in range(256) if c & 0x7F != 0x7F], dtype=np.uint8)
    codes = np.broadcast_to(row, (scale.shape[0], row.size)).copy()
    if dtype == "BF16":
        scale = scale[scale[:, 0] > 1e-38]
    if dtype == "F8_E8M0":
        scale = np.exp2(np.arange(-127, 128.0)).astype(np.float32)[:, None]
    codes = codes[: scale.shape[0]]
    check(codes, scale, (1, row.size), dtype, None)
    for i in range(scale.shape[0]):  # alone, so that small scales are not sent the slow way
        check(codes[i : i + 1], scale[i : i + 1], (1, row.size), dtype, None)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    block=st.tuples(st.integers(1, 160), st.integers(1, 160)),
    limit=st.sampled_from([None, 1, 5_000, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_any_block(
    rows: int, columns: int, block: tuple[int, int], limit: int | None, seed: int
) -> None:
    codes, scale = random_case(rows, columns, block, seed)
    check(codes, scale, block, "F32", limit)


@settings(max_examples=200)
@given(
    significands=st.lists(st.integers(1, 1023), min_size=1, max_size=4),
    bits=st.sampled_from([0, 8, 9, 23]),
    exponent=st.integers(-140, 120),
)
def test_products_halfway_between_two_results(
    significands: list[int], bits: int, exponent: int
) -> None:
    """Scales of few bits give products that lie exactly halfway, and go to the even neighbour; with
    a last bit far below (2^-23 of it) they lie just above and go up."""
    row = np.array([c for c in range(256) if c & 0x7F != 0x7F], dtype=np.uint8)
    exact = [n + 2.0**-bits * n if bits else float(n) for n in significands]
    with np.errstate(over="ignore"):
        scale = np.ldexp(np.array(exact), exponent - 10).astype(np.float32)
    scale = np.nan_to_num(scale, posinf=3e38)[:, None]
    codes = np.broadcast_to(row, (scale.size, row.size)).copy()
    check(codes, scale, (1, row.size), "F32", None)
    for i in range(scale.size):  # alone: one that ties makes all beside it go the careful way
        check(codes[i : i + 1], scale[i : i + 1], (128, row.size), "F32", None)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_nan_codes_become_nan_and_are_counted(dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8).repeat(4).reshape(8, 128)
    scale = np.array([[0.25]], dtype=np.float32)
    weight = buffer(TensorType(dtype, (8, 128)), codes.tobytes())
    stored, _ = scale_buffer(scale, "F32")
    (result,), remarks = run_op(DequantFp8((128, 128), overflow=True), [weight, stored])
    expected = oracle(codes, scale, (128, 128), dtype)
    found = np.frombuffer(result, np.uint16).reshape(8, 128)
    # torch writes NaN as 0x7FC0 or 0xFFFF, depending on how many stand beside it: always this here.
    nan = 0x7FC0 | (codes & 0x80).astype(np.uint16) << 8
    assert np.array_equal(found, np.where(np.isnan(expected), nan, to_bf16(expected)))
    infinite = int(np.isinf(expected).sum())
    assert infinite == (8 if dtype == "F8_E5M2" else 0)
    nans = {"NaN codes": int(np.isnan(expected).sum())}
    assert remarks == ({**nans, BEYOND: infinite} if infinite else nans)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("fast_dtype", ["F32", "BF16"])
def test_broken_scales_are_refused(bad: float, fast_dtype: str) -> None:
    scale = np.array([[1.0, bad]], dtype=np.float32)
    kind = torch.float32 if fast_dtype == "F32" else torch.bfloat16
    raw = torch.from_numpy(scale).to(kind).reshape(-1).view(torch.uint8).numpy().tobytes()
    weight = buffer(TensorType("F8_E4M3", (4, 256)), bytes(1024))
    with pytest.raises(RunError, match="NaN or infinite"):
        run_op(DequantFp8((128, 128)), [weight, buffer(TensorType(fast_dtype, (1, 2)), raw)])


def test_e8m0_nan_is_refused() -> None:
    """Exponent byte 255 is E8M0's NaN, not 2^128."""
    weight = buffer(TensorType("F8_E4M3", (4, 128)), bytes(512))
    scale = buffer(TensorType("F8_E8M0", (1, 1)), b"\xff")
    with pytest.raises(RunError, match="NaN or infinite"):
        run_op(DequantFp8((128, 128)), [weight, scale])


def test_negative_scales_multiply() -> None:
    codes, scale = random_case(130, 130, (128, 128), seed=3)
    stored, values = scale_buffer(-scale, "F32")
    weight = buffer(TensorType("F8_E4M3", (130, 130)), codes.tobytes())
    (result,), _ = run_op(DequantFp8((128, 128)), [weight, stored])
    assert result == to_bf16(oracle(codes, values, (128, 128))).tobytes()


def test_experts_are_scaled_matrix_by_matrix() -> None:
    """[E, N, K] with N = 192: a walk over 128-row blocks of the joined rows would be wrong from the
    second expert on (as kt-kernel's Triton path was)."""
    cases = [random_case(192, 136, (128, 128), seed) for seed in range(3)]
    codes, scale = (np.stack([case[i] for case in cases]) for i in (0, 1))
    weight = buffer(TensorType("F8_E4M3", (3, 192, 136)), codes.tobytes())
    stored = buffer(TensorType("F32", (3, 2, 2)), scale.tobytes())
    expected = b"".join(to_bf16(oracle(c, s, (128, 128))).tobytes() for c, s in cases)
    for limit in (1, 60_000, 1 << 30):
        (result,), _ = run_op(DequantFp8((128, 128)), [weight, stored], limit)
        assert result == expected


@pytest.mark.parametrize(
    ("weight", "scale", "said"),
    [
        (("BF16", (128, 128)), ("F32", (1, 1)), "expected an FP8 weight"),
        (("F8_E8M0", (128, 128)), ("F32", (1, 1)), "expected an FP8 weight"),
        (("F8_E4M3", (128, 128)), ("I32", (1, 1)), "expected a scale in"),
        (("F8_E4M3", (129, 128)), ("F32", (1, 1)), r"expected a scale grid \[2, 1\]"),
        (("F8_E4M3", (128,)), ("F32", (1,)), "two or more dimensions"),
        (("F8_E4M3", (2, 128, 128)), ("F32", (1, 1)), r"expected a scale grid \[2, 1, 1\]"),
    ],
)
def test_what_does_not_fit_is_refused(
    weight: tuple[str, tuple[int, ...]], scale: tuple[str, tuple[int, ...]], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        DequantFp8((128, 128)).infer(TensorType(*weight), TensorType(*scale))


def test_power_of_two_scales_lose_nothing() -> None:
    op, weight = DequantFp8((128, 128)), TensorType("F8_E4M3", (128, 128))
    assert op.loss(weight, TensorType("F8_E8M0", (1, 1))) is None
    assert op.loss(weight, TensorType("F32", (1, 1))) is not None
    codes, _ = random_case(128, 128, (128, 128), seed=1)
    for exponent in (-120, -9, 0, 5, 100):
        scale = np.array([[2.0**exponent]], dtype=np.float32)
        exact = oracle(codes, scale, (128, 128))
        rounded = to_bf16(exact).astype(np.uint32) << 16
        assert np.array_equal(rounded.view(np.float32), exact)
