"""Matrices that quantizers to NVFP4 get wrong, and our op on them as bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import amx_rows
import numpy as np
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.core.parameter_names import Dialect
from qconvert.formats.nvfp4.encode import PackNvfp4, Scales
from qconvert.formats.nvfp4.scales import OwnScale, RowMaxima

Array = np.ndarray[Any, Any]

DTYPES = ("BF16", "F16", "F32")
KINDS = ("heavy", "zeros", "ties", "outlier", "denormals", "mixed")


class Made(NamedTuple):
    """A matrix's bytes: codes, block scales, its own scale."""

    packed: bytes
    scale: bytes
    own: bytes


def matrix(kind: str, dtype: str, shape: tuple[int, int], seed: int = 0) -> Array:
    """Float32 weights that the dtype holds exactly."""
    random = np.random.default_rng(seed + 1)
    values = (random.standard_t(4, shape) * 0.02).astype(np.float32)
    values[:, :: max(2, shape[1] // 32)] *= 8
    if kind == "zeros":  # of both signs, in whole blocks and rows, and next to a number
        values[::2] = 0
        values[::4] *= -1
        values[1, :16] = -0.0
    elif kind == "ties":  # halfway between codes once the largest is 6 or a scale a power of two
        halves = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], np.float32)
        values = random.choice(halves, shape) * random.choice([-1, 1], shape).astype(np.float32)
        values[:, ::16] = 6
        values[0, 0] = 2688
        values *= np.exp2(random.integers(-3, 4, (shape[0], 1))).astype(np.float32)
    elif kind == "outlier":
        values[shape[0] // 2, shape[1] // 3] = 5e4
    elif kind == "denormals":
        values *= np.float32(2.0**-118 if dtype != "F16" else 2.0**-12)
        values[:, ::3] *= np.float32(2.0**-8)
    elif kind == "mixed":
        bits = amx_rows.matrix(*shape, seed)
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        if dtype == "F16":
            values = np.clip(values, -6e4, 6e4)
    with np.errstate(over="ignore"):
        return held(values, dtype)


def held(values: Array, dtype: str) -> Array:
    """Float32 rounded to a dtype, somehow."""
    if dtype == "F16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "BF16":
        return (amx_rows.bf16(values).astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(values, np.float32)


def stored(values: Array, dtype: str) -> bytes:
    """As the dtype's bytes."""
    if dtype == "F16":
        return values.astype(np.float16).tobytes()
    if dtype == "BF16":
        return amx_rows.bf16(values).tobytes()
    return values.astype(np.float32).tobytes()


def ours(
    dialect: Dialect,
    dtype: str,
    *matrices: Array,
    limit: int | None = None,
    scales: Scales = "amax",
) -> tuple[Made, ...]:
    """Matrices that share a scale, in parts of `limit` bytes."""
    weights = [
        buffer(TensorType(dtype, values.shape), stored(values, dtype)) for values in matrices
    ]
    maxima = [
        buffer(TensorType(dtype, w.type.shape[:1]), run_op(RowMaxima(), [w], limit)[0][0])
        for w in weights
    ]
    own = run_op(OwnScale(dialect), maxima)[0][0]
    found = []
    for weight in weights:
        args = [weight, buffer(TensorType("F32", (1,)), own)]
        packed, scale = run_op(PackNvfp4(None, dialect, scales), args, limit)[0]
        found.append(Made(packed, scale, own))
    return tuple(found)
