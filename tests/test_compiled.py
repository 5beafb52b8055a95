"""Compiled loops against numpy's form of the same ops, bit for bit, and what chooses between them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from checkpoints import bf16_moe, run_cli, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from models import numbers_only, qwen3_moe
from ops_harness import buffer, run_op
from test_architecture import dotted, trees

from qconvert.compiled import choice
from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import QConvertError, RunError
from qconvert.core.graph import Buffer, Op
from qconvert.core.int_scheme import IntScheme
from qconvert.formats.amx.encode import Amx
from qconvert.formats.fp8.decode import DequantFp8
from qconvert.formats.fp8.encode import EncodeFp8, EncodeFp8Tensor
from qconvert.formats.int_packed.awq import DequantAwq, DequantQuark
from qconvert.formats.int_packed.decode import DequantInt8, DequantInts
from qconvert.formats.int_packed.encode import encoder
from qconvert.formats.int_packed.gptq import DequantGptq
from qconvert.formats.int_packed.packers import KeepInt8, PackGptq, PackQuantized
from qconvert.formats.mx.decode import DequantMxfp4, DequantMxfp4Columns
from qconvert.formats.mx.encode import EncodeMx, EncodeQuarkMxfp4
from qconvert.formats.nvfp4.decode import DequantNvfp4
from qconvert.formats.nvfp4.encode import PackNvfp4
from qconvert.formats.nvfp4.scales import RowMaxima
from qconvert.ops import compiled

Bits = np.ndarray[Any, np.dtype[np.uint16]]
Random = np.random.Generator


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    compiled.use(False)


# --- Weights -------------------------------------------------------------------------------------


def bf16(values: Any) -> Bits:
    found: Bits = (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return found


def gaussian(random: Random, rows: int, columns: int) -> Bits:
    return bf16(0.02 * random.standard_normal((rows, columns)))


def every_size(random: Random, rows: int, columns: int) -> Bits:
    """All exponents but those of infinities, a power of two a row and a spread within it."""
    power = random.integers(-100, 110, (rows, 1)) + random.integers(-12, 12, (rows, columns))
    return bf16(np.ldexp(random.uniform(-2, 2, (rows, columns)), power))


def with_zeros(random: Random, rows: int, columns: int) -> Bits:
    """Groups, rows and single weights of zero, some of them negative zero."""
    found = gaussian(random, rows, columns)
    found[random.random((rows, columns)) < 0.3] = 0x8000
    found[random.integers(rows)] = 0
    found[:, : columns // 2] &= np.uint16(0x8000)
    return found


def alike(random: Random, rows: int, columns: int) -> Bits:
    """Few values: quotients tie."""
    return bf16(random.integers(-16, 17, (rows, columns)) / 8)


def tiny(random: Random, rows: int, columns: int) -> Bits:
    """Denormals, and what is just above."""
    found = random.integers(0, 0x0200, (rows, columns), np.uint16)
    found |= random.integers(0, 2, (rows, columns), np.uint16) << np.uint16(15)
    return found


def broken(random: Random, rows: int, columns: int) -> Bits:
    found = gaussian(random, rows, columns)
    found[random.integers(rows), random.integers(columns)] = random.choice([0x7F80, 0xFFC1, 0x7FC0])
    return found


def any_bits(random: Random, rows: int, columns: int) -> Bits:
    found = random.integers(0, 1 << 16, (rows, columns), np.uint16)
    found[(found & 0x7F80) == 0x7F80] ^= np.uint16(0x4000)
    return found


WEIGHTS = (gaussian, every_size, with_zeros, alike, tiny, broken, any_bits)
_ORDINARY = (gaussian, with_zeros, alike)


# --- Ops -----------------------------------------------------------------------------------------


class Encoder(NamedTuple):
    """An op of a BF16 matrix: the loops it runs in, and what its rows and columns are multiples of."""

    op: Op
    loops: tuple[str, ...]
    rows: int = 1
    columns: int = 1
    scale: TensorType | None = None  # its second argument, of numbers about `about`
    about: float = 0.0

    def ins(self, random: Random, weights: Bits) -> list[Buffer]:
        if self.scale is None:
            return [matrix(weights)]
        own = np.array([self.about * random.uniform(0.5, 2)], "<f4")
        data = own.tobytes()[2:] if self.scale.dtype == "BF16" else own.tobytes()
        return [matrix(weights), buffer(self.scale, data)]


def _int(
    packer: Callable[[IntScheme], Any], scales: Any = "amax", signs: Any = "positive", **scheme: Any
) -> Op:
    made = IntScheme(**scheme)
    return encoder(made, packer(made), scales, signs)


_F32, _BF16 = TensorType("F32", (1,)), TensorType("BF16", (1,))
ENCODERS = {
    "fp8 tensor": Encoder(EncodeFp8Tensor(None, "fp8"), ("fp8_codes",), scale=_F32, about=2e-4),
    "fp8 tensor, compressed-tensors": Encoder(
        EncodeFp8Tensor(None, "compressed-tensors"), ("fp8_codes",), scale=_BF16, about=2e-4
    ),
    "nvfp4": Encoder(
        PackNvfp4(None, "modelopt"), ("nvfp4_encode",), 1, 16, scale=_F32, about=0.08 / 2688
    ),
    "nvfp4, compressed-tensors": Encoder(
        PackNvfp4(None, "compressed-tensors"), ("nvfp4_encode",), 1, 16, scale=_F32, about=2688 / 0.08
    ),
    "nvfp4 with a tiny scale": Encoder(
        PackNvfp4(None, "modelopt"), ("nvfp4_encode",), 1, 16, scale=_F32, about=1e-42
    ),
    "nvfp4 searched": Encoder(
        PackNvfp4(None, "modelopt", "search"), ("nvfp4_encode",), 1, 16, scale=_F32, about=0.08 / 2688
    ),
    "nvfp4 searched, compressed-tensors": Encoder(
        PackNvfp4(None, "compressed-tensors", "search"), ("nvfp4_encode",), 1, 16, scale=_F32,
        about=2688 / 0.08,
    ),
    "nvfp4 searched with a tiny scale": Encoder(
        PackNvfp4(None, "modelopt", "search"), ("nvfp4_encode",), 1, 16, scale=_F32, about=1e-42
    ),
    "nvfp4 row maxima": Encoder(RowMaxima(), ("row_maxima",)),
    "mxfp4": Encoder(EncodeMx("mxfp4"), ("mxfp4_encode",), 1, 32),
    "mxfp4 of Quark": Encoder(EncodeQuarkMxfp4("mxfp4"), ("mxfp4_encode",), 1, 32),
    "mxfp8": Encoder(EncodeMx("mxfp8"), ("mxfp8_encode",), 1, 32),
    "fp8 blocks": Encoder(EncodeFp8("fp8", (16, 24)), ("fp8_encode",)),
    "fp8 exponents": Encoder(EncodeFp8("fp8", (16, 24), True), ("fp8_encode",)),
    "fp8 rows": Encoder(EncodeFp8("fp8", None), ("fp8_encode",)),
    "fp8 blocks, compressed-tensors": Encoder(
        EncodeFp8("compressed-tensors", (16, 24)), ("fp8_encode",)
    ),
    "fp8 rows, compressed-tensors": Encoder(EncodeFp8("compressed-tensors", None), ("fp8_encode",)),
    "amx int4": Encoder(Amx("int4"), ("amx_int4",), 128, 128),
    "amx int8": Encoder(Amx("int8"), ("amx_int8",), 64, 64),
    "amx int4, searched": Encoder(Amx("int4", 1, "search"), ("amx_search",), 128, 128),
    "amx int8, searched": Encoder(Amx("int8", 1, "search"), ("amx_search",), 64, 64),
    "amx int4 in shards, searched": Encoder(Amx("int4", 3, "search"), ("amx_search",), 128, 384),
    "amx int8 in shards, searched": Encoder(Amx("int8", 2, "search"), ("amx_search",), 64, 128),
    "amx int4 in shards": Encoder(Amx("int4", 2), ("amx_int4",), 128, 256),
    "amx int8 in shards": Encoder(Amx("int8", 3), ("amx_int8",), 64, 192),
    "w4a16 g128": Encoder(_int(PackQuantized, bits=4, group=128), ("ints_round_pack",), 1, 128),
    "w4a16 g32": Encoder(_int(PackQuantized, bits=4, group=32), ("ints_round_pack",), 1, 32),
    "w4a16 g40": Encoder(_int(PackQuantized, bits=4, group=40), ("ints_round", "ints_pack"), 1, 40),
    "w4a16 rows": Encoder(_int(PackQuantized, bits=4, group=None), ("ints_round", "ints_pack"), 1, 8),
    "w8a16 g32": Encoder(_int(PackQuantized, bits=8, group=32), ("ints_round",), 1, 32),
    "w4a16 asymmetric": Encoder(
        _int(PackQuantized, bits=4, group=32, symmetric=False), ("ints_round_any", "ints_pack"), 8, 32
    ),
    "w8a16 asymmetric": Encoder(
        _int(PackQuantized, bits=8, group=None, symmetric=False), ("ints_round_any",), 4, 4
    ),
    "gptq in F16": Encoder(
        _int(PackGptq, bits=4, group=32, scale_dtype="F16"), ("ints_round_any", "ints_pack"), 8, 32
    ),
    "gptq-v2 asymmetric": Encoder(
        _int(partial(PackGptq, version=2), bits=8, group=32, symmetric=False, scale_dtype="F16"),
        ("ints_round_any",), 4, 32,
    ),
    "gptq": Encoder(_int(PackGptq, bits=4, group=32), ("ints_round", "ints_pack"), 8, 32),
    "w4a16 g32, searched": Encoder(
        _int(PackQuantized, "search", bits=4, group=32), ("ints_search", "ints_pack"), 1, 32
    ),
    "w4a16 g32, searched both ways": Encoder(
        _int(PackQuantized, "search", "both", bits=4, group=32), ("ints_search", "ints_pack"), 1, 32
    ),
    "w4a16 rows, searched both ways": Encoder(
        _int(PackQuantized, "search", "both", bits=4, group=None), ("ints_search", "ints_pack"), 1, 320
    ),
    "gptq in F16, searched both ways": Encoder(
        _int(PackGptq, "search", "both", bits=4, group=32, scale_dtype="F16"),
        ("ints_search", "ints_pack"), 8, 32,
    ),
    "w4a16 rows, searched": Encoder(
        _int(PackQuantized, "search", bits=4, group=None), ("ints_search", "ints_pack"), 1, 320
    ),
    "w8a16 searched": Encoder(
        _int(PackQuantized, "search", bits=8, group=128), ("ints_search",), 1, 128
    ),
    "w4a16 asymmetric, searched": Encoder(
        _int(PackQuantized, "search", bits=4, group=32, symmetric=False), ("ints_search", "ints_pack"),
        8, 32,
    ),
    "w8a16 asymmetric, searched": Encoder(
        _int(PackQuantized, "search", bits=8, group=None, symmetric=False), ("ints_search",), 4, 4
    ),
    "gptq in F16, searched": Encoder(
        _int(PackGptq, "search", bits=4, group=32, scale_dtype="F16"), ("ints_search", "ints_pack"),
        8, 32,
    ),
    "gptq-v2 asymmetric, searched": Encoder(
        _int(
            partial(PackGptq, version=2), "search", bits=4, group=32, symmetric=False, scale_dtype="F16"
        ),
        ("ints_search", "ints_pack"), 8, 32,
    ),
    "int8 in F32, searched": Encoder(
        _int(lambda _: KeepInt8(), "search", bits=8, group=None, scale_dtype="F32", narrow=True),
        ("ints_search",),
    ),
    "int8": Encoder(_int(lambda _: KeepInt8(), bits=8, group=None), ("ints_round",)),
}  # fmt: skip


def matrix(bits: Bits) -> Buffer:
    return buffer(TensorType("BF16", bits.shape), bits.tobytes())


def outcome(op: Op, ins: Sequence[Buffer], *, on: bool, limit: int | None = None) -> Any:
    """What an op makes, or says."""
    compiled.use(on)
    try:
        with np.errstate(all="ignore"):  # scales that no plan would give
            return run_op(op, ins, limit)
    except QConvertError as error:
        return type(error), vars(error), str(error)
    finally:
        compiled.use(False)


def same(op: Op, ins: Sequence[Buffer], limit: int | None = None) -> None:
    plain, fast = (outcome(op, ins, on=on, limit=limit) for on in (False, True))
    assert plain == fast


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The loops that made results."""
    found: set[str] = set()
    real = compiled.done

    def done(name: str, *args: Any) -> bool:
        made = real(name, *args)
        if made:
            found.add(name)
        return made

    for module in [*sys.modules.values()]:
        name = getattr(module, "__name__", "")  # not all that stands there is a module
        if name.startswith("qconvert.") and vars(module).get("done") is real:
            monkeypatch.setattr(module, "done", done)
    return found


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name: str, weights: Callable[..., Bits], accepted: set[str]) -> None:
    found = ENCODERS[name]
    random = np.random.default_rng(len(name))
    rows, columns = (
        2 * found.rows + (found.rows == 1),
        3 * found.columns + (found.columns == 1) * 34,
    )
    same(found.op, found.ins(random, weights(random, rows, columns)))
    if weights in _ORDINARY:
        assert accepted == set(found.loops)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(ENCODERS)), st.sampled_from(WEIGHTS), st.integers(1, 4),
    st.integers(1, 5), st.integers(0, 1 << 30), st.booleans(),
)  # fmt: skip
def test_encoders_of_any_shape(
    name: str, weights: Callable[..., Bits], tall: int, wide: int, seed: int, parts: bool
) -> None:
    found = ENCODERS[name]
    random = np.random.default_rng(seed)
    made = found.ins(random, weights(random, tall * found.rows, wide * found.columns))
    same(found.op, made, 2000 if parts else None)


