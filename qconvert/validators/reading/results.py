"""FP8 codes as bf16 results. Under one scale there are only 256 results, so they are computed
once for each scale, by the slow and plain rule, and looked up for each weight: twice as fast as
arithmetic on every weight, and equally right for NaN, denormals and ties.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qconvert.core.dtypes import ceil_div
from qconvert.validators.reading.decode import equal_bytes, fp8_results
from qconvert.validators.reading.matrices import Matrix
from qconvert.validators.reading.rows import grid_lines, row_bytes

if TYPE_CHECKING:
    import numpy as np

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
