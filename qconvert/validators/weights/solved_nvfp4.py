"""NVFP4 whose codes and block scales a calibration found. Not a validator itself: it has no `VALIDATOR`,
so discovery skips it.

What a weight loses is made up for by those after it, and a block's scale is the one that its codes need
then, so neither is the nearest. What is kept: the direction of rows, of blocks of columns over all rows,
and each block's length, because its codes are of the size that its scale asks for. A single block of 16
weights says little; many that are too long or too short are under scales of other blocks.

Figures of sound matrices are of heavy-tailed ones with input channels up to a factor of 16 apart, 16 to
3000 tokens, after 2 sweeps, and after 8 with a tenth of the usual damping; the same under the scales
of the block beside, or of the row above, in brackets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.validation.workers import Folders
from qconvert.validators.formats.nvfp4 import BLOCK
from qconvert.validators.reading.rows import scales
from qconvert.validators.weights.compare import Compare
from qconvert.validators.weights.int_bounds import LENGTHS, Kept, Tile, lengths_off, lost_row

if TYPE_CHECKING:
    from qconvert.validators.reading.decode import Floats


_LEAST_E4M3 = 2.0**-9
# A scale, as a part of its block's largest weight / 6: 0.23 to 5.4.
_PARTS = 1 / 32, 8.5
# What a block that keeps its direction must be multiplied with to be as long as the source's: 0.27 to
# 2.4; and the least cosine of any, 0.06.
_LENGTHS, _SAME, _OTHER = (0.18, 3.5), 0.6, -0.3
# The cosine of a row, as a part of what it is were each block as long as the source's: 0.95 (0.6).
_ROW = 0.75
# The middle one of blocks' lengths is off by 0.12 at most, as a logarithm (0.4; gaussian weights 0.2).
_USUAL = 0.16


@dataclass(frozen=True, slots=True)
class CompareSolvedNvfp4(Compare):
    """One matrix against the source's, under codes and scales that a calibration found."""

    def _begin(self, folders: Folders) -> Kept:
        grid = self.mine.form.grid
        assert grid is not None
        assert grid.global_scale is not None
        return KeptNvfp4(grid.global_scale.unit(folders.output))

    def _misfit(
        self, folders: Folders, tile: tuple[int, int], expected: Floats, found: Floats, kept: Kept
    ) -> str:
        import numpy as np

        factor = scales(folders.output, self.mine, *tile)
        zero = np.zeros_like(factor)
        return kept.add(Tile(self.mine.form, expected, found, factor, zero, None), tile[0])


class KeptNvfp4(Kept):
    """Share of the source's weights that calibrated codes keep, one tile after another; steps are block
    scales times the global one, which is `unit`."""

    def __init__(self, unit: float) -> None:
        super().__init__(searched=True)
        self._unit = unit
        self._judged = self._off = 0

    def add(self, tile: Tile, first: int) -> str:
        import numpy as np

        expected, found, factor = tile.expected, tile.found, tile.step
        with np.errstate(all="ignore"):
            wrong = self._scales(expected, found, factor, self._unit)
            best = _nearest(expected, factor)
        if wrong is not None:
            return f"row {first + wrong[0]}, {wrong[1]}"
        self.count(expected, found, best, factor.shape[1])
        at = lost_row(expected, found, best)
        return "" if at is None else f"row {first + at[0]}: {at[1]}"

    def _scales(
        self, expected: Floats, found: Floats, factor: Floats, unit: float
    ) -> tuple[int, str] | None:
        """The first row under scales that are not its own, and which."""
        import numpy as np

        weights, mine = (v.reshape(*factor.shape, BLOCK) for v in (expected, found))
        plain = np.abs(weights).max(axis=2).astype(np.float64) / 6
        part = factor / plain
        # Below E4M3's numbers a scale follows nothing.
        seen = plain >= _LEAST_E4M3 * unit
        along, across, own = (
            np.einsum("ijk,ijk->ij", a, b, dtype=np.float64)
            for a, b in ((weights, mine), (mine, mine), (weights, weights))
        )
        cosine, length = along / np.sqrt(across * own), along / across
        far = ~((part >= _PARTS[0]) & (part <= _PARTS[1]))
        same = cosine >= _SAME
        far |= same & ~((length >= _LENGTHS[0]) & (length <= _LENGTHS[1])) | (cosine < _OTHER)
        far &= seen
        if far.any():
            row, block = divmod(int(np.argmax(far)), far.shape[1])
            return row, (
                f"columns from {BLOCK * block}: expected a scale near {plain[row, block] / unit:.4g} "
                f"for the source's weights there, found {factor[row, block] / unit:.4g}"
            )
        same &= seen
        self._judged += int(np.count_nonzero(same))
        self._off += int(np.count_nonzero(same & (np.abs(np.log(length)) > _USUAL)))
        whole = seen.any(axis=1)
        along, across = along * whole[:, None], across * whole[:, None]
        row_at = lengths_off(along.sum(axis=1), across.sum(axis=1))
        if row_at is not None:
            return row_at, LENGTHS
        fitted = np.where(across > 0, np.square(np.maximum(along, 0)) / across, 0).sum(axis=1)
        kept = along.sum(axis=1) / np.sqrt(across.sum(axis=1) * fitted)
        short = ~(kept >= _ROW) & whole & (fitted > 0)
        if not short.any():
            return None
        row = int(np.argmax(short))
        return row, (
            f"expected the scales of its blocks, with a cosine of at least {_ROW} of what blocks of the "
            f"right length would have, found {kept[row]:.3g}"
        )

    def end(self) -> str:
        """Fault over all rows seen."""
        if 2 * self._off > self._judged:
            return (
                f"expected blocks about as long as the source's, found {self._off} of {self._judged} "
                f"off by more than {_USUAL:.0%}: scales of other blocks"
            )
        return super().end()


def _nearest(weights: Floats, factor: Floats) -> Floats:
    """Weights [n, K] as the nearest codes of E2M1 under their blocks' factors."""
    import numpy as np

    each = np.repeat(factor, BLOCK, axis=1)
    size = np.abs(weights) / each
    step = np.where(size < 2, np.float32(0.5), np.where(size < 4, np.float32(1), np.float32(2)))
    found: Floats = np.sign(weights) * np.minimum(np.rint(size / step) * step, 6) * each
    return found
