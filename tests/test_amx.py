"""AMXINT4 and AMXINT8 without kt-kernel: bytes worked out by hand, an oracle of formulas, and hashes of
what kt-kernel's own converter wrote (golden/amx.json). Against kt-kernel itself: test_amx_peer.py.

QCONVERT_UPDATE_GOLDEN=1 pytest -m peer tests/test_amx.py writes the hashes anew.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import amx_rows
import numpy as np
import pytest
import xxhash
from amx_rows import Bits
from hypothesis import given, settings
from hypothesis import strategies as st
from kt_experts import layer_of, ours, run_kt
from kt_machine import needs_avx512
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.formats.amx.encode import Amx, Rounding
from qconvert.formats.amx.format import Method, check_dims, numa_counts
from qconvert.validators.reading.amx import tile_codes, tile_floats

Floats = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Codes = np.ndarray[Any, np.dtype[np.int8]]

METHODS: list[Method] = ["int4", "int8"]
ROUNDINGS: list[Rounding] = ["reference", "search"]
STEP = {"int4": 128, "int8": 64}
LIMITS = (None, 1, 300_000, 1 << 21)
NAN, INFINITY = 0x7FC1, 0xFF80


def quantize(op: Amx, bits: Bits, limit: int | None = None) -> list[tuple[Bytes, Floats]]:
    """Packed bytes and scales of each shard, by the op under test."""
    found, remarks = run_op(op, [buffer(TensorType("BF16", bits.shape), bits.tobytes())], limit)
    assert not remarks
    return [
        (np.frombuffer(weight, np.uint8), np.frombuffer(scale, np.float32))
        for weight, scale in zip(found[::2], found[1::2], strict=True)
    ]


def sparse(rows: int, columns: int, values: Mapping[tuple[int, int], float]) -> Bits:
    """Zeros but for some values, each of which bf16 must hold exactly."""
    bits = np.zeros((rows, columns), np.uint16)
    for place, value in values.items():
        (bits[place],) = amx_rows.bf16(np.array([value]))
        assert widen(bits[place]) == value
    return bits


def widen(bits: Any) -> Any:
    """bf16 bits as float32, exactly."""
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


def by_row(rows: int, scales: Mapping[int, float]) -> list[float]:
    return [scales.get(row, 0.0) for row in range(rows)]


def at_places(size: int, places: Mapping[int, int]) -> bytes:
    found = bytearray(size)
    for place, byte in places.items():
        found[place] = byte
    return bytes(found)


# --- bytes worked out by hand -----------------------------------------------------------------


def test_golden_int4() -> None:
    """128 x 128: one K step of 64 bytes a row. Column j shares its byte with j + 64, which has the high
    half. A byte's place: 2048 (row / 32) + 1024 for rows 16 to 31 of those + 64 (column / 4) + 4 (row
    modulo 16) + column modulo 4, columns counted from the half's first.

    Row 0: the largest is 112, d = 112 / 112 = 1. x is w to even, the code x / 16 away from zero:
      112: 7            | 8: 0.5, 1           -> byte 0  17
      -8: -0.5, -1 = F  | 7.5: x 8, 1         -> byte 1  1F
      7: 0.4375, 0      | -7.5: x -8, -1 = F  -> byte 2  F0
      -0: 0             | -112: -7 = 9        -> byte 3  90
      24: 1.5, 2        | -24: -2 = E         -> byte 64 (the next word)  E2
      8.5: x 8, 1       | 9.5: x 10, 0.625, 1 -> byte 65 11
      23.5: x 24, 2     | 22.5: x 22, 1.4, 1  -> byte 66 12
      104: 6.5, 7       | 103: 6.4, 6         -> byte 67 67
      column 63, 103.5: x 104, 7 | column 127, -40: -2.5, -3 = D -> byte 64 * 15 + 3 = 963  D7
    Row 1: the largest is 224, d = 2: 224: 7, 16: x 8, 1 -> byte 4  17.
    Row 15: 56, d = 0.5 -> byte 60  07.     Row 16, column 64: 112 -> byte 1024  70.
    Row 31: -112 -> byte 1024 + 60  09.     Row 32: 112 -> byte 2048  07.
    Row 127, column 127: byte 3 * 2048 + 1024 + 960 + 60 + 3 = 8191  70.
    All other rows are zeros: codes 0, scale 0.
    """
    low = [112, -8, 7, -0.0, 24, 8.5, 23.5, 104]
    high = [8, 7.5, -7.5, -112, -24, 9.5, 22.5, 103]
    values: dict[tuple[int, int], float] = {(0, column): low[column] for column in range(8)}
    values |= {(0, 64 + column): high[column] for column in range(8)}
    values |= {(0, 63): 103.5, (0, 127): -40, (1, 0): 224, (1, 64): 16, (15, 0): 56}
    values |= {(16, 64): 112, (31, 0): -112, (32, 0): 112, (127, 127): 112}
    ((weight, scale),) = quantize(Amx("int4"), sparse(128, 128, values))
    assert weight.tobytes() == at_places(
        8192,
        {0: 0x17, 1: 0x1F, 2: 0xF0, 3: 0x90, 64: 0xE2, 65: 0x11, 66: 0x12, 67: 0x67, 963: 0xD7,
         4: 0x17, 60: 0x07, 1024: 0x70, 1084: 0x09, 2048: 0x07, 8191: 0x70},
    )  # fmt: skip
    assert scale.tolist() == by_row(128, {0: 1, 1: 2, 15: 0.5, 16: 1, 31: 1, 32: 1, 127: 1})


def test_golden_int8() -> None:
    """64 x 128: two K steps of 64 columns, 64 bytes a row each. A byte's place: 4096 (row / 32) + 2048
    (column / 64) + 1024 for rows 16 to 31 of those + 64 (column / 4 in the step) + 4 (row modulo 16)
    + column modulo 4.

    fp32(1/127) = 3C010204 = 8454660 * 2^-30; times 127 that is 1 - 2^-28, in float32 1. So the row of
    127 has d = 1 and that of 254 has 2, and codes are w to even:
      Row 0: 127 7F, -127 81, 0.5 -> 0 and 1.5 -> 2 in bytes 0 to 3; 2.5 -> 2, -1.5 -> -2 FE,
      126.5 -> 126 7E, 125.5 -> 126 7E in bytes 64 to 67; -0 and -0.5 are 0. Column 63, -1 -> byte
      960 + 3  FF. Column 64, 5 -> byte 2048; column 127, 6 -> byte 2048 + 963.
    Row 1: 3 -> 1.5, 2; 254 -> 127, in bytes 4 and 5.     Row 16: 127 -> byte 1024.
    Row 32: 127 -> byte 4096.     Row 63, column 127: byte 4096 + 2048 + 1024 + 960 + 60 + 3 = 8191.
    """
    first = [127, -127, 0.5, 1.5, 2.5, -1.5, 126.5, 125.5, -0.0, -0.5]
    values: dict[tuple[int, int], float] = {(0, column): v for column, v in enumerate(first)}
    values |= {(0, 63): -1, (0, 64): 5, (0, 127): 6, (1, 0): 3, (1, 1): 254}
    values |= {(16, 0): 127, (32, 0): 127, (63, 127): 127}
    ((weight, scale),) = quantize(Amx("int8"), sparse(64, 128, values))
    assert weight.tobytes() == at_places(
        8192,
        {0: 0x7F, 1: 0x81, 3: 2, 64: 2, 65: 0xFE, 66: 0x7E, 67: 0x7E, 963: 0xFF, 2048: 5, 3011: 6,
         4: 2, 5: 0x7F, 1024: 0x7F, 4096: 0x7F, 8191: 0x7F},
    )  # fmt: skip
    assert scale.tolist() == by_row(64, {0: 1, 1: 2, 16: 1, 32: 1, 63: 1})


@pytest.mark.parametrize("method", METHODS)
def test_golden_small_numbers(method: Method) -> None:
    """Denormals count as zeros; a scale that would be denormal is zero, and with it all codes.

    int4: 112 * 2^-126 has d = 2^-126, the smallest there is; 111 * 2^-126 has none.
    int8: 127 * 2^-126 * fp32(1/127) = (1 - 2^-28) * 2^-126, in float32 2^-126; 126 has none.
    """
    largest = {"int4": 112, "int8": 127}[method]
    bits = sparse(128, 128, {(0, 0): largest * 2.0**-126, (1, 0): (largest - 1) * 2.0**-126})
    bits[2, :] = 0x007F  # the largest denormal
    bits[3, 0], bits[3, 1] = amx_rows.bf16(np.array([2.0**-119]))[0], 0x807F
    ((weight, scale),) = quantize(Amx(method), bits)
    codes = tile_codes(method, weight, 128, 128)
    # 2^-119 = 128 * 2^-126 lies just above either limit.
    assert np.flatnonzero(scale).tolist() == [0, 3]
    assert scale[0] == 2.0**-126
    assert sorted(zip(*(axis.tolist() for axis in np.nonzero(codes)), strict=True)) == [
        (0, 0),
        (3, 0),
    ]


# --- an oracle --------------------------------------------------------------------------------


def flushed(values: Any) -> Any:
    """Float32 with denormals as zero, as arithmetic that flushes them sees them."""
    return np.where(np.abs(values) < np.float32(2.0**-126), np.float32(0), values)


def oracle_row(method: Method, row: Bits) -> tuple[Codes, np.float32]:
    """Codes and scale of one row, in float32."""
    w = flushed(widen(row))
    largest = np.float32(np.max(np.abs(w)))
    if method == "int8":
        step = flushed(np.float32(largest * (np.float32(1) / np.float32(127))))
    else:
        step = flushed(np.float32(largest / np.float32(112)))
    if step == 0:
        return np.zeros(row.size, np.int8), np.float32(0)
    x = np.rint(w * (np.float32(1) / step))
    assert x.dtype == np.float32
    if method == "int4":
        x = np.sign(x) * np.floor(np.abs(x) / np.float32(16) + np.float32(0.5))
    return x.astype(np.int8), step


def places(method: Method, rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The byte that holds the code of each row and column, by the format's definition."""
    step, codes_a_byte = STEP[method], 2 if method == "int4" else 1
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    k_block = column // 3584
    width = np.minimum(3584, columns - 3584 * k_block)  # of the K block a column lies in
    in_step = column % step % 64  # int4: the second 64 share their bytes with the first
    place = row // step * step * columns // codes_a_byte  # blocks of `step` rows
    place = place + step * 3584 * k_block // codes_a_byte  # K blocks
    place = place + row % step // 32 * 32 * width // codes_a_byte  # tiles of 32 rows
    place = place + column % 3584 // step * 2048  # K steps
    place = place + row % 32 // 16 * 1024 + in_step // 4 * 64 + row % 16 * 4 + in_step % 4
    found: np.ndarray[Any, np.dtype[np.int64]] = place.astype(np.int64)
    return found


