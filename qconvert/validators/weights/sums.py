"""Sums over a matrix, one part at a time, that measure how far it is from the source's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan, sqrt
from typing import TYPE_CHECKING

from qconvert.validation.compiled import LOOPS, done
from qconvert.validation.findings import Measure

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass
class Sums:
    """Squares of the source's weights, of the folder's and of their difference, their product, the
    largest difference, and how many there are."""

    source: float = 0.0
    found: float = 0.0
    product: float = 0.0
    difference: float = 0.0
    worst: float = 0.0
    count: int = 0

    def add(self, expected: Floats, found: Floats) -> None:
        """Two parts of equal shape, float32 [n, K]."""
        if not self.added(expected, found):
            self._add(expected, found)

    def added(self, expected: Floats, found: Floats) -> bool:
        """Tell whether a compiled loop has added two parts; it declines what is not finite."""
        import numpy as np

        if LOOPS.in_use() is None:
            return False
        totals = np.empty((4, -(-expected.shape[0] // _ROWS), expected.shape[1]), np.float32)
        worst = np.empty(1, np.float32)
        if not done("sums", expected, found, _ROWS, totals, worst):
            return False
        with np.errstate(all="ignore"):
            made = [_total(part) for part in totals]
        if not all(map(isfinite, made)):
            return False
        self._count(made, float(worst[0]), expected.size)
        return True

    def _add(self, expected: Floats, found: Floats) -> None:
        import numpy as np

        with np.errstate(all="ignore"):
            off = found - expected
            pairs = (expected, expected), (found, found), (expected, found), (off, off)
            worst = max(0.0, float(off.max(initial=0)), -float(off.min(initial=0)))
            self._count([_products(one, other) for one, other in pairs], worst, expected.size)

    def _count(self, made: Sequence[float], worst: float, size: int) -> None:
        self.source += made[0]
        self.found += made[1]
        self.product += made[2]
        self.difference += made[3]
        self.worst = max(self.worst, worst)
        self.count += size

    def measure(
        self,
        tensor: str,
        role: str,
        layer: int | None,
        expert: int | None,
        form: str,
        *,
        calibrated: bool = False,
    ) -> Measure:
        if self.difference == 0:
            rms = 0.0
        else:
            rms = sqrt(self.difference / self.source) if self.source else inf
        sizes = sqrt(self.source) * sqrt(self.found)
        cosine = self.product / sizes if sizes else nan
        figures = self.count, rms, self.worst, cosine
        return Measure(tensor, role, layer, expert, form, *figures, calibrated=calibrated)


# Rows whose products are added in float32, each column by itself and in their order: so a sum of 32 is
# off by 2^-19 of it at most, whichever loop adds. The columns' sums are added in float64.
_ROWS = 32


def _products(left: Floats, right: Floats) -> float:
    import numpy as np

    made = left * right
    rows, columns = made.shape
    whole = rows - rows % _ROWS
    totals = np.empty((-(-rows // _ROWS), columns), np.float32)
    made[:whole].reshape(-1, _ROWS, columns).sum(axis=1, out=totals[: whole // _ROWS])
    if whole < rows:
        made[whole:].sum(axis=0, out=totals[-1])
    total = _total(totals)
    if isfinite(total):
        return total
    # Squares of more than 1e19: a sound float32 all the same.
    return float(np.einsum("ij,ij->", left, right, dtype=np.float64))


def _total(totals: Floats) -> float:
    import numpy as np

    return float(totals.sum(dtype=np.float64))
