"""Sums over two matrices: what validators/weights/sums.py does, in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.compiled.jit import inner, loop

_COLUMNS = 1024  # at a time: their sums stay in the first cache


@inner
def _row(left: Any, right: Any, source: Any, found: Any, product: Any, difference: Any) -> Any:
    """Add a row's products to those of its columns. Returns the largest difference."""
    worst = np.int32(0)  # sizes are in the order of their bits
    for column in range(left.size):
        one, other = left[column], right[column]
        off = np.float32(other - one)
        source[column] += np.float32(one * one)
        found[column] += np.float32(other * other)
        product[column] += np.float32(one * other)
        difference[column] += np.float32(off * off)
        worst = max(worst, np.int32(np.float32(off).view(np.int32) & np.int32(0x7FFFFFFF)))
    return np.int32(worst).view(np.float32)


@loop("rf4[2]", "rf4[2]", "int", "f4[3]", "f4[1]")
def sums(expected: Any, found: Any, height: int, totals: Any, worst: Any) -> bool:
    """Of [n, K] the sums of each column over `height` rows, `totals` [4, n / height, K]: squares of the
    expected and of the found, their product, and squares of the difference; `worst` [1] is filled with
    the largest difference. Declines a column alone, which numpy adds in another order; whether all sums
    are finite, and so all weights, the caller sees in `totals`."""
    rows, columns = expected.shape
    if columns < 2:
        return False
    worst[0] = np.float32(0)
    totals[:] = np.float32(-0.0)  # whatever is added to it stays as it is
    for first in range(0, columns, _COLUMNS):
        last = min(columns, first + _COLUMNS)
        for row in range(rows):
            group = row // height
            off = _row(
                expected[row, first:last], found[row, first:last], totals[0, group, first:last],
                totals[1, group, first:last], totals[2, group, first:last],
                totals[3, group, first:last],
            )  # fmt: skip
            worst[0] = off if off > worst[0] else worst[0]
    return True
