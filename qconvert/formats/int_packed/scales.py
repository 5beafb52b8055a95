"""Scales and zero points of groups from their ends, and what is rounded with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.core.errors import RowError
from qconvert.core.int_scheme import IntScheme
from qconvert.ops.cast import NOT_FINITE, round_to_bf16

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s, Int8s, Int32s


# What a scale of zero becomes: the epsilon of its dtype.
EPS = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23}


def round_any(
    values: Float32s,
    spare: Int32s,
    scheme: IntScheme,
    codes: Int8s,
    scale: Float32s,
    zero: Int8s,
) -> None:
    """Groups [n, groups, G] of weights -> codes alike, scale and zero [n, groups]. Spends `values`."""
    import numpy as np

    low, high = scheme.low, scheme.high
    bf16 = scheme.scale_dtype == "BF16"
    most, least = values.max(axis=2), values.min(axis=2)  # NaN goes through both
    finite = np.isfinite(most) & np.isfinite(least)
    if not finite.all():
        row = int(np.argwhere(~finite)[0][0])
        raise RowError(row, NOT_FINITE)
    np.maximum(most, 0, out=most)
    np.minimum(least, 0, out=least)
    step, middle = scale_and_zero(most, least, scheme)
    np.copyto(scale, step)
    if not np.isfinite(scale).all():
        row = int(np.argwhere(~np.isfinite(scale))[0][0])
        raise RowError(row, f"needs a scale beyond {scheme.scale_dtype}; its weights are too large")
    if not scheme.symmetric:
        np.copyto(zero, middle, casting="unsafe")
    scale[scale == 0] = EPS[scheme.scale_dtype]
    np.divide(values, scale[:, :, None], out=values)
    if bf16:
        held(values, "BF16", spare)
    if not scheme.symmetric:
        np.add(values, zero[:, :, None], out=values, casting="unsafe")
        if bf16:
            held(values, "BF16", spare)
    np.clip(values, low, high, out=values)
    np.rint(values, out=values)
    np.copyto(codes, values, casting="unsafe")


def scale_and_zero(most: Float32s, least: Float32s, scheme: IntScheme) -> tuple[Float32s, Float32s]:
    """The scale and the zero point for ends `most` (0 or above) and `least` (0 or below), as
    compressed-tensors computes them (formats/int_packed/encode.py names the source). Both [n] or
    [n, groups]."""
    import numpy as np

    bf16 = scheme.scale_dtype == "BF16"
    low, high = scheme.low, scheme.high
    if scheme.symmetric:
        size: Float32s = np.maximum(most, -least)
        size = size / np.float32((high - low) / 2)
        return held(size, scheme.scale_dtype), np.zeros_like(size)
    spread: Float32s = most - least
    if bf16:
        held(spread, "BF16")
    step = held(spread / np.float32(high - low), scheme.scale_dtype)
    below: Float32s = least / step
    if bf16:
        held(below, "BF16")
    np.subtract(np.float32(low), below, out=below)
    if bf16:
        held(below, "BF16")
    np.clip(below, low, high, out=below)
    below[np.isnan(below)] = 0  # a group of zeros
    return step, np.rint(below)


def held(values: Float32s, dtype: str, spare: Int32s | None = None) -> Float32s:
    """Rounded in place to numbers of a dtype."""
    import numpy as np

    if dtype == "BF16":
        bits = values.view(np.int32)
        round_to_bf16(bits, np.empty_like(bits) if spare is None else spare)
        np.left_shift(bits, 16, out=bits)
    elif dtype == "F16":
        np.copyto(values, values.astype(np.float16))
    return values