def test_mxfp4_every_weight_under_exponents_of_every_kind(accepted: set[str]) -> None:
    """Every bf16 up to each group's largest, which is the group's first: beside denormals, where the
    loop computes with bits, at the ends of where it does, and beyond."""
    for power in (0, 1, 3, 4, 5, 60, 121, 126, 127, 128, 129, 200, 252):
        largest = min((power + 2) << 7 | 0x5F, 0x7F7F)  # just below 1.75 times a power of two
        sizes = np.arange(largest + 1, dtype=np.uint16)
        each = np.concatenate([sizes, sizes | np.uint16(0x8000)])
        groups = np.full((-(-each.size // 31), 32), largest, np.uint16)
        groups[:, 1:] = np.resize(each, (groups.shape[0], 31))
        same(EncodeMx("mxfp4"), [matrix(groups)])
    assert accepted == {"mxfp4_encode"}


def test_amx_beyond_a_block_of_columns(accepted: set[str]) -> None:
    """From 3584 columns on rows stay together in blocks."""
    for name, columns in (("amx int4", 3584 + 256), ("amx int8", 2 * 3584 + 64)):
        made = gaussian(np.random.default_rng(1), 128, columns)
        same(ENCODERS[name].op, [matrix(made)])
    assert accepted == {"amx_int4", "amx_int8"}


# --- FP8 -----------------------------------------------------------------------------------------


def fp8(codes: Any, scale: Any, dtype: str = "F8_E4M3") -> list[Buffer]:
    codes, scale = np.asarray(codes, np.uint8), np.asarray(scale, np.float32)
    return [
        buffer(TensorType(dtype, codes.shape), codes.tobytes()),
        buffer(TensorType("F32", scale.shape), scale.tobytes()),
    ]


def test_fp8_every_code_with_scales_of_every_size(accepted: set[str]) -> None:
    """256 codes times scales of all exponents: ties, denormal products, and (declined) overflow."""
    random = np.random.default_rng(3)
    numbers = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    for low, high in ((-149, -120), (-120, 0), (0, 7), (7, 118), (118, 121)):
        powers = random.integers(low, high, (300, 1))
        kinds = (
            random.uniform(1, 2, powers.shape),
            1 + random.integers(0, 128, powers.shape) / 128,
        )
        for mantissa in kinds:
            scale = np.ldexp(mantissa, powers)
            codes = np.tile(numbers, (300, 1))
            for overflow in (False, True):
                same(DequantFp8((1, numbers.size), overflow), fp8(codes, scale))
    assert accepted == {"fp8_decode"}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 90), st.integers(1, 50), st.integers(1, 100),
    st.integers(0, 1 << 30), st.sampled_from(["F8_E4M3", "F8_E5M2"]), st.sampled_from([0, 0, 1, 2]),
    st.booleans(),
)  # fmt: skip
def test_fp8_of_any_shape(
    rows: int, columns: int, height: int, width: int, seed: int, dtype: str, nan: int, parts: bool
) -> None:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 0x78, (rows, columns), np.uint8)
    codes |= random.integers(0, 2, codes.shape, np.uint8) << 7
    codes.reshape(-1)[:nan] = 0xFF
    grid = ceil_div(rows, height), ceil_div(columns, width)
    scale = np.ldexp(random.standard_normal(grid), random.integers(-30, 9, grid))
    same(DequantFp8((height, width)), fp8(codes, scale, dtype), 300 if parts else None)


