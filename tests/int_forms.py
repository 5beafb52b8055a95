"""Integer forms taken apart and put together word by word, from their definitions: the oracle of tests,
which shares no code with what it judges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from ops_harness import buffer

from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import Bits, IntScheme
from qconvert.formats.int_packed.encode import RoundToNearest
from qconvert.formats.int_packed.packers import PackQuantized

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Array = np.ndarray[tuple[int, ...], np.dtype[Any]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def unpacked(words: Ints, bits: int, count: int) -> Ints:
    """Rows of 32-bit words -> the first `count` fields of each row, counted from the lowest bits."""
    stored = words.astype(np.int64) & 0xFFFFFFFF
    fields = [stored >> shift & ((1 << bits) - 1) for shift in range(0, 32, bits)]
    return np.stack(fields, axis=-1).reshape(words.shape[0], -1)[:, :count]


def packed(fields: Ints, bits: int) -> Ints:
    """The other way round, as signed 32-bit numbers; rows are filled up with 0."""
    per = 32 // bits
    width = -(-fields.shape[1] // per) * per
    filled = np.zeros((fields.shape[0], width), np.int64)
    filled[:, : fields.shape[1]] = fields
    apart = filled.reshape(fields.shape[0], -1, per)
    words = sum(apart[:, :, i] << (bits * i) for i in range(per))
    return np.asarray(words).astype(np.uint32).view(np.int32).astype(np.int64)


def quantized_values(codes: Ints, zero: Ints, scale: Floats, group_of: Ints) -> Floats:
    """(code - zero) * scale in float32; zero and scale [N, groups], `group_of` each column's."""
    apart = (codes - zero[:, group_of]).astype(np.float32)
    with np.errstate(over="ignore"):
        return apart * scale[:, group_of]


def from_compressed_tensors(parts: Mapping[str, np.ndarray], bits: int, columns: int) -> Floats:
    """weight_packed, weight_scale (float32), weight_zero_point and weight_g_idx where there are."""
    half, scale = 1 << (bits - 1), parts["weight_scale"].astype(np.float32)
    rows, groups = scale.shape
    codes = unpacked(parts["weight_packed"], bits, columns) - half
    zero: Ints = np.zeros((rows, groups), np.int64)
    if "weight_zero_point" in parts:
        zero = unpacked(parts["weight_zero_point"].T, bits, rows).T - half
    group_of = parts.get("weight_g_idx", np.arange(columns) // (columns // groups))
    return quantized_values(codes, zero, scale, group_of)


def from_gptq(parts: Mapping[str, np.ndarray], bits: int, version: int) -> Floats:
    """qweight, qzeros, scales, g_idx -> the weight [N, K]."""
    scale = parts["scales"].astype(np.float32).T
    rows, columns = scale.shape[0], parts["g_idx"].shape[0]
    codes = unpacked(parts["qweight"].T, bits, columns)
    zero = unpacked(parts["qzeros"], bits, rows).T + (1 if version == 1 else 0)
    return quantized_values(codes, zero, scale, parts["g_idx"])


def rtn(bits: Bits, group: int | None) -> RoundToNearest:
    """The op under test that rounds to compressed-tensors' symmetric form."""
    scheme = IntScheme(bits, group)
    return RoundToNearest(scheme, PackQuantized(scheme))


def to_array(data: bytes, kind: TensorType) -> Array:
    """A tensor's bytes as numbers; bf16 as float32."""
    if kind.dtype == "BF16":
        bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(kind.shape)
    dtype = {"I32": np.int32, "F16": np.float16, "F32": np.float32}[kind.dtype]
    return np.frombuffer(data, dtype).reshape(kind.shape)


def bf16_bits(values: Array) -> Array:
    """float32 -> bf16, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def weight(rows: int, columns: int, seed: int = 0) -> Buffer:
    """Student-t rows with outlier channels, and rows of zeros and of one sign."""
    random = np.random.default_rng(seed)
    values = 0.01 * random.standard_t(3, (rows, columns))
    values[:, ::37] *= 40
    values[1 % rows] = 0
    values[2 % rows] = np.abs(values[2 % rows])
    bits = bf16_bits(values.astype(np.float32))
    return buffer(TensorType("BF16", (rows, columns)), bits.tobytes())
