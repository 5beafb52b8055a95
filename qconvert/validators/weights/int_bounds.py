"""Bounds of the distance of packed integers from the source's weights: if they are rounded to nearest,
and if calibration found them.

Rounding is compressed-tensors' (`calculate_qparams` and `_quantize`): scale = amax / half the
range, or (max - min) / the range with 0 in it, rounded to the scale's dtype, a scale of 0 replaced by
that dtype's epsilon; code = weight / scale + zero point, to nearest. With BF16 scales each step of it
is rounded to bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.validation.compiled import LOOPS, done
from qconvert.validators.reading.decode import as_bf16, rounded
from qconvert.validators.reading.forms import Form

if TYPE_CHECKING:
    from qconvert.core.arrays import Bools, Float64s
    from qconvert.validators.reading.decode import Floats
    from qconvert.validators.reading.rows import Numbers


# Half the smallest number above 0, and the value that replaces a scale that rounds to 0.
_TINY = {"BF16": 2.0**-134, "F16": 2.0**-25, "F32": 2.0**-150}
EPS = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23}
_COARSER = 1 + 2.0**-7  # a scale rounded to bf16, with a margin
_DIVIDED = 2.0**-22  # GPUs multiply by an inverse where CPUs divide: a float32's last bit, or two


@dataclass(frozen=True, eq=False)
class Tile:
    """Some rows of a packed matrix: the source's weights `expected` and the folder's `found` [n, K],
    steps (the scales' sizes) and zero points [n, groups], and the group of each column (None: adjacent
    groups; -1 for a column of none)."""

    form: Form
    expected: Floats
    found: Floats
    step: Floats
    zero: Floats
    groups: Numbers | None

    def over(self, values: Floats) -> Floats:
        """[n, groups] spread over their columns, NaN for a column of no group."""
        import numpy as np

        if self.groups is None:
            return np.repeat(values, self.expected.shape[1] // values.shape[1], axis=1)
        return np.where(self.groups >= 0, values[:, self.groups], np.float32(np.nan))

    def cut(self, values: Floats) -> Floats | None:
        """[n, K] as [n, groups, K / groups]; None if groups differ in size."""
        import numpy as np

        count = self.step.shape[1]
        width = values.shape[1] // count
        if self.groups is not None:
            order = np.argsort(self.groups, kind="stable")
            if not np.array_equal(self.groups[order], np.repeat(np.arange(count), width)):
                return None
            values = values[:, order]
        return values.reshape(values.shape[0], count, width)


def code_range(form: Form) -> tuple[int, bool, str]:
    """Number of steps between the first code and the last, whether zero is in the middle, and
    the dtype of the scales."""
    assert form.codes is not None
    assert form.grid is not None
    codes = form.codes
    return (1 << codes.bits) - 1, codes.symmetric, form.grid.scale.type.dtype


def _bounds(form: Form) -> tuple[float, float, float]:
    """Bound of an error by rounding to nearest: steps, an absolute part, and a part of its size."""
    steps, symmetric, dtype = code_range(form)
    half, part = 0.5, 0.0
    if symmetric and steps == 15:
        # The largest weight of a group is 7.5 steps before its scale is rounded to bf16, which takes
        # 2^-8 of it at most, and the largest code is 7. Rounding weight / scale to bf16 before it
        # becomes a code adds less (2^-6: bf16 has steps of 2^-5 from 4 to 8).
        half += 7.5 * 2.0**-8
    elif symmetric:
        part = 2.0**-8  # the same two, each of the weight's own size
    elif dtype == "BF16":
        # The zero point is rounded to an integer, so the last code is up to half a step short of
        # the largest weight. In addition, each rounded to bf16: the range and the scale (2^-9 of the
        # range each), the smallest weight in steps (2^-9 of it), code and zero point (2^-9 of half
        # the range each).
        half += steps * 2.0**-8 + steps * 2.0**-9 + (steps + 1) * 2.0**-9
    else:
        half += steps * 2.0**-10  # only the scale is rounded
    return half, _TINY[dtype] * (steps + 1), part


def span_if_near(tile: Tile) -> Floats | None:
    """If a compiled loop found all weights within rounding to nearest: the range that each group's codes
    must cover, [n, groups]; else None."""
    import numpy as np

    if LOOPS.in_use() is None or tile.groups is not None:
        return None
    span = np.empty(tile.step.shape, np.float32)
    own = tile.expected, tile.found, tile.step
    near = done("int_fits", *own, *_bounds(tile.form), code_range(tile.form)[1], span)
    return span if near else None


def nearest_fits(tile: Tile) -> Bools:
    """Return which weights are within rounding to nearest of the source's."""
    import numpy as np

    half, least, part = _bounds(tile.form)
    largest = np.finfo(np.float32).max
    step = tile.over(tile.step)
    with np.errstate(all="ignore"):
        off = np.abs(tile.expected - np.clip(tile.found, -largest, largest))
        allowed = np.float32(half) * step + np.float32(least)
        if part:
            allowed += np.float32(part) * np.abs(tile.expected)
        fits: Bools = (off <= allowed) & (step <= largest)
    return fits