def test_fp8_broken_scales_are_refused_alike() -> None:
    for bad in (np.nan, np.inf):
        same(DequantFp8((1, 8)), fp8(np.zeros((2, 8)), [[1.0], [bad]]))


# --- Codes of four bits, and integers ------------------------------------------------------------


def test_fp4_every_byte_under_every_scale(accepted: set[str]) -> None:
    rows = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    packed = buffer(TensorType("U8", rows.shape), rows.tobytes())
    for first in (0, 1, 127):  # 254 is risky, 255 NaN
        scale = np.repeat(np.arange(256, dtype=np.uint8).clip(first, 252)[:, None], 16, axis=1)
        made = buffer(TensorType("U8", scale.shape), scale.tobytes())
        same(DequantMxfp4(), [packed, made])
    assert accepted == {"fp4_decode"}
    for high in (253, 254, 255):
        exponents = buffer(TensorType("U8", (256, 16)), bytes([high]) * 4096)
        for overflow in (False, True):
            same(DequantMxfp4(overflow), [packed, exponents])


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_nvfp4_every_byte_under_every_scale(dialect: Any, accepted: set[str]) -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    blocks = np.repeat(codes[:, None], 32, axis=1)
    rows = np.tile(np.arange(256, dtype=np.uint8), (codes.size, 1))
    for own in (1.0, 1e-5, 3e-38, 1e38, 0.0, 1e-42, float("nan")):
        ins = [
            buffer(TensorType("U8", rows.shape), rows.tobytes()),
            buffer(TensorType("F8_E4M3", blocks.shape), blocks.tobytes()),
            buffer(_F32, np.float32(own).tobytes()),
        ]
        same(DequantNvfp4(dialect), ins)
    assert accepted == {"nvfp4_decode"}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([4, 8]), st.integers(1, 9), st.integers(1, 4), st.sampled_from([None, 8, 24, 3]),
    st.sampled_from(["BF16", "F16", "F32"]), st.booleans(), st.booleans(), st.integers(0, 1 << 30),
)  # fmt: skip
def test_packed_integers(
    bits: int, rows: int, groups: int, group: int | None, dtype: str, symmetric: bool, g_idx: bool,
    seed: int,
) -> None:  # fmt: skip
    random, word = np.random.default_rng(seed), 32 // bits
    columns = groups * (group or 1) * (1 if group and group % word == 0 else word)
    op = DequantInts(bits, group, symmetric, g_idx)
    wide = columns // (group or columns)
    width = {"BF16": 2, "F16": 2, "F32": 4}[dtype]
    kinds = [TensorType("I32", (rows, columns // word)), TensorType(dtype, (rows, wide))]
    data = [random.bytes(kinds[0].nbytes), random.bytes(width * rows * wide)]
    if not symmetric:
        kinds.append(TensorType("I32", (ceil_div(rows, word), wide)))
        data.append(random.bytes(kinds[-1].nbytes))
    if g_idx:
        kinds.append(TensorType("I32", (columns,)))
        data.append(random.integers(0, wide, columns).astype("<i4").tobytes())
    same(op, [buffer(kind, one) for kind, one in zip(kinds, data, strict=True)])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_ordinary_integers_are_decoded_in_loops(
    bits: int, symmetric: bool, accepted: set[str]
) -> None:
    random = np.random.default_rng(bits)
    kinds = [TensorType("I32", (16, 64 * bits // 32)), TensorType("BF16", (16, 2))]
    data = [random.bytes(kinds[0].nbytes), bf16(random.random((16, 2))).tobytes()]
    if not symmetric:
        kinds.append(TensorType("I32", (16 * bits // 32, 2)))
        data.append(random.bytes(kinds[-1].nbytes))
    ins = [buffer(kind, one) for kind, one in zip(kinds, data, strict=True)]
    same(DequantInts(bits, 32, symmetric), ins)
    zeros = [] if symmetric else [buffer(TensorType("I8", (16, 2)), random.bytes(32))]
    codes = buffer(TensorType("I8", (16, 64)), random.bytes(16 * 64))
    same(DequantInt8(symmetric), [codes, ins[1], *zeros])
    assert accepted == {f"int{bits}_decode", "int8_decode"}


# --- Every op ------------------------------------------------------------------------------------


def numbers(random: Random, dtype: str, *shape: int) -> Buffer:
    """Scales as checkpoints have them, in any dtype."""
    values = random.uniform(0.001, 0.02, shape).astype(np.float32)
    data = {
        "F32": lambda: values.tobytes(),
        "F16": lambda: values.astype(np.float16).tobytes(),
        "BF16": lambda: bf16(values).tobytes(),
        "F8_E8M0": lambda: random.integers(110, 125, shape, np.uint8).tobytes(),
        "U8": lambda: random.integers(110, 125, shape, np.uint8).tobytes(),
        "F8_E4M3": lambda: random.integers(0x20, 0x78, shape, np.uint8).tobytes(),
    }[dtype]()
    return buffer(TensorType(dtype, shape), data)


def codes(random: Random, dtype: str, *shape: int) -> Buffer:
    kind = TensorType(dtype, shape)
    data = random.integers(0, 0x77, kind.nbytes, np.uint8)  # no NaN of FP8, no zero point of 15
    return buffer(kind, data.tobytes())


class Decoder(NamedTuple):
    """An op that decodes: its loops, types of its arguments ("": a scale's), and dtypes of scales."""

    op: Op
    loops: tuple[str, ...]
    ins: tuple[tuple[str, tuple[int, ...]], ...]
    scales: tuple[str, ...] = ("BF16", "F16", "F32")

    def made(self, random: Random, scale: str) -> list[Buffer]:
        """Arguments with scales of a dtype."""
        return [
            _g_idx() if dtype == "g_idx"
            else numbers(random, dtype or scale, *shape) if dtype in ("", "F32")
            else codes(random, dtype, *shape)
            for dtype, shape in self.ins
        ]  # fmt: skip


_VERSIONS: tuple[Literal[1, 2], ...] = (1, 2)
_DIALECTS: tuple[Literal["modelopt", "compressed-tensors"], ...] = (
    "modelopt",
    "compressed-tensors",
)


def _decoders() -> Iterator[tuple[str, Decoder]]:
    """Sixteen rows of 64 columns in groups of 32; GPTQ's and AWQ's, which are columns there, in part."""
    by_row, by_column = ("", (16, 2)), ("", (2, 16))
    for bits in (4, 8):
        loop, word = (f"int{bits}_decode",), 32 // bits
        whole = (("I32", (16, 64 // word)), by_row)
        yield f"int{bits} True", Decoder(DequantInts(bits, 32, True), loop, whole)
        zeros = ("I32", (16 // word, 2))
        yield f"int{bits} False", Decoder(DequantInts(bits, 32, False), loop, (*whole, zeros))
        packed = (("I32", (64 // word, 16)), ("I32", (2, 16 // word)), by_column)
        for version in _VERSIONS:
            op = DequantGptq(bits, 32, version, 3, 9)
            yield f"gptq {bits} {version} True", Decoder(op, loop, (*packed, ("g_idx", ())))
            yield f"gptq {bits} {version} False", Decoder(op, loop, packed)
    words = (("I32", (64, 2)), by_column)
    loop = ("int8_decode",)
    yield "awq True", Decoder(DequantAwq(32, True, 5, 8), loop, (*words, ("I32", (2, 2))))
    yield "awq False", Decoder(DequantAwq(32, False, 5, 8), loop, words)
    for signed, reorder in ((True, True), (False, False)):
        own = DequantQuark(32, True, 5, 8, signed, reorder)
        yield f"quark {signed}", Decoder(own, loop, (*words, ("I32", (2, 2))))
    bytes_ = (("I8", (16, 64)), by_row)
    yield "int8 bytes True", Decoder(DequantInt8(True), loop, bytes_)
    yield "int8 bytes False", Decoder(DequantInt8(False), loop, (*bytes_, ("I8", (16, 2))))
    grid = (("F8_E4M3", (40, 64)), ("", (3, 3)))
    of_grid = ("F32", "BF16", "F16", "F8_E8M0", "U8")
    yield "fp8", Decoder(DequantFp8((16, 24)), ("fp8_decode",), grid, of_grid)
    for dialect in _DIALECTS:
        nvfp4 = (("U8", (16, 32)), ("", (16, 4)), ("F32", (1,)))
        yield (
            f"nvfp4 {dialect}",
            Decoder(DequantNvfp4(dialect), ("nvfp4_decode",), nvfp4, ("F8_E4M3",)),
        )
    for mx in (DequantMxfp4(), DequantMxfp4Columns()):
        blocks = (("U8", (32, 32)), ("", (32, 2)))
        yield type(mx).__name__, Decoder(mx, ("fp4_decode",), blocks, ("U8",))


def _g_idx() -> Buffer:
    return buffer(TensorType("I32", (64,)), (np.arange(64) // 32).astype("<i4").tobytes())


DECODERS = dict(_decoders())
# Ops that ask which op another is, and run none with a loop.
_ASK_ALONE = {"DequantTo", "MxToBlockFp8", "RepackInts"}


@pytest.mark.parametrize(
    ("name", "scale"), [(name, scale) for name, one in DECODERS.items() for scale in one.scales]
)
def test_decoders(name: str, scale: str, accepted: set[str]) -> None:
    """Whole and in parts, in each dtype of scales: what a large source of any encoding runs."""
    found = DECODERS[name]
    ins = found.made(np.random.default_rng(len(name)), scale)
    for limit in (None, 500):
        same(found.op, ins, limit)
    assert accepted == set(found.loops)


def test_every_op_with_a_loop_runs_in_it_here() -> None:
    """An op is in one of the two tables if `done` can be reached from it, and all loops are."""
    tables: list[Encoder | Decoder] = [*ENCODERS.values(), *DECODERS.values()]
    assert ops_with_loops() - _ASK_ALONE == {type(one.op).__name__ for one in tables}
    named = {loop for one in tables for loop in one.loops}
    compiled.use(True)
    loops: Any = compiled.in_use()
    assert named == set(loops.__all__)


def ops_with_loops() -> set[str]:
    """Classes that run as ops do, from which `done` is reached by names of functions and classes; of
    those that others derive from the dataclasses, which are ops themselves."""
    scopes = {dotted(name): _scope(dotted(name), tree) for name, tree in trees().items()}

    def reaches(at: tuple[str, str], seen: set[tuple[str, str]]) -> bool:
        if at == ("qconvert.ops.compiled", "done"):
            return True
        module, name = at
        if at in seen or module not in scopes or name not in scopes[module][1]:
            return False
        seen.add(at)
        known, own = scopes[module]
        used = {n.id for n in ast.walk(own[name]) if isinstance(n, ast.Name)}
        return any(reaches(known[one], seen) for one in sorted(used & set(known)))

    def runs(at: tuple[str, str]) -> bool:
        """Of itself, or as one of its bases does."""
        module, name = at
        known, own = scopes.get(module, ({}, {}))
        node = own.get(name)
        return isinstance(node, ast.ClassDef) and (
            _runs(node) or any(runs(known[base]) for base in _bases(node) if base in known)
        )

    bases = {
        known[base]
        for known, own in scopes.values()
        for node in own.values()
        if isinstance(node, ast.ClassDef)
        for base in _bases(node)
        if base in known
    }
    return {
        name
        for module, (_, own) in scopes.items()
        for name in own
        if ((module, name) not in bases or _is_dataclass(own[name]))
        and runs((module, name))
        and reaches((module, name), set())
    }


def _is_dataclass(node: ast.AST) -> bool:
    marks = node.decorator_list if isinstance(node, ast.ClassDef) else []
    return any("dataclass" in ast.unparse(one) for one in marks)


def _bases(node: ast.ClassDef) -> list[str]:
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def _scope(module: str, tree: ast.Module) -> tuple[dict[str, tuple[str, str]], dict[str, ast.stmt]]:
    """Where the names that a module uses stand, and its own functions and classes."""
    own: dict[str, ast.stmt] = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    known = {name: (module, name) for name in own}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            known |= {one.asname or one.name: (node.module, one.name) for one in node.names}
    return known, own


def _runs(node: ast.ClassDef) -> bool:
    taken = [
        [argument.arg for argument in one.args.args][1:3]
        for one in node.body
        if isinstance(one, ast.FunctionDef) and one.name in ("run", "encode")
    ]
    return ["ins", "outs"] in taken or ["weight", "scale"] in taken


# --- The choice ----------------------------------------------------------------------------------


def test_what_is_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = choice.ENOUGH_BYTES
    for asked, small, large in (
        ("", False, True), ("auto", False, True), ("numpy", False, False), ("numba", True, True),
    ):  # fmt: skip
        monkeypatch.setenv(choice.VARIABLE, asked)
        assert [choice.wanted(1), choice.wanted(enough)] == [small, large], asked
    monkeypatch.setenv(choice.VARIABLE, "fast")
    with pytest.raises(RunError, match="expected one of auto, numpy, numba"):
        choice.wanted(1)


def _python(code: str, **environment: str) -> str:
    """What a process prints that runs this."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Of all loops the one that is compiled soonest.
_MAXIMA = """
import sys, numpy as np
from qconvert.compiled import choice
from qconvert.ops import compiled
from qconvert.ops.compiled import done
compiled.use(choice.wanted(1 << 40))
made = np.zeros(1, np.uint16)
ran = done("row_maxima", np.full((1, 4), 0xBF80, np.uint16), made)
print(ran, made[0] == 0x3F80, choice.cache_folder() if ran else "numba" in sys.modules)
"""


def test_without_numba_numpy_works_and_numba_is_refused() -> None:
    """An import that fails (None in sys.modules) is what a missing package gives."""
    block = "import sys; sys.modules['numba'] = None\n"
    assert _python(block + _MAXIMA, QCONVERT_KERNELS="auto") == "False False True"
    refused = block + "from qconvert.compiled.choice import wanted\ntry:\n    wanted(1)\n"
    refused += "except Exception as error: print(type(error).__name__, error)"
    said = _python(refused, QCONVERT_KERNELS="numba")
    assert said.startswith("RunError")
    assert "qconvert[fast]" in said


def test_numba_that_cannot_be_imported_leaves_numpy(tmp_path: Path) -> None:
    """As with a numpy that is too new for it."""
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.0 or less')\n")
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    assert _python(path + _MAXIMA, QCONVERT_KERNELS="auto").startswith("False False")
    asked = path + "try:\n" + indent(_MAXIMA, "    ")
    asked += "except Exception as error: print(type(error).__name__, error)"
    said = _python(asked, QCONVERT_KERNELS="numba")
    assert said.startswith(
        "RunError QCONVERT_KERNELS asks for numba, which cannot be imported: Numba"
    )


def test_loops_are_kept_in_the_users_cache(tmp_path: Path) -> None:
    said = _python(_MAXIMA, XDG_CACHE_HOME=str(tmp_path))
    assert said.startswith(f"True True {tmp_path}/qconvert/loops-")
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")}
    assert kept
    assert _python(_MAXIMA, XDG_CACHE_HOME=str(tmp_path)) == said
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")} == kept


def test_code_is_of_one_kind_of_machine(tmp_path: Path) -> None:
    """Others have a folder of their own: numba's index is not locked, and may be on a shared disk."""
    other = "import llvmlite.binding as llvm; llvm.get_host_cpu_name = lambda: 'generic'\n"
    for before in ("", other, ""):
        assert _python(before + _MAXIMA, XDG_CACHE_HOME=str(tmp_path)).startswith("True True")
    assert len({file.parent.parent for file in tmp_path.rglob("*row_maxima-*.nbc")}) == 2


def test_where_no_folder_can_be_written_loops_run_without(tmp_path: Path) -> None:
    """A file stands where each folder would be: not even root can write there."""
    (tmp_path / "file").touch()
    home = str(tmp_path / "file")
    assert _python(_MAXIMA, XDG_CACHE_HOME=home, TMPDIR=str(tmp_path)).startswith(
        f"True True {tmp_path}/qconvert-{os.getuid()}/loops-"
    )
    blocked = "import tempfile; tempfile.tempdir = '/dev/null'\n" + _MAXIMA
    assert _python(blocked, XDG_CACHE_HOME=home) == "True True None"


@pytest.mark.parametrize("which", ["above", "itself"])
def test_a_folder_that_others_can_write_is_not_used(which: str, tmp_path: Path) -> None:
    """What lies there is loaded as code."""
    environment = {"XDG_CACHE_HOME": "/dev/null", "TMPDIR": str(tmp_path)}
    ours = Path(_python(_MAXIMA, **environment).split()[-1])
    assert ours.stat().st_mode & 0o777 == 0o700
    (ours.parent if which == "above" else ours).chmod(0o775)
    assert _python(_MAXIMA, **environment) == "True True None"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_folder_with_a_file_of_another_user_is_not_used(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": "/dev/null", "TMPDIR": str(tmp_path)}
    _python(_MAXIMA, **environment)
    theirs = next(tmp_path.rglob("*.nbc"))
    os.chown(theirs, 1234, 1234)
    assert _python(_MAXIMA, **environment) == "True True None"


_PLACE = """
import os, stat
os.umask(0o002)
{first}
from qconvert.core import own_process
own_process.declare()
from qconvert.compiled import choice
choice.wanted(1 << 40)
choice.wanted(1 << 40)
print(choice.cache_folder())
"""
# Each makes the cache's folder before loops are kept there.
_FIRST = {
    "loops": "",
    "a class": "from qconvert.layouts.derived import find; find._keep(find._cache() / 'a.json', {})",
    "a mirror": (
        "from qconvert import api; from pathlib import Path\n"
        "try: api.open_checkpoint(Path(os.environ['MODEL']).as_uri())\n"
        "except Exception as error: print('refused', error)"
    ),
    "a result": (
        "from qconvert.run.work.files import Files; from qconvert.checkpoint.store import work_folder\n"
        "Files().make_folder(work_folder('s3://bucket/out', None))"
    ),
}


@pytest.mark.parametrize("first", _FIRST)
def test_a_umask_that_lets_the_group_write(first: str, tmp_path: Path) -> None:
    """002, the default of many distributions: whatever makes the cache first makes it for its user."""
    model = bf16_moe().write(tmp_path / "model")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "none")}
    said = _python(_PLACE.format(first=_FIRST[first]), MODEL=str(model), **environment)
    assert said.startswith(f"{tmp_path}/cache/qconvert/loops-")
    assert (tmp_path / "cache" / "qconvert").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("why", ["mode", "link", "file"])
def test_where_loops_are_not_kept_it_is_said_once(why: str, tmp_path: Path) -> None:
    """In the words of who has to mend it."""
    cache = tmp_path / "cache"
    place = cache / "qconvert"
    cache.mkdir()
    if why == "mode":
        place.mkdir()
        place.chmod(0o775)
    elif why == "link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.write_text("")
    code = "import sys; sys.stderr = sys.stdout\n" + _PLACE.format(first="")
    code = "import tempfile; tempfile.tempdir = '/dev/null'\n" + code
    said = _python(code, XDG_CACHE_HOME=str(cache))
    assert said.endswith("\nNone")
    assert said.count("warning: compiled loops are not kept") == 1
    words = {
        "mode": f"run chmod 700 {place}", "link": f"{place} is another user's, or a link",
        "file": f"{place}/loops-",
    }  # fmt: skip
    assert words[why] in said


_MEMORY = """
import numpy as np
from qconvert.compiled import choice
from qconvert.ops import compiled
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
before = anonymous()
compiled.use(True)
found = compiled.in_use()
for name in found.__all__:
    getattr(found, name).made
print(anonymous() - before)
"""


@pytest.mark.big  # it compiles all of them: 13 s of CPU
def test_memory_of_loops_is_what_plans_count(tmp_path: Path) -> None:
    """All of them, loaded; a run needs two or three. Compiling them first is not what runs do."""
    _python(_MEMORY, XDG_CACHE_HOME=str(tmp_path))
    assert 1 << 20 < int(_python(_MEMORY, XDG_CACHE_HOME=str(tmp_path))) < choice.LOOP_BYTES


# --- Whole runs ----------------------------------------------------------------------------------


def _converted(command: Sequence[str], source: Path, out: Path, kernels: str) -> dict[str, Any]:
    code = (
        "import sys; from qconvert.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('llvmlite' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command[0], str(source), str(out), *command[1:], "--jobs", "1"],
        env={**os.environ, "QCONVERT_KERNELS": kernels}, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().endswith(str(kernels == "numba")), (
        "auto leaves loops out of small runs"
    )
    return {name: data for name, data in tree(out).items() if name != "README.md"}


@pytest.mark.parametrize("command", ["dequant", "amx --method int4 --numa 2", "w4a16 --rtn"])
def test_a_run_writes_the_same_bytes(command: str, tmp_path: Path) -> None:
    """Tensors, receipt and fingerprint."""
    source = numbers_only(qwen3_moe(form="fp8", hidden=256, intermediate=256)).write(
        tmp_path / "source"
    )
    made = [
        _converted(command.split(), source, tmp_path / kernels, kernels)
        for kernels in ("auto", "numba")
    ]
    assert made[0] == made[1]


def test_workers_compute_in_loops_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = numbers_only(qwen3_moe(form="fp8", hidden=256, intermediate=256)).write(
        tmp_path / "source"
    )
    monkeypatch.setenv(choice.VARIABLE, "numba")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = run_cli("dequant", source, tmp_path / "two", "--jobs", "2")
    assert done.code == 0, done.err
    assert [*(tmp_path / "cache").rglob("*.nbc")], "workers left what they compiled"
    monkeypatch.setenv(choice.VARIABLE, "numpy")
    assert run_cli("dequant", source, tmp_path / "one", "--jobs", "1").code == 0
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