def pack(method: Method, codes: Codes) -> bytes:
    rows, columns = codes.shape
    place = places(method, rows, columns)
    packed = np.zeros(codes.size // (2 if method == "int4" else 1), np.uint8)
    if method == "int8":
        packed[place] = codes.view(np.uint8)
        return packed.tobytes()
    nibbles = codes.view(np.uint8) & 15
    low = np.broadcast_to(np.arange(columns) % 128 < 64, codes.shape)
    packed[place[low]] = nibbles[low]
    packed[place[~low]] |= nibbles[~low] << 4
    return packed.tobytes()


def check(method: Method, bits: Bits, shards: int, limits: tuple[int | None, ...]) -> None:
    """The op's bytes against the oracle's, shard by shard."""
    wanted = []
    for part in np.split(bits, shards, axis=1):
        rows = [oracle_row(method, row) for row in part]
        scales = np.array([scale for _, scale in rows], np.float32)
        wanted.append((pack(method, np.stack([codes for codes, _ in rows])), scales))
    for limit in limits:
        for found, (packed, scales) in zip(
            quantize(Amx(method, shards), bits, limit), wanted, strict=True
        ):
            assert found[1].tobytes() == scales.tobytes()
            assert found[0].tobytes() == packed


@pytest.mark.parametrize(
    ("method", "rows", "columns", "shards"),
    [
        ("int4", 128, 128, 1),
        ("int4", 256, 512, 2),
        ("int4", 384, 1152, 3),
        ("int4", 640, 640, 1),  # tiles of 96 rows, which do not divide the part
        ("int4", 128, 3584, 1),
        ("int4", 256, 3712, 1),
        ("int4", 128, 7424, 2),
        ("int4", 128, 7296, 1),
        ("int8", 64, 64, 1),
        ("int8", 192, 320, 1),
        ("int8", 320, 1152, 3),
        ("int8", 576, 832, 1),
        ("int8", 64, 3648, 1),
        ("int8", 128, 7296, 2),
        ("int8", 64, 7232, 1),
    ],
)
def test_against_the_oracle(method: Method, rows: int, columns: int, shards: int) -> None:
    check(method, amx_rows.matrix(rows, columns, rows + columns), shards, LIMITS)


def every_largest(seed: int) -> Bits:
    """A row of 128 for each finite bf16 that can be the largest, with others from the ten binades below
    it: scales and their inverses depend on nothing else."""
    random = np.random.default_rng(seed)
    largest = np.arange(0x7F80)
    low = np.maximum(largest - 10 * 128, 0)[:, None]
    bits = low + random.integers(0, 1 << 30, (largest.size, 128)) % (largest[:, None] - low + 1)
    bits[:, seed % 128] = largest
    found: Bits = (bits | random.integers(0, 2, bits.shape) << 15).astype(np.uint16)
    return found


@pytest.mark.big
@pytest.mark.parametrize("method", METHODS)
def test_every_largest_weight_there_is(method: Method) -> None:
    check(method, every_largest(5), 1, (None,))


@needs_avx512
@pytest.mark.peer
@pytest.mark.parametrize("method", METHODS)
def test_every_largest_weight_there_is_as_kt_kernel_scales_it(
    method: Method, tmp_path: Path
) -> None:
    layer = {
        "gate": every_largest(5)[None],
        "up": every_largest(6)[None, ::-1].copy(),
        "down": amx_rows.matrix(128, 0x7F80, 7)[None],
    }
    np.savez(tmp_path / "0.npz", allow_pickle=False, **layer)
    done = run_kt(method, 1, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, bits in layer.items():
        for kind, mine in zip(("quant", "scale"), ours(method, 1, name, bits[0]), strict=True):
            assert kt_file(tmp_path, 0, 0, name, kind).read_bytes() == mine


# --- what kt-kernel wrote ---------------------------------------------------------------------

GOLDEN = Path(__file__).parent / "golden" / "amx.json"
# A case: method, numa, intermediate and hidden size, the seed of kt_experts.layer_of (gate is
# amx_rows.matrix of that seed, up of the next, down of the one after that), and xxh3-128 of the
# matrices ("source") and of each shard's weight and scale ("kt"). To add one, leave these out.
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_bytes())


def spelled(case: Mapping[str, Any]) -> str:
    return "{method}-numa{numa}-{intermediate}x{hidden}".format(**case)


def digest(data: bytes) -> str:
    return xxhash.xxh3_128(data).hexdigest()


def sources(case: Mapping[str, Any]) -> dict[str, str]:
    layer = layer_of(case["intermediate"], case["hidden"], case["seed"])
    return {name: digest(bits.tobytes()) for name, bits in layer.items()}


def kt_file(folder: Path, layer: int, shard: int, projection: str, kind: str) -> Path:
    where = folder / f"_layer_{layer}" / f"_numa_{shard}"
    (file,) = where.glob(f"*_{projection}_0_*Byte_{kind}_.kt")
    return file


def test_the_goldens_are_of_all_kinds() -> None:
    assert {(case["method"], case["numa"]) for case in CASES} >= {
        (method, numa) for method in METHODS for numa in (1, 2, 4)
    }
    assert any(case["hidden"] > 3584 for case in CASES)
    assert len({json.dumps(case["kt"]) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=spelled)
def test_bytes_are_those_kt_kernel_wrote(case: dict[str, Any]) -> None:
    assert sources(case) == case["source"], "numpy draws other numbers now: write the goldens anew"
    numa = case["numa"]
    layer = layer_of(case["intermediate"], case["hidden"], case["seed"])
    found = {}
    for name, bits in layer.items():
        made = ours(case["method"], numa, name, bits[0])
        for shard in range(numa):
            weight, scale = made[2 * shard : 2 * shard + 2]
            found[f"{name}.{shard}"] = {"weight": digest(weight), "scale": digest(scale)}
    assert found == case["kt"]


@needs_avx512
@pytest.mark.peer
def test_kt_kernel_still_writes_the_goldens(tmp_path: Path) -> None:
    cases = json.loads(GOLDEN.read_bytes())
    assert cases
    for method, numa in sorted({(case["method"], case["numa"]) for case in cases}):
        folder = tmp_path / f"{method}-{numa}"
        folder.mkdir()
        alike = [case for case in cases if (case["method"], case["numa"]) == (method, numa)]
        for layer, case in enumerate(alike):
            matrices = layer_of(case["intermediate"], case["hidden"], case["seed"])
            np.savez(folder / f"{layer}.npz", allow_pickle=False, **matrices)
        done = run_kt(method, numa, folder)
        assert done.returncode == 0, done.stderr[-2000:]
        for layer, case in enumerate(alike):
            found = {
                f"{name}.{shard}": {
                    "weight": digest(kt_file(folder, layer, shard, name, "quant").read_bytes()),
                    "scale": digest(kt_file(folder, layer, shard, name, "scale").read_bytes()),
                }
                for name in ("gate", "up", "down")
                for shard in range(numa)
            }
            if os.environ.get("QCONVERT_UPDATE_GOLDEN"):
                case.update(source=sources(case), kt=found)
            assert (case["source"], case["kt"]) == (sources(case), found), spelled(case)
    if os.environ.get("QCONVERT_UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")


# --- properties -------------------------------------------------------------------------------

A_METHOD = st.sampled_from(METHODS)


@settings(max_examples=25)
@given(
    method=A_METHOD,
    blocks=st.integers(1, 3),
    steps=st.one_of(st.integers(1, 6), st.integers(27, 31), st.integers(55, 60)),
    limit=st.sampled_from(LIMITS),
    seed=st.integers(0, 1000),
)
def test_codes_come_back(
    method: Method, blocks: int, steps: int, limit: int | None, seed: int
) -> None:
    """Rows whose scale is 1 hold codes as they are, int4's times 16."""
    largest, unit = (7, 16) if method == "int4" else (127, 1)
    rows, columns = blocks * STEP[method], steps * STEP[method]
    codes = np.random.default_rng(seed).integers(-largest, largest + 1, (rows, columns))
    codes[:, seed % columns] = largest
    ((weight, scale),) = quantize(Amx(method), amx_rows.bf16(codes * unit), limit)
    assert np.all(scale == 1)
    found = tile_codes(method, weight, rows, columns)
    assert found.dtype == np.int8
    assert np.array_equal(found, codes)
    assert weight.tobytes() == pack(method, codes.astype(np.int8))
    assert np.array_equal(tile_floats(method, weight, scale, columns), codes * unit)


def test_inverse_by_hand() -> None:
    """A code of 5 with scale 3: 15 (int8), and 5 * 16 * 3 = 240 (int4)."""
    packed = np.zeros(64 * 64, np.uint8)
    packed[0] = 5
    scale = np.full(64, 3, np.float32)
    assert tile_floats("int8", packed, scale, 64)[0, :2].tolist() == [15, 0]
    packed, scale = np.zeros(64 * 128, np.uint8), np.full(128, 3, np.float32)
    packed[0] = 0xB5  # 5 in the low half, 11 - 16 = -5 in the high one
    assert tile_floats("int4", packed, scale, 128)[0, [0, 64, 1]].tolist() == [240, -240, 0]


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "bad",
    [
        NAN,
        *(
            pytest.param(bits, marks=pytest.mark.big)
            for bits in (NAN | 0x8000, INFINITY, INFINITY & 0x7FFF, 0x7FFF)
        ),
    ],
)
def test_the_row_of_nan_or_infinity(method: Method, rounding: Rounding, bad: int) -> None:
    """In the first rows computed and in later ones, in either shard; the first row wins."""
    columns = 2 * 3712 if method == "int4" else 2 * 3648
    for row, column in [(0, 0), (1, columns - 1), (31, 5), (32, columns // 2), (127, 17)]:
        bits = amx_rows.matrix(128, columns, 3)
        bits[row, column] = bad
        bits[127, -1] = bad
        with pytest.raises(RowError, match="NaN or infinity") as caught:
            quantize(Amx(method, 2, rounding), bits)
        assert caught.value.row == row


@pytest.mark.parametrize("method", METHODS)
def test_the_row_counts_from_the_first_of_its_part(method: Method) -> None:
    bits = amx_rows.matrix(512, 128, 3)
    bits[400, 100] = NAN
    with pytest.raises(RowError) as caught:
        quantize(Amx(method), bits)
    assert caught.value.row == 400
    with pytest.raises(RowError) as caught:
        quantize(Amx(method), bits, limit=1)
    assert caught.value.row == 400 % STEP[method]


@pytest.mark.parametrize(
    ("op", "kind", "says"),
    [
        (Amx("int4"), TensorType("F32", (128, 128)), "expected a BF16 matrix"),
        (Amx("int4"), TensorType("BF16", (128,)), "expected a BF16 matrix"),
        (Amx("int4"), TensorType("BF16", (2, 128, 128)), "expected a BF16 matrix"),
        (Amx("int4"), TensorType("BF16", (64, 128)), r"rows in multiples of 128.*\[64, 128\]"),
        (Amx("int4"), TensorType("BF16", (128, 192)), r"columns of 128 .*\[128, 192\]"),
        (Amx("int4", 2), TensorType("BF16", (128, 384)), r"columns of 256 \(AMXINT4, 2 shards\)"),
        (Amx("int8"), TensorType("BF16", (96, 128)), "rows in multiples of 64"),
        (Amx("int8", 3), TensorType("BF16", (64, 256)), r"columns of 192 \(AMXINT8, 3 shards\)"),
    ],
)
def test_arguments_that_do_not_fit(op: Amx, kind: TensorType, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        op.infer(kind)


def test_types() -> None:
    """A pair for each shard, in turn."""
    found = Amx("int4", 2).infer(TensorType("BF16", (256, 512)))
    assert found == (TensorType("I8", (32768,)), TensorType("F32", (256,))) * 2
    found = Amx("int8").infer(TensorType("BF16", (64, 192)))
    assert found == (TensorType("I8", (12288,)), TensorType("F32", (64,)))


def test_every_field_shows_in_the_repr() -> None:
    ops = [Amx(m, shards, r) for m in METHODS for shards in (1, 2) for r in ROUNDINGS]
    assert len({repr(op) for op in ops}) == len(ops)


@pytest.mark.parametrize(("size", "rows", "columns"), [
    (100, 128, 128), (8192, 64, 256), (8192, 256, 64),
])  # fmt: skip
def test_sizes_that_are_no_packed_matrix(size: int, rows: int, columns: int) -> None:
    with pytest.raises(
        PlanError, match=f"{size} bytes are not an AMXINT4 matrix of {rows} x {columns}"
    ):
        tile_codes("int4", np.zeros(size, np.uint8), rows, columns)


INT8_TOO = "in AMXINT8 they can (amx --method int8, kt --cpu int8)"


@pytest.mark.parametrize(
    ("method", "hidden", "intermediate", "numa", "says", "int8_too"),
    [
        # GLM-4.5-Air: 704 are 5.5 times 128, and 11 times 64.
        ("int4", 4096, 1408, 2, "supported counts: 1;", True),
        ("int4", 2048, 768, 4, "supported counts: 1, 2, 3, 6;", True),
        ("int4", 2048, 768, 5, "supported counts: 1, 2, 3, 6", False),
        ("int8", 2048, 768, 5, "supported counts: 1, 2, 3, 4, 6", False),
        ("int4", 128, 192, 1, "no count is supported;", True),
        ("int4", 128, 100, 1, "no count is supported", False),
        ("int8", 128, 100, 1, "no count is supported", False),
        ("int8", 128, 0, 1, "no count is supported", False),
        ("int4", 192, 256, 1, "hidden sizes in multiples of 128, found 192;", True),
        ("int4", 100, 256, 1, "hidden sizes in multiples of 128, found 100", False),
        ("int8", 100, 256, 1, "hidden sizes in multiples of 64, found 100", False),
        ("int8", 0, 256, 1, "hidden sizes in multiples of 64, found 0", False),
        ("int8", 128, 256, 0, "the NUMA count must be at least 1, found 0", False),
    ],
)
def test_sizes_the_kernels_cannot_hold(
    method: Method, hidden: int, intermediate: int, numa: int, says: str, int8_too: bool
) -> None:
    with pytest.raises(PlanError, match=re.escape(says)) as caught:
        check_dims(method, hidden, intermediate, numa)
    assert (INT8_TOO in str(caught.value)) == int8_too
    if int8_too:
        check_dims("int8", hidden, intermediate, numa)


def test_numa_counts_are_those_that_pass() -> None:
    for method in METHODS:
        for intermediate in (64, 128, 192, 704, 768, 1408, 1536, 2048, 2560):
            passing = []
            for numa in range(1, 9):
                try:
                    check_dims(method, 128, intermediate, numa)
                except PlanError:
                    continue
                passing.append(numa)
            assert numa_counts(method, intermediate) == passing
    assert numa_counts("int4", 1408) == [1]
    assert numa_counts("int8", 1408) == [1, 2]
