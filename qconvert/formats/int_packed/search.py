"""Scales that lose less: for each group, the scale whose codes come nearest to its weights.

Rounding with scale = amax / half the range gives the largest weight of a group its own code and all
others coarse ones. Here a ladder of scales is tried for each group of G weights, each from the group's
ends times one of its rungs and rounded to the dtype that the format stores; the one that is kept has
the least

    |e|^2 + a (e . w)^2 / |w|^2,    e = w - s * code,    code = w / s to nearest, held to the range

and of equal ones the first, the scale of amax being before all others. The second term is the part of an
error that lies along the weights; a is G / 16, and 1024 of more than 256 weights. Least squares alone
choose scales that clip, which makes every group a little smaller, its largest weights most: over the
groups of a row that adds up, where other errors cancel. Of SmolLM2-135M the KL is 0.84 of plain
rounding's in groups of 64 and with a scale a channel, with least squares alone 0.98 and 1.50.

Everything that decides has an order of its own, so that a group gets the same scale on every machine:
quotients are float32 products with float32(1 / s), sums over them are added in float32 one column after
another, and the rest is float64. Groups that hold nothing from 2^-100 on keep what `amax` gives.

Where scales are `signed`, the ladder is tried a second time below 0, which gives the side of a group's
largest weight the code -8 instead of 7: 0.87 to 0.93 of the error in INT4.

48 scales were measured to gain what 200 do within 0.3 % of the error in groups of 4 bits, and each costs
as much as the next (weights of student-t rows with four degrees of freedom, groups of 32 and 128).

Scales and zero points of groups from their ends, and what is rounded with them.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from qconvert.core.errors import RowError
from qconvert.core.int_scheme import Codes, IntScheme
from qconvert.ops.cast import NOT_FINITE, decode, round_to_bf16
from qconvert.ops.compiled import done

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s, Float64s, Int8s, Int32s, UInt16s

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


_RUNGS = 48
# The last rung by bits, for groups up to `_SHORT` columns and for longer ones, whose largest weight is
# further from the others: of 8192 columns it lost a tenth of the gain to end at 0.35. Codes of 8 bits
# have little to gain, all of it near amax.
_LOWEST = {4: (0.35, 0.12), 8: (0.8, 0.8)}
_SHORT = 256
# Above amax / 7.5 the largest weight has its own code again, 7, on either side.
_HIGHEST = {4: 1.08, 8: 1.004}
# Smaller groups may have denormal scales, and are left alone.
_LEAST = 2.0**-100
# Scales beyond are not tried.
_MOST = {"BF16": 3.0e38, "F16": 65504.0, "F32": 3.0e38}
_ROUNDER = 1.5 * 2.0**23  # see formats/int_packed/encode.py


def along(width: int) -> float:
    """Weight of an error along the weights beside its square, in a group of `width` columns
    (benchmarks/README.md)."""
    return width / 16 if width <= _SHORT else 1024.0


@lru_cache(maxsize=8)
def _rungs(bits: int, short: bool) -> tuple[float, ...]:
    lowest, highest = _LOWEST[bits][0 if short else 1], _HIGHEST[bits]
    # In fractions of 2^-20: powers are not the same on every machine, to the last bit.
    each = (lowest / highest) ** (1 / (_RUNGS - 2))
    return 1.0, *(round(highest * each**n * 2**20) / 2**20 for n in range(_RUNGS - 1))


def ladder(bits: int, width: int) -> Float32s:
    """Return what the ends of a group of `width` columns are multiplied with, [_RUNGS]: 1 first."""
    import numpy as np

    return np.array(_rungs(bits, width <= _SHORT), np.float32)


def searched(weight: UInt16s, scheme: IntScheme, made: Codes, *, signed: bool) -> bool:
    """Return whether a loop searched rows [n, K] of BF16 bits, into `made` with zero points; else
    `search_rows` is to. `signed`: scales below 0 are tried, too."""
    assert made.zero is not None
    shape = made.scale.size, -1
    lines, dtype = made.codes.reshape(shape), ("BF16", "F16", "F32").index(scheme.scale_dtype)
    return done(
        "ints_search", weight.reshape(shape), ladder(scheme.bits, lines.shape[1]),
        along(lines.shape[1]), scheme.low, scheme.high, scheme.symmetric, signed, dtype, lines,
        made.scale.reshape(-1), made.zero.reshape(-1),
    )  # fmt: skip


def search_rows(
    weight: UInt16s,
    values: Float32s,
    spare: Int32s,
    third: Float32s,
    scheme: IntScheme,
    codes: Int8s,
    scale: Float32s,
    zero: Int8s,
    *,
    signed: bool,
) -> None:
    """Rows [n, K] of BF16 bits -> codes alike, scale and zero [n, groups]. `values`, `spare` and `third`
    are working memory. Raises RowError for NaN, infinity, and weights whose scale of amax is beyond its
    dtype."""
    import numpy as np

    shape = scale.size, -1
    lines = codes.reshape(shape)
    decode(weight.data, "BF16", values, spare)
    with np.errstate(all="ignore"):
        round_any(
            values.reshape(*scale.shape, -1), spare.reshape(*scale.shape, -1), scheme,
            codes.reshape(*scale.shape, -1), scale, zero,
        )  # fmt: skip
        decode(weight.data, "BF16", values, spare)
        groups = values.reshape(shape)
        largest = np.maximum(groups.max(axis=1), -groups.min(axis=1))
        small = np.flatnonzero(largest < np.float32(_LEAST))
        kept = lines[small], scale.reshape(-1)[small], zero.reshape(-1)[small]
        _best_scales(
            groups, spare.view(np.float32).reshape(shape), third.reshape(shape), scheme, lines,
            scale.reshape(-1), zero.reshape(-1), signs=(1, -1) if signed else (1,),
        )  # fmt: skip
    lines[small], scale.reshape(-1)[small], zero.reshape(-1)[small] = kept


def _best_scales(
    values: Float32s,
    quotients: Float32s,
    spare: Float32s,
    scheme: IntScheme,
    codes: Int8s,
    scale: Float32s,
    zero: Int8s,
    *,
    signs: tuple[int, ...],
) -> None:
    """Groups [n, G] of finite weights -> codes alike, scale and zero [n]. `quotients` and `spare` are
    working memory of the same shape. What `scale` and `zero` hold stays where no scale is of use."""
    import numpy as np

    most, least = np.maximum(values.max(axis=1), 0), np.minimum(values.min(axis=1), 0)
    size = np.maximum(most, -least)
    np.multiply(values, (np.float32(1) / size)[:, None], out=quotients)
    length = _sums(quotients, quotients, spare)
    best, weight = np.full(scale.shape, np.inf), along(values.shape[1])
    middle = zero.astype(np.float32)
    for sign, rung in product(signs, ladder(scheme.bits, values.shape[1])):
        step, center = scale_and_zero(most * rung, least * rung, scheme)
        usable = (step > 0) & (step <= np.float32(_MOST[scheme.scale_dtype]))
        wide = step.astype(np.float64)
        step *= np.float32(sign)
        _nearest(values, np.where(usable, step, np.float32(1)), center, scheme, quotients, spare)
        np.subtract(quotients, spare, out=spare)
        share = _sums(quotients, spare, quotients) * (wide / size.astype(np.float64))
        error = _sums(spare, spare, spare) + weight * (share * share / length)
        error *= wide * wide
        better = usable & (error < best)
        np.copyto(best, error, where=better)
        np.copyto(scale, step, where=better)
        np.copyto(middle, center, where=better)
    _nearest(values, scale, middle, scheme, quotients, spare)
    np.add(spare, middle[:, None], out=spare)
    np.copyto(codes, spare, casting="unsafe")
    np.copyto(zero, middle, casting="unsafe")


def _sums(first: Float32s, second: Float32s, spare: Float32s) -> Float64s:
    """Products of two [n, G], added one column after another, [n]; `spare` may be one of them."""
    import numpy as np

    np.multiply(first, second, out=spare)
    np.add.accumulate(spare, axis=1, out=spare)
    return spare[:, -1].astype(np.float64)


def _nearest(
    values: Float32s,
    step: Float32s,
    zero: Float32s,
    scheme: IntScheme,
    quotients: Float32s,
    codes: Float32s,
) -> None:
    """`quotients` of groups [n, G] under scales [n], and `codes` less their zero points."""
    import numpy as np

    np.multiply(values, (np.float32(1) / step)[:, None], out=quotients)
    low, high = np.float32(scheme.low) - zero, np.float32(scheme.high) - zero
    np.maximum(quotients, low[:, None], out=codes)
    np.minimum(codes, high[:, None], out=codes)
    np.add(codes, np.float32(_ROUNDER), out=codes)
    np.subtract(codes, np.float32(_ROUNDER), out=codes)
