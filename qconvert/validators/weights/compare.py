"""One matrix against the source's: how close it must be, and how close it is.

FP8 codes as bf16 results. Under one scale there are only 256 results, so they are computed
once for each scale, by the slow and plain rule, and looked up for each weight: twice as fast as
arithmetic on every weight, and equally right for NaN, denormals and ties.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from qconvert.core.dtypes import ceil_div
from qconvert.validation.findings import Finding, Measure
from qconvert.validation.workers import Folders
from qconvert.validators.reading.decode import equal_bytes, fp8_results, is_rounded, rounded
from qconvert.validators.reading.forms import RAW
from qconvert.validators.reading.matrices import Matrix
from qconvert.validators.reading.rows import (
    grid_lines,
    group_of,
    row_bytes,
    rows,
    scales,
    scratch,
    tile_rows,
    zero_points,
)
from qconvert.validators.weights.int_bounds import Kept, Tile, coarse, nearest_fits, span_if_near
from qconvert.validators.weights.sums import Sums

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.arrays import Bools
    from qconvert.validation.workers import Reads
    from qconvert.validators.reading.decode import Bytes, Floats

    Halves = np.ndarray[Any, np.dtype[np.uint16]]

_CODES = 256
# Weights looked up at a time, and scales whose results are computed at a time: their memory stays
# in a core's cache.
_TILE, _SCALES = 1 << 16, 256
# Weights a scale must stand for: with fewer, computing its results costs more than they save.
_WORTH = 1024


def bf16_results(scales: Floats, dtype: str) -> Halves:
    """Every code times each scale [n], rounded once to bf16: [n * 256], bits as uint16."""
    import numpy as np

    return (fp8_results(scales, dtype).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def is_worth(matrix: Matrix) -> bool:
    """Tell whether a matrix is FP8 with scales that each stand for many weights."""
    grid = matrix.form.grid
    if matrix.format != "fp8" or grid is None:
        return False
    return matrix.form.rows * matrix.form.columns >= _WORTH * grid.rows * grid.columns


class Results:
    """Of one FP8 matrix, read with `reader`."""

    def __init__(self, reader: Reads, matrix: Matrix) -> None:
        import numpy as np

        assert matrix.form.grid is not None
        self._reader, self._matrix, self._grid = reader, matrix, matrix.form.grid
        columns = matrix.form.columns
        self._height = max(1, _TILE // columns)
        if self._grid.columns == 1:  # each row may have a scale of its own
            self._height = min(self._height, _SCALES)
        across = np.arange(columns) // self._grid.block[1] * _CODES
        self._across = across.astype(np.uint16 if across[-1] < 1 << 16 else np.intp)
        size = min(self._height, matrix.form.rows) * columns
        self._sums = np.empty(size, self._across.dtype)
        self._numbers, self._found = np.empty(size, np.intp), np.empty(size, np.uint16)
        self._first, self._last, self._table = 0, 0, np.empty(0, np.uint16)

    def same(self, stored: Bytes, start: int, stop: int) -> bool:
        """Tell whether bytes of bf16 equal rows [start, stop). A NaN with other bits is not equal."""
        columns = self._matrix.form.columns
        codes = row_bytes(self._reader, self._matrix, start, stop).reshape(-1, columns)
        lines = stored.reshape(-1, 2 * columns)
        at = 0
        for first, last in self._matrix.spans(start, stop):
            while first < last:
                end = min(last, first + self._height)
                if self._grid.columns > 1:  # rows that share their scales
                    end = min(end, (first // self._grid.block[0] + 1) * self._grid.block[0])
                rows = slice(at, at + end - first)
                if not equal_bytes(self._of(codes[rows], first), lines[rows].reshape(-1)):
                    return False
                at, first = rows.stop, end
        return True

    def _of(self, codes: Bytes, first: int) -> Bytes:
        """The results of some stored rows from `first` on."""
        import numpy as np

        high, stop = self._grid.block[0], first + codes.shape[0]
        top = first // high
        table = self._results(top, ceil_div(stop, high))
        base: Any = self._across
        if self._grid.columns == 1:
            below = (np.arange(first, stop) // high - top) * _CODES
            base = below.astype(self._sums.dtype)[:, None]
        sums, numbers, found = (
            array[: codes.size] for array in (self._sums, self._numbers, self._found)
        )
        np.add(codes, base, out=sums.reshape(codes.shape))
        np.copyto(numbers, sums)
        table.take(numbers, out=found, mode="clip")
        return found.view(np.uint8)

    def _results(self, top: int, bottom: int) -> Halves:
        """Those of rows [top, bottom) of the grid, one after another."""
        size = self._grid.columns * _CODES
        if not self._first <= top <= bottom <= self._last:
            self._first = top
            self._last = min(self._grid.rows, max(bottom, top + _SCALES // self._grid.columns))
            lines = grid_lines(self._reader, self._grid, self._first, self._last)
            self._table = bf16_results(lines, self._matrix.form.weight.type.dtype)
        return self._table[(top - self._first) * size : (bottom - self._first) * size]


# How a matrix must match the source's: the same numbers; rounded to its own floats once; the nearest
# code of its scales; codes that calibration found; or codes and scales that it found.
How = Literal["equal", "rounded", "nearest", "calibrated", "solved"]
CALIBRATED: tuple[How, ...] = ("calibrated", "solved")

_STRETCHES = 8  # of a long matrix, at level sample
# A product of float32, a quotient by the reciprocal that was rounded, and that quotient: 2^-24 each.
_DIALECTS = 2.0**-22
# A normal e4m3 is off by 2^-4 of itself at most, and by less on average.
_FP8_RMS = 2.0**-4


@dataclass(frozen=True, slots=True)
class Compare:
    """One matrix against the source's, one tile at a time."""

    mine: Matrix
    yours: Matrix
    how: How
    whole: bool

    @property
    def where(self) -> str:
        return self.mine.tensor

    @property
    def nbytes(self) -> int:
        line = self.mine.form.row_nbytes + self.yours.form.row_nbytes
        if self.whole:
            return self.mine.rows * line
        return sum((stop - start) * line for start, stop in self._tiles())

    @property
    def scratch(self) -> int:
        return max(scratch(self.mine), scratch(self.yours))

    @property
    def computes(self) -> bool:
        """Tell whether it computes with numbers, in loops where there are some."""
        return self.mine.format != RAW and not self._is_exact

    def run(self, folders: Folders) -> Iterator[Finding | Measure]:
        tiles = list(self._tiles())
        zero = self._is_zero(folders, tiles) if self._is_exact else None
        if zero is not None:
            if self.mine.format != RAW:
                yield self._equal(tiles, zero)
            return
        if self.mine.format == RAW:
            yield self._first_byte(folders, tiles)
            return
        sums, kept, misfit = Sums(), self._begin(folders), ""
        for start, stop in tiles:
            found = rows(folders.output, self.mine, start, stop)
            expected = self._expected(folders, start, stop)
            if not misfit:
                misfit = self._misfit(folders, (start, stop), expected, found, kept)
            if not sums.added(expected, found):
                sums.add(*_finite(expected, found))
        measure = self._measure(sums)
        yield measure
        misfit = misfit or kept.end()
        if not misfit and self._is_fp8_anew and measure.rms > _FP8_RMS:
            misfit = (
                f"off by {measure.rms:.3g} of its norm, expected at most {_FP8_RMS}: its scales "
            )
            misfit += "are coarser than its weights need"
        if misfit:
            message = described(self.mine, misfit + self._kind())
            yield Finding("QC060", "error", self.mine.tensor, message)

    def _expected(self, folders: Folders, start: int, stop: int) -> Floats:
        return rows(folders.source, self.yours, start, stop, bf16=self._from_codes)

    def _begin(self, folders: Folders) -> Kept:
        """State of what is known of calibrated codes, from no tile yet."""
        return Kept(searched=self.how == "solved")

    @property
    def _from_codes(self) -> bool:
        """Tell whether the source's weights are codes times scales, which its consumer rounds to bf16;
        those that were written as fp16 or fp32 are no bf16 on their way."""
        if self.mine.format in ("fp16", "fp32"):
            return False
        return self.how != "equal" and self.yours.form.is_scaled

    @property
    def _is_fp8_anew(self) -> bool:
        return self.how == "nearest" and self.mine.format == "fp8"

    @property
    def _is_exact(self) -> bool:
        return self.how == "equal" or (self._from_codes and self.mine.format == "bf16")

    def _tiles(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows: all, or some ranges, including first and last."""
        height = min(tile_rows(self.mine), tile_rows(self.yours))
        count = -(-self.mine.rows // height)
        chosen = range(count)
        if not self.whole and count > _STRETCHES:
            chosen = [i * (count - 1) // (_STRETCHES - 1) for i in range(_STRETCHES)]  # type: ignore[assignment]
        for number in chosen:
            yield number * height, min((number + 1) * height, self.mine.rows)

    def _is_zero(self, folders: Folders, tiles: list[tuple[int, int]]) -> bool | None:
        """For rows that match exactly, whether all their bytes are zero; None for others."""
        zero = True
        results = None
        if self.how != "equal" and is_worth(self.yours):
            results = Results(folders.source, self.yours)
        for start, stop in tiles:
            mine = row_bytes(folders.output, self.mine, start, stop)
            if self.how == "equal":
                same = self._same_bytes(folders, mine, start, stop)
            elif results is not None:
                same = results.same(mine, start, stop)
            else:
                same = is_rounded(rows(folders.source, self.yours, start, stop).reshape(-1), mine)
            if not same:
                return None
            zero = zero and not mine.any()
        return zero

    def _same_bytes(self, folders: Folders, mine: Bytes, start: int, stop: int) -> bool:
        """Tell whether codes and scales are equal, so that nothing has to be decoded."""
        import numpy as np

        if self.mine.form.weight.type.dtype != self.yours.form.weight.type.dtype:
            return False
        if not equal_bytes(mine, row_bytes(folders.source, self.yours, start, stop)):
            return False
        if not self._same_codes(folders, start, stop):
            return False
        grids = self.mine.form.grid, self.yours.form.grid
        if grids[0] is None or grids[1] is None:
            return grids[0] is grids[1]
        if grids[0].block[1] != grids[1].block[1] or self.mine.form.offset is not None:
            return False  # as bytes: they are compared as numbers
        here, there = (
            scales(reader, matrix, start, stop)
            for reader, matrix in ((folders.output, self.mine), (folders.source, self.yours))
        )
        if self._other_dialect:
            return bool((np.abs(here - there) <= _DIALECTS * np.abs(there)).all())
        return np.array_equal(here, there, equal_nan=True)

    @property
    def _other_dialect(self) -> bool:
        """Tell whether both are NVFP4, and one multiplies by a global scale that the other divides by:
        the same codes and block scales, and products that are rounded otherwise in float32."""
        grids = self.mine.form.grid, self.yours.form.grid
        both = [grid.global_scale for grid in grids if grid is not None and grid.global_scale]
        return len(both) == 2 and both[0].divisor != both[1].divisor

    def _same_codes(self, folders: Folders, start: int, stop: int) -> bool:
        """Tell whether equal words mean the same, scales apart."""
        import numpy as np

        mine, yours = self.mine.form.codes, self.yours.form.codes
        if mine is None or yours is None:
            return mine is yours
        sides = (folders.output, self.mine), (folders.source, self.yours)
        here, there = (zero_points(reader, matrix, start, stop) for reader, matrix in sides)
        groups = [group_of(reader, matrix.form) for reader, matrix in sides]
        if (groups[0] is None) != (groups[1] is None) or mine.bits != yours.bits:
            return False
        same = groups[0] is None or np.array_equal(groups[0], groups[1])  # type: ignore[arg-type]
        return bool(same and np.array_equal(here, there))

    def _equal(self, tiles: list[tuple[int, int]], zero: bool) -> Measure:
        """The measure of equal matrices, whose sums need not be computed."""
        count = sum(stop - start for start, stop in tiles) * self.mine.form.columns
        cosine = float("nan") if zero else 1.0
        m = self.mine
        return Measure(m.tensor, m.role, m.layer, m.expert, m.format, count, 0.0, 0.0, cosine)

    def _measure(self, sums: Sums) -> Measure:
        m = self.mine
        found = self.how in CALIBRATED
        return sums.measure(m.tensor, m.role, m.layer, m.expert, m.format, calibrated=found)

    def _misfit(
        self, folders: Folders, tile: tuple[int, int], expected: Floats, found: Floats, kept: Kept
    ) -> str:
        """Finding about some rows."""
        nearest = self.mine.form.encoding.nearest
        if self.how == "nearest" and nearest is not None:
            near, why = nearest(folders.output, self.mine, *tile, expected, found)
            return (
                why if near is None or near.all() else wrong_weights(near, tile[0], expected, found)
            )
        if self.how in ("equal", "rounded") or self.mine.form.codes is None:
            fits = self._fits(expected, found)
            return "" if fits is None else wrong_weights(fits, tile[0], expected, found)
        import numpy as np

        step = np.abs(scales(folders.output, self.mine, *tile))
        zero = zero_points(folders.output, self.mine, *tile)
        groups = group_of(folders.output, self.mine.form)
        packed = Tile(self.mine.form, expected, found, step, zero, groups)
        if self.how in CALIBRATED:
            return kept.add(packed, tile[0])
        span = span_if_near(packed)
        if span is not None:
            return coarse(packed, tile[0], span)
        fits = nearest_fits(packed)
        if not fits.all():
            fits |= np.isnan(expected) & np.isnan(found)
        return (
            wrong_weights(fits, tile[0], expected, found)
            if not fits.all()
            else coarse(packed, tile[0])
        )

    def _fits(self, expected: Floats, found: Floats) -> Bools | None:
        """Return which weights are right; None: all."""
        import numpy as np

        with np.errstate(all="ignore"):
            if self.how == "rounded":
                expected = rounded(expected, self.mine.form.weight.type.dtype)
            if self.how == "equal" and self._other_dialect:
                fits = np.abs(expected - found) <= _DIALECTS * np.abs(expected)
            else:
                fits = expected.view(np.uint32) == found.view(np.uint32)
            fits |= np.isnan(expected) & np.isnan(found)
        return None if fits.all() else fits

    def _kind(self) -> str:
        """Bound of its distance."""
        if self.how == "equal":
            return ""
        what = {
            "rounded": "rounded once", "nearest": "within half a step of its scale",
            "calibrated": "by calibration", "solved": "by calibration, with its scales",
        }[self.how]  # fmt: skip
        return f" ({self.yours.format} of the source as {self.mine.format}, {what})"

    def _first_byte(self, folders: Folders, tiles: list[tuple[int, int]]) -> Finding:
        """Of tensors that are compared as bytes."""
        import numpy as np

        for start, stop in tiles:
            mine = row_bytes(folders.output, self.mine, start, stop)
            yours = row_bytes(folders.source, self.yours, start, stop)
            if not np.array_equal(mine, yours):
                at = int(np.argmax(mine != yours))
                message = (
                    f"byte {start + at}: expected {yours[at]} as in the source, found {mine[at]}"
                )
                return Finding("QC060", "error", self.mine.tensor, message)
        raise AssertionError("bytes differ where none does")


def wrong_weights(
    fits: Bools, start: int, expected: Floats, found: Floats, wanted: str = "{} as in the source"
) -> str:
    """The first weight that does not fit, of rows from `start` on, and how many there are. `wanted` says
    what was expected, of the source's number."""
    import numpy as np

    row, column = divmod(int(np.argmin(fits)), fits.shape[1])
    wrong = fits.size - int(np.count_nonzero(fits))
    return (
        f"row {start + row}, column {column}: expected {wanted.format(f'{expected[row, column]:.9g}')}, "
        f"found {found[row, column]:.9g}; {wrong} of {fits.size} weights looked at there are wrong"
    )


def _finite(expected: Floats, found: Floats) -> tuple[Floats, Floats]:
    """Without values that are not numbers on either side: they would dominate all sums."""
    import numpy as np

    ok = np.isfinite(expected) & np.isfinite(found)
    if ok.all():
        return expected, found
    zero = np.float32(0)
    return np.where(ok, expected, zero), np.where(ok, found, zero)


def described(matrix: Matrix, message: str) -> str:
    """A message about a matrix that is part of a tensor says which part."""
    part = matrix.role if matrix.expert is None else f"expert {matrix.expert}, {matrix.role}"
    return f"{part}: {message}" if matrix.rows < matrix.form.rows or matrix.form.at else message
