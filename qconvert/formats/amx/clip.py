"""Steps that lose less: for each row, the step whose codes come nearest to its weights.

Round-to-nearest with step = amax / qmax gives the largest weight of a row its own code and all others
coarse ones. What is minimised here is the sum over a row of (w - step * code)^2, with codes
round(w / step) clipped to -qmax..qmax. It has many local minima, so it is first taken from a histogram
of the row for a whole ladder of steps, then lowered by turns of least squares: codes for the step, the
best step for the codes. A row that gains nothing keeps the step amax / qmax.

Everything that decides is exact or summed in an order of its own, so that the same row gets the same
step on every machine.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from qconvert.ops.base import array

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.arrays import Float64s

    Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    Halves = np.ndarray[tuple[int, ...], np.dtype[np.int16]]

# The histogram: the eight binades below twice the largest power of two in a row, 32 bins each, of
# four bf16 values. What is smaller than all of them hardly has a say.
_BINADES = 8
_BIN_SHIFT = 2
_BINS = _BINADES * 128 >> _BIN_SHIFT
# The ladder: each step is this part of the last one, the first the largest of any row.
_RUNG = 0.97
_RUNGS = {7: 100, 127: 64}
_TURNS = 2
_ROUNDER = 12582912.0  # see formats/amx/encode.py
_LANES = 64  # every shard's columns are a multiple
# Squared errors of a row this small may underflow: it keeps the plain step.
_TINY = 2.0**-50


def clip_scratch(rows: int, columns: int) -> int:
    """Bytes of working memory for `best_steps` on that many rows and columns."""
    return 8 * rows * columns


@lru_cache(maxsize=4)
def ladder(qmax: int) -> tuple[Float64s, Float64s]:
    """Steps relative to twice the largest power of two in a row (so that amax is 0.5 to 1), and the
    mean squared error of each bin's four values under each of them, [bins, steps], in whole units
    of 2^-40: counts times these add up exactly in float64, in whatever order."""
    import numpy as np

    # Multiplied step by step: powers are not the same on every machine.
    steps = np.multiply.accumulate(np.array([1 / qmax] + [_RUNG] * (_RUNGS[qmax] - 1)))
    bits = np.arange(_BINADES * 128)
    values = (1 + (bits % 128) / 128) * 2.0 ** (bits // 128 - _BINADES)
    codes = np.minimum(np.rint(values[:, None] / steps), qmax)
    squares = (values[:, None] - steps * codes) ** 2
    means = squares.reshape(_BINS, -1, steps.size).mean(axis=1)
    return steps, np.rint(means * 2.0**40)


def best_steps(
    values: Floats, sizes: Halves, amax: Floats, qmax: int, plain: Floats, scratch: memoryview
) -> Floats:
    """The step of each row and shard.

    values [r, s, K] are the weights, `sizes` the bf16 bits of their magnitudes, `amax` [r, s] the
    largest. `plain` is the format's own scale, which tiny rows keep; for int4 in sixteenths of a
    step. `scratch` as `clip_scratch` says.
    """
    import numpy as np

    whole = plain if qmax == 127 else plain * np.float32(16)
    safe = amax >= _TINY
    first = np.where(safe, _from_histogram(sizes, amax, qmax, scratch), whole)
    codes = array(scratch[: 4 * values.size], np.float32, values.shape)
    products = array(scratch[4 * values.size : 8 * values.size], np.float32, values.shape)
    _round(values, whole, qmax, codes)
    best, least = whole, _errors(values, whole, codes, products)
    step = first
    for turn in range(_TURNS + 1):
        _round(values, step, qmax, codes)
        error = _errors(values, step, codes, products)
        better = safe & (error < least)
        best, least = np.where(better, step, best), np.where(better, error, least)
        if turn < _TURNS:
            np.multiply(values, codes, out=products)
            along = _total(products)
            np.multiply(codes, codes, out=products)
            across = _total(products)
            ratio = np.divide(along, across, out=np.zeros_like(along), where=across > 0)
            step = np.where(across > 0, ratio, step).astype(np.float32)
    return best


def _from_histogram(sizes: Halves, amax: Floats, qmax: int, scratch: memoryview) -> Floats:
    import numpy as np

    rows, shards, _ = sizes.shape
    steps, errors = ladder(qmax)
    exponent = (amax.view(np.uint32) >> 23).astype(np.int64)
    # Bin 0 also takes all that is smaller.
    low = ((exponent + 1 - _BINADES) * 128)[:, :, None]
    bins = array(scratch[: 8 * sizes.size], np.int64, sizes.shape)
    np.subtract(sizes, low, out=bins)
    np.right_shift(bins, _BIN_SHIFT, out=bins)
    np.maximum(bins, 0, out=bins)
    bins += (np.arange(rows * shards) * _BINS).reshape(rows, shards, 1)
    counts = np.bincount(bins.reshape(-1), minlength=rows * shards * _BINS)
    histogram = counts.reshape(rows * shards, _BINS).astype(np.float64)
    histogram[:, 0] = 0
    unit = np.ldexp(1.0, exponent - 126).reshape(-1)
    relative = amax.reshape(-1) / unit
    total = histogram @ errors
    # A step above amax / qmax leaves codes unused.
    total[steps[None, :] > (relative / qmax)[:, None] * (1 + 1e-6)] = np.inf
    chosen = steps[np.argmin(total, axis=1)] * unit
    result: Floats = chosen.reshape(rows, shards).astype(np.float32)
    return result


def _round(values: Floats, step: Floats, qmax: int, codes: Floats) -> None:
    import numpy as np

    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    np.multiply(values, inverse[:, :, None], out=codes)
    np.clip(codes, np.float32(-qmax), np.float32(qmax), out=codes)
    np.add(codes, np.float32(_ROUNDER), out=codes)
    np.subtract(codes, np.float32(_ROUNDER), out=codes)


def _errors(values: Floats, step: Floats, codes: Floats, products: Floats) -> Float64s:
    """Sum of squared errors [r, s]."""
    import numpy as np

    np.multiply(codes, step[:, :, None], out=products)
    np.subtract(values, products, out=products)
    np.multiply(products, products, out=products)
    return _total(products)


def _total(products: Floats) -> Float64s:
    """Sums [r, s] over all columns, in float64: those a multiple of 64 apart first, one after another,
    then the upper half of the 64 sums to the lower half until one is left."""
    import numpy as np

    rows, shards, columns = products.shape
    found = np.zeros((rows, shards, _LANES))
    for start in range(0, columns, _LANES):
        found += products[:, :, start : start + _LANES]
    width = _LANES
    while width > 1:
        width //= 2
        found = found[:, :, :width] + found[:, :, width:]
    result: Float64s = found[:, :, 0]
    return result
