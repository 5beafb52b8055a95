"""Sums over a matrix, one part at a time, that measure how far it is from the source's.

Not a validator itself: it has no `VALIDATOR`, so discovery skips it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan, sqrt
from typing import TYPE_CHECKING

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
        """Two parts of equal shape, float32."""
        import numpy as np

        with np.errstate(all="ignore"):
            off = found - expected
            # einsum goes row by row in float32; the rows' sums are added in float64.
            self.source += _squares(expected, expected)
            self.found += _squares(found, found)
            self.product += _squares(expected, found)
            self.difference += _squares(off, off)
            self.worst = max(self.worst, float(off.max(initial=0)), -float(off.min(initial=0)))
        self.count += expected.size

    def measure(
        self, tensor: str, role: str, layer: int | None, expert: int | None, form: str
    ) -> Measure:
        """The resulting measure."""
        if self.difference == 0:
            rms = 0.0
        else:
            rms = sqrt(self.difference / self.source) if self.source else inf
        sizes = sqrt(self.source) * sqrt(self.found)
        cosine = self.product / sizes if sizes else nan
        return Measure(tensor, role, layer, expert, form, self.count, rms, self.worst, cosine)


def _squares(left: Floats, right: Floats) -> float:
    import numpy as np

    rows = np.einsum("ij,ij->i", left, right)
    if not np.isfinite(rows).all():  # squares of more than 1e19: a sound float32 all the same
        rows = np.einsum("ij,ij->i", left, right, dtype=np.float64)
    return float(rows.sum(dtype=np.float64))
