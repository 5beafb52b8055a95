"""Integer forms taken apart and put together word by word, from their definitions: the oracle of tests,
which shares no code with what it judges."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qconvert.core.int_scheme import Bits, IntScheme
from qconvert.formats.int_packed.encode import RoundToNearest
from qconvert.formats.int_packed.packers import PackQuantized

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
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
