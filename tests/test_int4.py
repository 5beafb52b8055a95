"""INT4 in groups, both ways. Oracles: exact integers, torch's bf16 arithmetic, nibbles picked out of
words one by one; and, marked `peer`, llm-compressor and compressed-tensors themselves."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from int_forms import rtn
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError, RunError
from qconvert.core.graph import Op
from qconvert.core.int_scheme import IntScheme
from qconvert.formats.int_packed.decode import DequantInts
from qconvert.formats.int_packed.format import group_config
from qconvert.ops.rowwise import Recode, RowOp

Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
UInt16s = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]

LIMITS = (None, 1, 5_000, 1 << 20)
EPS = 0x3C00  # 2^-7, in bf16


def bits_of(values: torch.Tensor) -> UInt16s:
    return values.contiguous().view(torch.int16).numpy().view(np.uint16)


def from_bits(bits: UInt16s) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def nibbles(packed: Int32s) -> Int32s:
    """Words [N, W] -> codes -8 to 7 [N, 8 W], one at a time from the lowest bits."""
    words = packed.astype(np.int64) & 0xFFFFFFFF
    codes = np.stack([(words >> (4 * i)) % 16 - 8 for i in range(8)], axis=-1)
    return codes.reshape(packed.shape[0], 8 * packed.shape[1]).astype(np.int32)


def words_of(codes: Int32s) -> Int32s:
    """Codes -8 to 7 [N, 8 W] -> words [N, W]."""
    stored = (codes.astype(np.int64) + 8).reshape(codes.shape[0], codes.shape[1] // 8, 8)
    total = sum(stored[:, :, i] << (4 * i) for i in range(8))
    return np.asarray(total, dtype=np.int64).astype(np.uint32).view(np.int32)


def by_torch(weight: UInt16s, group: int) -> tuple[Int32s, UInt16s]:
    """Codes and scales with torch's bf16 arithmetic, which rounds every result to bf16."""
    rows, columns = weight.shape
    if not weight.size:
        return np.zeros(weight.shape, np.int32), np.zeros((rows, columns // group), np.uint16)
    grouped = from_bits(weight).reshape(rows, columns // group, group)
    scale = grouped.abs().amax(-1) / torch.tensor(7.5, dtype=torch.bfloat16)
    scale = torch.where(scale == 0, torch.tensor(2.0**-7, dtype=torch.bfloat16), scale)
    codes = torch.round((grouped / scale[..., None]).float()).clamp(-8, 7).to(torch.int32)
    return codes.reshape(rows, columns).numpy(), bits_of(scale)


def quantize(weight: UInt16s, group: int, limit: int | None = None) -> tuple[Int32s, UInt16s]:
    """Words and scales by the op under test."""
    rows, columns = weight.shape
    source = buffer(TensorType("BF16", (rows, columns)), weight.astype(np.uint16).tobytes())
    (packed, scale), remarks = run_op(rtn(4, group), [source], limit)
    assert not remarks
    return (
        np.frombuffer(packed, np.int32).reshape(rows, columns // 8),
        np.frombuffer(scale, np.uint16).reshape(rows, columns // group),
    )


def check(weight: UInt16s, group: int, limits: tuple[int | None, ...] = LIMITS) -> None:
    codes, scales = by_torch(weight, group)
    for limit in limits:
        packed, scale = quantize(weight, group, limit)
        assert np.array_equal(scale, scales)
        assert np.array_equal(nibbles(packed), codes)


def gaussian(rows: int, columns: int, seed: int) -> UInt16s:
    torch.manual_seed(seed)
    return bits_of((torch.randn(rows, columns) * 0.02).bfloat16())


def heavy_tailed(rows: int, columns: int, seed: int) -> UInt16s:
    """Student-t with three degrees of freedom, every 37th channel an outlier: as real weights are."""
    random = np.random.default_rng(seed)
    values = 0.01 * random.standard_t(3, (rows, columns))
    values[:, ::37] *= 40
    return bits_of(torch.from_numpy(values.astype(np.float32)).bfloat16())


def strange(columns: int) -> UInt16s:
    """Rows of zeros, of negative zeros, of denormals (from one unit up), near the largest number,
    a lone large one among denormals, and everything finite."""
    random = np.random.default_rng(7)
    rows = [np.zeros(columns), np.full(columns, 0x8000)]
    for most in (1, 2, 3, 4, 7, 11, 12, 15, 40, 127, 200, 1000):  # in units of 2^-133
        signs = random.integers(0, 2, columns) << 15
        rows.append(random.integers(0, most + 1, columns) | signs)
        rows[-1][0] = most
    rows.append(random.integers(0x7F00, 0x7F80, columns) | random.integers(0, 2, columns) << 15)
    rows.append(random.integers(0, 0x80, columns))
    rows[-1][3] = 0x7F61  # about 3e38
    finite = random.integers(0, 1 << 16, columns)
    rows.append(np.where(finite & 0x7F80 == 0x7F80, 0, finite))
    return np.array(rows).astype(np.uint16)


CASES = {
    "gaussian": lambda: gaussian(37, 1024, 0),
    "heavy-tailed": lambda: heavy_tailed(53, 1024, 1),
    "strange": lambda: strange(1024),
    "more than a tile": lambda: heavy_tailed(5, 18432, 2),
}


def test_golden_packed() -> None:
    """Worked by hand, one group of eight: 1, -1, 0.5, 0.25, -0.125, 0, 3E4D, -0.

    Scale: 1 / 7.5 = 0.13333 = 1.0667 * 2^-3; 0.0667 * 128 = 8.5333 -> 9: 3E09 = 0.1337890625.
    1 / s = 7.4745, in bf16 (steps of 1/32) 7.46875 -> 7.   0.5 / s = 3.737 -> 4.
    0.25 / s = 1.869 -> 2.   -0.125 / s = -0.934 -> -1.   0 and -0 -> 0.
    3E4D = 1.6015625 * 2^-3 = 0.2001953; / s = 1.49635, in bf16 (steps of 1/128: 191.53) 1.5, and that
    to even: 2. (Without the rounding to bf16 it would be 1.)
    Stored as code + 8: F 1 C A 7 8 A 8, the first one lowest: 8A87AC1F.
    """
    weight = bytes.fromhex("803f80bf003f803e00be00004d3e0080")
    (packed, scale), _ = run_op(rtn(4, 8), [buffer(TensorType("BF16", (1, 8)), weight)])
    assert packed.hex() == "1fac878a"
    assert scale.hex() == "093e"


def test_golden_corners() -> None:
    """Worked by hand, two groups of eight.

    Zeros: scale 2^-7 = 3C00, codes 0, stored 88888888.
    -15, 15, 14, 13, 1, 1, -1, -3 with scale 15 / 7.5 = 2 = 4000: quotients -7.5, 7.5, 7, 6.5, 0.5,
    0.5, -0.5, -1.5 -> -8, 8 held to 7, 7, 6, 0, 0, 0, -2; stored 0 F F E 8 8 8 6: 688_8EFF0.
    bf16: 15 = 1.875 * 2^3 = 4170, 14 = 4160, 13 = 4150, 1 = 3F80, 3 = 4040.
    """
    weight = bytes(16) + bytes.fromhex("70c1704160415041803f803f80bf40c0")
    (packed, scale), _ = run_op(rtn(4, 8), [buffer(TensorType("BF16", (1, 16)), weight)])
    assert packed.hex() == "88888888" + "f0ef8868"
    assert scale.hex() == "003c" + "0040"


def test_golden_dequantized() -> None:
    """Worked by hand. Words 8A87AC1F and 000385B1 with scales 3E09, 3F81 = 1 + 1/128.

    First: codes 7 -7 4 2 -1 0 2 0 times 0.1337890625. 7 * s = 0.93652 = 1.87305 * 2^-1; 0.87305 * 128
    = 111.75 -> 112: 3F70. 4, 2 and 1 move the exponent: 3F09, 3E89, 3E09.
    Second: nibbles 1 B 5 8 3 0 0 0 are codes -7 3 -3 0 -5 -8 -8 -8.
    3 * 129/128 = 387/128 = 1.51171875 * 2; 0.51171875 * 128 = 65.5, a tie: 66, even: 4042.
    7 * 129/128 = 903/128 = 1.763671875 * 4; * 128 = 97.75 -> 98: 40E2.
    5 * 129/128 = 645/128 = 1.259765625 * 4; * 128 = 33.25 -> 33: 40A1.   -8 * s: C101.
    """
    packed = buffer(TensorType("I32", (1, 2)), bytes.fromhex("1fac878ab1850300"))
    scale = buffer(TensorType("BF16", (1, 2)), bytes.fromhex("093e813f"))
    (result,), _ = run_op(DequantInts(4, 8), [packed, scale])
    assert result.hex() == ("703f70bf093f893e09be0000893e0000" + "e2c0424042c00000a1c001c101c101c1")


@pytest.mark.parametrize("group", [32, 64, 128, 256, 1024])
@pytest.mark.parametrize("name", CASES)
def test_against_torch(name: str, group: int) -> None:
    check(CASES[name](), group)


@pytest.mark.parametrize("rows", [1, 2, 3, 127, 129])
def test_ragged_rows(rows: int) -> None:
    check(heavy_tailed(rows, 384, rows), 128)
    check(heavy_tailed(rows, 96, rows), 96)


@pytest.mark.parametrize("group", [1, 4, 5, 12, 600])
def test_groups_that_are_no_whole_words(group: int) -> None:
    """Over several tiles, which end between words unless care is taken."""
    weight = heavy_tailed(70, 2400, group)
    check(weight, group, (None, 100_000))
    packed, scale = quantize(weight, group)
    check_dequantized(packed, from_bits(scale).float(), "F32", group, None)


@settings(max_examples=80)
@given(
    rows=st.integers(0, 60),
    groups=st.integers(1, 12),
    group=st.sampled_from([1, 2, 4, 8, 12, 16, 24, 32, 40, 64, 128, 200]),
    limit=st.sampled_from(LIMITS),
    seed=st.integers(0, 1000),
)
def test_any_shape(rows: int, groups: int, group: int, limit: int | None, seed: int) -> None:
    columns = 8 * groups * group
    weight = np.random.default_rng(seed).integers(0, 1 << 16, (rows, columns))
    weight[weight & 0x7F80 == 0x7F80] = 0x8000
    check(weight.astype(np.uint16), group, (limit,))


def exact_code(weight: int, scale: int) -> int:
    """bf16(weight / scale) -> a whole number, by integers alone: both are positive normal bf16 bits,
    the quotient less than 8."""
    top, bottom = 0x80 | weight & 0x7F, 0x80 | scale & 0x7F
    shift = (weight >> 7) - (scale >> 7)
    if shift < -2:  # less than a half
        return 0
    # quotient = top * 2^shift / bottom, counted in 2^-9, and its step in bf16 for its size
    unit, step = 1 << (shift + 9), 1
    while top * unit >= bottom * 256 * step:
        step *= 2
    whole, rest = divmod(top * unit, bottom * step)
    if 2 * rest > bottom * step or (2 * rest == bottom * step and whole & 1):
        whole += 1
    halves, rest = divmod(whole * step, 512)
    return halves + (rest > 256 or (rest == 256 and halves & 1))


def test_every_significand_over_every_other() -> None:
    """All that decides a code is two significands and a difference of exponents: 128 groups, one for
    each significand of the largest weight, with all weights of the five octaves below."""
    weight = np.empty((128, 16 + 5 * 128), np.uint16)
    for row in range(128):
        largest = 0x3F80 + row
        below = np.arange(largest - 5 * 128, largest)
        weight[row] = [*([largest] * 16), *below]
        weight[row, 1::2] |= 0x8000
    packed, scale = quantize(weight, weight.shape[1])
    codes = nibbles(packed)
    for row in range(128):
        for column in range(15, weight.shape[1]):
            bits = int(weight[row, column])
            size = exact_code(bits & 0x7FFF, int(scale[row, 0]))
            assert codes[row, column] == (-min(size, 8) if bits >> 15 else min(size, 7))
    check(weight, weight.shape[1])


def float_division(weight: UInt16s, group: int) -> Int32s:
    """What codes would be if the quotient were not rounded to bf16."""
    _, scale = by_torch(weight, group)
    quotient = (
        from_bits(weight).float().reshape(*scale.shape, group) / from_bits(scale)[..., None].float()
    )
    return torch.round(quotient).clamp(-8, 7).to(torch.int32).reshape(weight.shape).numpy()


@pytest.mark.parametrize("make", [gaussian, heavy_tailed])
def test_the_quotient_is_rounded_to_bf16(make: Any) -> None:
    """It decides some codes, so many words: the rounding may not be optimized away."""
    weight = make(256, 1024, 3)
    packed, _ = quantize(weight, 128)
    differ = np.mean(words_of(float_division(weight, 128)) != packed)
    assert 0.005 < differ < 0.2


@settings(max_examples=60)
@given(
    group=st.sampled_from([8, 32, 48, 128]),
    rows=st.integers(1, 20),
    scale=st.sampled_from([1e-37, 1e-6, 0.02, 1.0, 1e30]),
    seed=st.integers(0, 1000),
)
def test_error_bound(group: int, rows: int, scale: float, seed: int) -> None:
    """|w - code * s| <= s / 2, the rounding of the quotient (2^-8 of w), and at the upper end, where 8
    is held to 7, what lies beyond 7.5: together never more than 0.55 s. A scale below 2^-126 is a
    multiple of 2^-133, so 7.5 of it are up to 3.75 of these off."""
    values = scale * np.random.default_rng(seed).standard_t(3, (rows, 3 * group))
    weight = bits_of(torch.from_numpy(values.astype(np.float32)).bfloat16())
    packed, stored = quantize(weight, group)
    scales = from_bits(stored).float().numpy()
    back = nibbles(packed) * np.repeat(scales.astype(np.float64), group, axis=1)
    exact = from_bits(weight).double().numpy()
    error = np.abs(back - exact).reshape(rows, 3, group)
    assert np.all(error <= 0.55 * scales.astype(np.float64)[..., None] + 4 * 2.0**-133)


@settings(max_examples=60)
@given(
    group=st.sampled_from([8, 24, 32, 128]),
    rows=st.integers(0, 20),
    dtype=st.sampled_from(["BF16", "F16", "F32"]),
    limit=st.sampled_from(LIMITS),
    seed=st.integers(0, 1000),
)
def test_dequantized(group: int, rows: int, dtype: str, limit: int | None, seed: int) -> None:
    """Any words, with scales of any size and sign."""
    random = np.random.default_rng(seed)
    packed = random.integers(-(1 << 31), 1 << 31, (rows, 5 * group // 8)).astype(np.int32)
    size = np.exp2(random.normal(-8, 4, (rows, 5))) * random.choice([-1, 0, 1, 1], (rows, 5))
    check_dequantized(packed, torch.from_numpy(size.astype(np.float32)), dtype, group, limit)


def check_dequantized(
    packed: Int32s, scale: torch.Tensor, dtype: str, group: int, limit: int | None
) -> None:
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    stored = scale.to(kinds[dtype])
    raw = stored.reshape(-1).view(torch.uint8).numpy().tobytes() if stored.numel() else b""
    rows = packed.shape[0]
    ins = [
        buffer(TensorType("I32", (rows, packed.shape[1])), packed.tobytes()),
        buffer(TensorType(dtype, (rows, int(scale.shape[1]))), raw),
    ]
    (result,), remarks = run_op(DequantInts(4, group), ins, limit)
    codes = torch.from_numpy(nibbles(packed)).float().reshape(*stored.shape, group)
    expected = (codes * stored.float()[..., None]).bfloat16().reshape(-1)
    assert np.array_equal(np.frombuffer(result, np.uint16), bits_of(expected))
    assert not remarks


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_code_with_scales_of_every_size(dtype: str) -> None:
    """From denormal scales to those whose products are just within bf16; ties on the way."""
    sizes = np.exp2(np.arange(-149, 124.9, 0.37))
    sizes = np.concatenate([sizes, -sizes, [0.0, -0.0]])
    if dtype == "F16":
        sizes = sizes[np.abs(sizes) < 65504]
    packed = np.broadcast_to(
        words_of(np.arange(-8, 8, dtype=np.int32)[None]), (sizes.size, 2)
    ).copy()
    scale = torch.from_numpy(sizes.astype(np.float32))[:, None]
    for limit in LIMITS:
        check_dequantized(packed, scale, dtype, 16, limit)


def test_dequantized_over_many_tiles() -> None:
    random = np.random.default_rng(4)
    packed = random.integers(-(1 << 31), 1 << 31, (33, 896)).astype(np.int32)
    scale = torch.from_numpy(random.normal(0, 1, (33, 56)).astype(np.float32))
    for limit in LIMITS:
        check_dequantized(packed, scale, "BF16", 128, limit)


@pytest.mark.parametrize("name", CASES)
def test_there_and_back_again(name: str) -> None:
    """Dequantizing what was packed gives code * scale, rounded once."""
    weight = CASES[name]()
    rows, columns = weight.shape
    packed, scale = quantize(weight, 128)
    ins = [
        buffer(TensorType("I32", (rows, columns // 8)), packed.tobytes()),
        buffer(TensorType("BF16", (rows, columns // 128)), scale.tobytes()),
    ]
    if name == "strange":  # its largest weights are near bf16's largest, and -8 is a step beyond
        with pytest.raises(RowError, match="beyond bf16"):
            run_op(DequantInts(4, 128), ins)
        return
    (result,), _ = run_op(DequantInts(4, 128), ins)
    codes, scales = by_torch(weight, 128)
    factors = from_bits(scales).float().numpy()
    product = codes.astype(np.float32) * np.repeat(factors, 128, axis=1)
    assert np.array_equal(nibbles(packed), codes)
    rounded = bits_of(torch.from_numpy(product).bfloat16())
    assert np.array_equal(np.frombuffer(result, np.uint16).reshape(rows, columns), rounded)
    # Codes come back from the rounded products: a code's product is off by far less than half a step.
    with np.errstate(all="ignore"):
        plain = np.repeat((scales >= 0x80) & (scales < 0x7E00), 128, axis=1)
        found = np.rint(from_bits(rounded).float().numpy() / np.repeat(factors, 128, axis=1))
    assert np.array_equal(found[plain], codes[plain])


def test_another_group_size_in_one_read() -> None:
    """Packed in groups of 32, unpacked and packed again in groups of 128, part by part."""
    packed, scale = quantize(heavy_tailed(40, 512, 5), 32)
    ins = [
        buffer(TensorType("I32", (40, 64)), packed.tobytes()),
        buffer(TensorType("BF16", (40, 16)), scale.tobytes()),
    ]
    (middle,), _ = run_op(DequantInts(4, 32), ins)
    expected = quantize(np.frombuffer(middle, np.uint16).reshape(40, 512), 128)
    for limit in LIMITS:
        found, _ = run_op(Recode(DequantInts(4, 32), (rtn(4, 128),)), ins, limit)
        assert found == [array.tobytes() for array in expected]


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
@pytest.mark.parametrize("row", [0, 5, 69])
def test_weights_that_are_not_finite(bits: int, row: int) -> None:
    weight = gaussian(70, 2048, 6)
    weight[row, 777] = bits
    with pytest.raises(RunError, match=rf"row {row} holds NaN or infinity"):
        quantize(weight, 32)
    with pytest.raises(RunError, match="row 0 holds NaN or infinity"):  # of a part of one row
        quantize(weight, 128, 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_scales_that_are_not_finite(bad: float, dtype: str) -> None:
    packed = np.zeros((90, 128), np.int32)
    scale = torch.ones(90, 8)
    scale[77, 3] = bad
    with pytest.raises(RunError, match="row 77 has a scale of NaN or infinity"):
        check_dequantized(packed, scale, dtype, 128, None)


@pytest.mark.parametrize(
    ("kind", "group", "said"),
    [
        (("F16", (4, 128)), 128, r"expected a BF16 matrix .*, found F16 \[4, 128\]"),
        (("BF16", (128,)), 128, "expected a BF16 matrix"),
        (("BF16", (2, 4, 128)), 128, "expected a BF16 matrix"),
        (("BF16", (4, 192)), 128, r" 128\b.*, found 192"),
        (("BF16", (4, 12)), 4, r"whole words of 8, found BF16 \[4, 12\]"),
        (("BF16", (4, 128)), 0, "expected groups of one or more columns"),
        (("BF16", (4, 0)), 128, r"whole words of 8, found BF16 \[4, 0\]"),
    ],
)
def test_weights_that_cannot_be_packed(
    kind: tuple[str, tuple[int, ...]], group: int, said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        rtn(4, group).infer(TensorType(*kind))


@pytest.mark.parametrize(
    ("packed", "scale", "group", "said"),
    [
        (
            ("U8", (4, 16)),
            ("BF16", (4, 1)),
            128,
            "expected packed codes in an I32 matrix, found U8",
        ),
        (("I32", (16,)), ("BF16", (1,)), 128, "expected packed codes in an I32 matrix"),
        (
            ("I32", (4, 16)),
            ("F8_E4M3", (4, 1)),
            128,
            "expected scales in F32, F16, BF16, found F8",
        ),
        (
            ("I32", (4, 17)),
            ("BF16", (4, 1)),
            128,
            "expected columns in whole groups of 128, found 136",
        ),
        (("I32", (4, 16)), ("BF16", (4, 2)), 128, r"expected scales \[4, 1\] .* found \[4, 2\]"),
        (("I32", (4, 16)), ("BF16", (1, 4)), 32, r"expected scales \[4, 4\] .* found \[1, 4\]"),
        (("I32", (4, 16)), ("BF16", (4, 1)), 0, r" 0\b.*, found 128"),
    ],
)
def test_words_that_cannot_be_unpacked(
    packed: tuple[str, tuple[int, ...]], scale: tuple[str, tuple[int, ...]], group: int, said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        DequantInts(4, group).infer(TensorType(*packed), TensorType(*scale))


def test_they_allocate_little() -> None:
    """All but some kilobytes is the scratch they declared: 6 MiB of weights go through 9 bytes an
    element of a tile."""
    weight = heavy_tailed(1024, 3072, 8)
    packed, scale = quantize(weight, 128)
    kind = TensorType("BF16", weight.shape)
    words, scales = rtn(4, 128).infer(kind)
    ins = [buffer(kind, weight.tobytes())]
    outs = [buffer(words, packed.tobytes()), buffer(scales, scale.tobytes())]
    for op, before, after in ((rtn(4, 128), ins, outs), (DequantInts(4, 128), outs, ins)):
        scratch = memoryview(bytearray(op.scratch(*(b.type for b in before))))
        op.run(before, after, scratch)
        tracemalloc.start()
        op.run(before, after, scratch)
        assert tracemalloc.get_traced_memory()[1] < 384 << 10
        tracemalloc.stop()
        assert len(scratch) < 3 << 20


def test_what_they_say_of_themselves() -> None:
    row_ops: list[RowOp] = [rtn(4, 128), DequantInts(4, 128)]
    assert all(isinstance(op, Op) for op in row_ops)
    weight = TensorType("BF16", (4, 256))
    assert "int4 in groups of 128" in str(rtn(4, 128).loss(weight))
    assert "2^-8" in str(DequantInts(4, 128).loss(*rtn(4, 128).infer(weight)))
    assert repr(rtn(4, 128)) == "PackInt4(group=128)"
    assert repr(rtn(8, None)) == "PackInt8(group=None)"
    assert repr(DequantInts(4, 128)) == "DequantInt4(group=128)"
    assert repr(DequantInts(4, 128, symmetric=False)).startswith(
        "DequantInts(bits=4, group=128, sym"
    )


# The other projects


def peer_quantized(weight: UInt16s, group: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """A scheme read from our config block, and llm-compressor's tensors under it: observed, scaled,
    quantized and packed by its own and compressed-tensors' code."""
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from llmcompressor.entrypoints.model_free.lifecycle import (
        calibrate_weight,
        initialize_quantized_linear,
    )

    scheme = QuantizationScheme.model_validate(group_config(IntScheme(group=group), ["Linear"]))
    scheme.weights.observer = "memoryless_minmax"
    module: Any = initialize_quantized_linear(from_bits(weight), scheme, "cpu")
    calibrate_weight(module)
    state = {"weight": module.weight.data, "weight_scale": module.weight_scale.data}
    return scheme, PackedQuantizationCompressor.compress(state, scheme)


@pytest.mark.peer
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("name", CASES)
def test_llm_compressor_packs_the_same(name: str, group: int) -> None:
    weight = CASES[name]()
    _, state = peer_quantized(weight, group)
    packed, scale = quantize(weight, group)
    assert state["weight_packed"].dtype == torch.int32
    assert state["weight_scale"].dtype == torch.bfloat16
    assert np.array_equal(bits_of(state["weight_scale"]), scale)
    assert np.array_equal(state["weight_packed"].numpy(), packed)
    assert state["weight_shape"].tolist() == list(weight.shape)


@pytest.mark.peer
def test_llm_compressor_packs_large_ones_the_same() -> None:
    for make in (gaussian, heavy_tailed):
        weight = make(1024, 4096, 11)
        _, state = peer_quantized(weight, 128)
        packed, scale = quantize(weight, 128)
        assert np.array_equal(state["weight_packed"].numpy(), packed)
        assert np.array_equal(bits_of(state["weight_scale"]), scale)


@pytest.mark.peer
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("name", CASES)
def test_compressed_tensors_decompresses_the_same(name: str, group: int) -> None:
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor

    weight = CASES[name]()
    scheme, state = peer_quantized(weight, group)
    expected = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    assert expected.dtype == torch.bfloat16

    def dequantized(rows: torch.Tensor) -> UInt16s:
        packed, scale = state["weight_packed"][rows], state["weight_scale"][rows]
        ins = [
            buffer(TensorType("I32", tuple(packed.shape)), packed.numpy().tobytes()),
            buffer(TensorType("BF16", tuple(scale.shape)), bits_of(scale).tobytes()),
        ]
        (result,), _ = run_op(DequantInts(4, group), ins, 5_000)
        return np.frombuffer(result, np.uint16).reshape(len(rows), -1)

    finite = expected.isfinite().all(1)
    assert np.array_equal(dequantized(finite.nonzero()[:, 0]), bits_of(expected[finite]))
    # Where compressed-tensors makes infinities, an error.
    beyond = (~finite).nonzero()[:, 0]
    assert bool(len(beyond)) == (name == "strange")
    for row in beyond:
        with pytest.raises(RowError, match="weights of up to inf, beyond bf16"):
            dequantized(row[None])


@pytest.mark.peer
def test_compressed_tensors_knows_the_config() -> None:
    """Every field is one of its scheme's (it forbids others), and means what its W4A16 preset means."""
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    config = group_config(IntScheme(), ["Linear"])
    scheme = QuantizationScheme.model_validate(config)
    preset = preset_name_to_scheme("W4A16", ["Linear"])
    preset.format = scheme.format
    assert scheme.model_dump() == preset.model_dump()
    dumped = scheme.model_dump(mode="json")
    assert {key: dumped[key] for key in config if key != "weights"} == {
        key: value for key, value in config.items() if key != "weights"
    }
    assert {key: dumped["weights"][key] for key in config["weights"]} == config["weights"]