def coarse(tile: Tile, first: int, span: Floats | None = None) -> str:
    """Fault of a group's step: weights within half a step prove little if the step is larger
    than the group's weights need. `first` is the tile's first row; `span` the groups' ranges, where they
    are known."""
    import numpy as np

    steps, symmetric, dtype = code_range(tile.form)
    cut = tile.cut(tile.expected) if span is None else None
    if span is None and cut is None:
        return "its groups of columns differ in size"
    with np.errstate(all="ignore"):
        size = _span(cut, symmetric=symmetric) if cut is not None else span
        assert size is not None
        # Symmetric ones of other tools may have their largest weight at the largest code.
        most = size * np.float32(_COARSER / (steps // 2 if symmetric else steps))
        most += np.float32(_TINY[dtype] * (steps + 1))
        unseen = (tile.step == EPS[dtype]) & (size <= np.float32(_TINY[dtype] * (steps + 1)))
        wrong = (tile.step > most) & (size > 0) & ~unseen
    if not wrong.any():
        return ""
    row, group = divmod(int(np.argmax(wrong)), wrong.shape[1])
    return (
        f"row {first + row}, {_columns(tile, group)}: expected a step of at most "
        f"{most[row, group]:.6g} for the largest weight there, found "
        f"{tile.step[row, group]:.6g}"
    )


def _span(cut: Floats, *, symmetric: bool) -> Floats:
    """The range that a group's codes must cover, [n, groups]: the largest weight, or from the smallest
    to the largest including 0."""
    import numpy as np

    found: Floats = np.abs(cut).max(axis=2)
    if not symmetric:
        found = np.maximum(cut.max(axis=2), 0) - np.minimum(cut.min(axis=2), 0)
    return found


def _columns(tile: Tile, group: int) -> str:
    if tile.groups is not None:
        return f"group {group}"
    return f"columns from {group * (tile.expected.shape[1] // tile.step.shape[1])}"


# For codes found by calibration: what a column loses by rounding is compensated by those after it, so
# a single weight may be a dozen steps off. The direction is kept. Cosines with the source of rows,
# and of groups of columns over all rows, were 0.69 or more (0.82 without AMX's searched steps) of what
# rounding to nearest under the same scales gives, on heavy-tailed models, 0.47 of one row of
# AMX's where scales were fitted to codes; for another expert's, another row's or another group's codes
# they are near 0 for nearly all.
_KEPT = 0.3

# Of scales that calibration searched for and fitted to codes: parts of the one of a group's largest
# weight (0.49 to 1.9 on heavy-tailed models of few tokens, refits being held to 4 times what a search up
# to 1.05 found), and what a row's or a group's weights need to be multiplied with to come nearest to the
# source's (0.68 to 1.08 of rows; up to 1.44 of groups that keep their direction, with a tail downwards).
# Where propagated errors are corrected these move by some hundredths, either way.
# Of inputs far apart (norms with factors up to exp(9)) and fewer tokens than columns (288 of 576), a
# group's scale is the one that few of its columns need, or other groups: 0.016 to 4.9 of the largest
# weight's, cosines down to -0.29, and weights up to 6 times too short; of 0.023 of the groups of some
# rows over 1.8 times. So a length says nothing of one group. Under the scales of the group beside or of
# the row above more than half of the groups were far in one way or another, 0.051 or more by length.
_LEAST_PART, _MOST_PART = 1 / 256, 7.0
_ROW_LENGTHS = 0.58, 1.5
# Where few tokens say little of many columns, as of a first layer's attention, a row is the source's and
# noise across it: its length was down to 0.35, while of the source's direction it kept 0.42 to 1.09. A
# row that is too long has more of that, too.
_OF_SOURCE = 1.3
_GROUP_LENGTH, _SAME_DIRECTION, _OTHER_DIRECTION = 1.8, 0.6, 0.5
_MOST_SHORT = 0.05
_ROW_OF_GROUPS = 2.5  # 2.06 of one, of such inputs


class Kept:
    """Share of the source's weights that calibrated codes keep, one tile after another. Scales must be
    exactly those of the source's groups, or, where they were `searched` for, of a size that fits them;
    columns that are 0 in all rows of a tile had no input in the calibration, and are not judged."""

    def __init__(self, *, searched: bool = False) -> None:
        self._searched = searched
        self._sums: Float64s | None = None  # [5, columns]: see _products
        self._groups: Numbers | None = None
        self._count = 0

    def add(self, tile: Tile, first: int) -> str:
        """Fault of a tile's scales or rows, "" if nothing. `first` is its first row."""
        wrong = _far_scale(tile, first) if self._searched else _other_scale(tile, first)
        if wrong:
            return wrong
        best = _rounded(tile)
        self.count(tile.expected, tile.found, best, tile.step.shape[1])
        self._groups = tile.groups
        at = lost_row(tile.expected, tile.found, best)
        return "" if at is None else f"row {first + at[0]}: {at[1]}"

    def count(self, expected: Floats, found: Floats, best: Floats, groups: int) -> None:
        """Add rows [n, K] to what is known of columns; `best` is the source rounded to nearest."""
        expected, best = _alive(found, expected, best)
        sums = _products(expected, found, best, 0)
        self._sums = sums if self._sums is None else self._sums + sums
        self._count = groups

    def end(self) -> str:
        """Fault of a group of columns, over all rows seen."""
        import numpy as np

        if self._sums is None:
            return ""
        columns = self._sums.shape[1]
        groups = self._groups
        if groups is None:
            groups = np.arange(columns) * self._count // columns
        each = [np.bincount(groups, line, self._count) for line in self._sums]
        at = _lost(np.stack(each).astype(np.float64))
        return "" if at is None else f"group {at[0]} of columns: {at[1]}"


def lost_row(expected: Floats, found: Floats, best: Floats) -> tuple[int, str] | None:
    """The first row [n, K] of calibrated weights that is hardly correlated with the source's, and
    its correlation; `best` is the source rounded to nearest under the same steps. Columns that are 0 in
    all rows are not judged."""
    expected, best = _alive(found, expected, best)
    return _lost(_products(expected, found, best, 1))


def _alive(found: Floats, *parts: Floats) -> list[Floats]:
    """These with 0 in columns where calibration left only 0."""
    import numpy as np

    dead = ~found.any(axis=0)
    return [np.where(dead, np.float32(0), part) for part in parts] if dead.any() else [*parts]


def _products(expected: Floats, found: Floats, best: Floats, axis: int) -> Float64s:
    """Sums along an axis: source by found, source by rounded, and the squares of the three."""
    import numpy as np

    pairs = (expected, found), (expected, best), (expected, expected), (found, found), (best, best)
    along = "ij,ij->j" if axis == 0 else "ij,ij->i"
    with np.errstate(all="ignore"):
        return np.stack([np.einsum(along, a, b, dtype=np.float64) for a, b in pairs])


def _lost(sums: Float64s) -> tuple[int, str] | None:
    """The first place whose found weights are hardly correlated with the source's, and the correlation.
    Places where rounding keeps nothing are not judged."""
    import numpy as np

    with np.errstate(all="ignore"):
        kept = sums[0] / np.sqrt(sums[2] * sums[3])
        usual = sums[1] / np.sqrt(sums[2] * sums[4])
        wrong = ~(kept >= _KEPT * usual) & (usual > 0)
    if not wrong.any():
        return None
    at = int(np.argmax(wrong))
    return at, (
        f"expected codes calibrated for the source's weights, with a cosine of at least "
        f"{_KEPT * usual[at]:.3g}, found {kept[at]:.3g}"
    )


def _rounded(tile: Tile) -> Floats:
    """The source's weights rounded to nearest under the tile's scales and zero points."""
    import numpy as np

    codes = tile.form.codes
    assert codes is not None
    high = (1 << (codes.bits - 1)) - 1
    step, zero = tile.over(tile.step), tile.over(tile.zero)
    with np.errstate(all="ignore"):
        codes_of = np.clip(np.rint(tile.expected / step + zero), -high - 1, high)
        found: Floats = (codes_of - zero) * step
    return found


def _other_scale(tile: Tile, first: int) -> str:
    """A scale that is not exactly the one of its group's weights."""
    import numpy as np

    steps, symmetric, dtype = code_range(tile.form)
    cut = tile.cut(as_bf16(np.ascontiguousarray(tile.expected)))
    if cut is None:
        return "its groups of columns differ in size"
    with np.errstate(all="ignore"):
        size = _span(cut, symmetric=symmetric)
        if not symmetric and dtype == "BF16":
            size = as_bf16(size)
        exact = size / np.float32(steps / 2 if symmetric else steps)
        low, high = (rounded(exact * np.float32(1 + sign * _DIVIDED), dtype) for sign in (-1, 1))
        eps = np.float32(EPS[dtype])
        low, high = (np.where(bound > 0, bound, eps) for bound in (low, high))
        bad = ~((tile.step >= np.minimum(low, high)) & (tile.step <= np.maximum(low, high)))
    if not bad.any():
        return ""
    row, group = divmod(int(np.argmax(bad)), bad.shape[1])
    return (
        f"row {first + row}, {_columns(tile, group)}: expected a scale of {high[row, group]:.6g} for "
        f"the source's weights there, found {tile.step[row, group]:.6g}"
    )


def _far_scale(tile: Tile, first: int) -> str:
    """A scale that no search and no fit gives for its group's weights."""
    import numpy as np

    steps, symmetric, _ = code_range(tile.form)
    weights, found = tile.cut(as_bf16(np.ascontiguousarray(tile.expected))), tile.cut(tile.found)
    if weights is None or found is None:
        return "its groups of columns differ in size"
    with np.errstate(all="ignore"):
        plain = _span(weights, symmetric=symmetric) / np.float32(steps / 2 if symmetric else steps)
        part = tile.step / plain
        along = (weights * found).sum(axis=2, dtype=np.float64)
        across, own = (np.square(each).sum(axis=2, dtype=np.float64) for each in (found, weights))
        far = ~((part >= _LEAST_PART) & (part <= _MOST_PART)) & (plain > 0)
        both = np.sqrt(across * own)
        short = (along > _GROUP_LENGTH * across) & (along > _SAME_DIRECTION * both)
        if np.count_nonzero(short) > _MOST_SHORT * short.size:
            far |= short
        far |= along < -_OTHER_DIRECTION * both
    if far.any():
        row, group = divmod(int(np.argmax(far)), far.shape[1])
        return (
            f"row {first + row}, {_columns(tile, group)}: expected a scale near "
            f"{plain[row, group]:.6g} for the source's weights there, found {tile.step[row, group]:.6g}"
        )
    # A row under one scale, 1.57 of a heavy-tailed one in 4 bits, is a group.
    most = _GROUP_LENGTH if found.shape[1] == 1 else _ROW_OF_GROUPS
    row = lengths_off(along.sum(axis=1), across.sum(axis=1), own.sum(axis=1), most)
    return "" if row is None else f"row {first + row}: {LENGTHS}"


LENGTHS = "expected scales under which its weights are about as large as the source's"


def lengths_off(
    along: Float64s, across: Float64s, own: Float64s | None = None, most: float = _ROW_LENGTHS[1]
) -> int | None:
    """The first row whose weights must be multiplied by much more or less than 1 to come nearest to the
    source's: products of both [n], squares of the weights [n], and, if long rows may be noise, those of
    the source's. Rows of zeros are not judged."""
    import numpy as np

    short = ~(along <= most * across)
    long = ~(along >= _ROW_LENGTHS[0] * across)
    if own is not None:
        long &= ~(along <= _OF_SOURCE * own)
    wrong = (short | long) & (across > 0)
    return int(np.argmax(wrong)) if wrong.any() else None
