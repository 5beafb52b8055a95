"""Matrices whose scales were searched for: a weight beyond the last code of its scale is at that code,
any other within half a step, and no group is further from the source than under the scale of its largest
weight, which the search tries too. An error is |e|^2 + a (e . w)^2 / |w|^2 of a group of G weights w,
a = G / 16, or 1024 for more than 256 (formats/int_packed/search.py).

What that scale is comes from the formats' definitions: compressed-tensors (`calculate_qparams`,
see weights/int_bounds.py), and for NVFP4 largest / 6 in E4M3 (see formats/nvfp4.py).

NVFP4 whose codes and block scales a calibration found.

What a weight loses is made up for by those after it, and a block's scale is the one that its codes need
then, so neither is the nearest. What is kept: the direction of rows, of blocks of columns over all rows,
and each block's length, because its codes are of the size that its scale asks for. A single block of 16
weights says little; many that are too long or too short are under scales of other blocks.

Figures of sound matrices are of heavy-tailed ones with input channels up to a factor of 16 apart, 16 to
3000 tokens, after 2 sweeps, and after 8 with a tenth of the usual damping; the same under the scales
of the block beside, or of the row above, in brackets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qconvert.validation.workers import Folders
from qconvert.validators.formats.nvfp4 import BLOCK
from qconvert.validators.reading.decode import as_bf16, fp8_table, rounded
from qconvert.validators.reading.rows import group_of, scales, zero_points
from qconvert.validators.weights.compare import Compare, wrong_weights
from qconvert.validators.weights.int_bounds import (
    EPS,
    LENGTHS,
    Kept,
    Tile,
    code_range,
    lengths_off,
    lost_row,
)

if TYPE_CHECKING:
    from qconvert.core.arrays import Bools, Float64s
    from qconvert.validators.reading.decode import Floats

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


_SLACK = 2.0**-12  # in steps: a product with the inverse of a step, and back
# Of a group's error: sums in float32, which the search compares.
_WORSE = 1 + 2.0**-7
# Below, scales are denormal, and the search leaves groups as they were rounded.
_LEAST = 2.0**-98
_LEAST_E4M3 = 2.0**-9


def is_searched(manifest: Mapping[str, Any], step: str) -> bool:
    """Tell whether a pass of the folder's conversion says that it searched for scales."""
    return any(
        found.get("name") == step and found["options"].get("scales") == "search"
        for found in manifest.get("passes", ())
    )


_NEAREST = "the code nearest to the source's {}"


@dataclass(frozen=True, slots=True)
class CompareSearched(Compare):
    """One matrix against the source's, under scales that were searched for."""

    def _misfit(
        self, folders: Folders, tile: tuple[int, int], expected: Floats, found: Floats, kept: Kept
    ) -> str:
        grid = self.mine.form.grid
        if grid is not None and grid.global_scale is not None:
            factor = scales(folders.output, self.mine, *tile)
            unit = grid.global_scale.unit(folders.output)
            fits, why = nvfp4_fits(expected, found, factor, unit)
        else:
            step = scales(folders.output, self.mine, *tile)
            zero = zero_points(folders.output, self.mine, *tile)
            groups = group_of(folders.output, self.mine.form)
            fits, why = ints_fit(Tile(self.mine.form, expected, found, step, zero, groups))
        if fits.all():
            return _at(why, tile[0])
        return wrong_weights(fits, tile[0], expected, found, _NEAREST)

    def _kind(self) -> str:
        return (
            f" ({self.yours.format} of the source as {self.mine.format}, nearest under scales that "
            "were searched for)"
        )


def _at(why: tuple[int, int, str] | None, first: int) -> str:
    return "" if why is None else f"row {first + why[0]}, group {why[1]}: {why[2]}"


def ints_fit(tile: Tile) -> tuple[Bools, tuple[int, int, str] | None]:
    """Return which weights are the nearest codes of their scales (the tile's `step`, with its sign), and
    the first group whose scale loses more than that of its largest weight: row, group and how much."""
    import numpy as np

    steps, symmetric, dtype = code_range(tile.form)
    low, high = -(steps + 1) // 2, steps // 2
    expected = as_bf16(np.ascontiguousarray(tile.expected))
    step, zero = tile.over(tile.step), tile.over(tile.zero)
    with np.errstate(all="ignore"):
        first, last = (low - zero) * step, (high - zero) * step
        held = np.clip(expected, np.minimum(first, last), np.maximum(first, last))
        fits: Bools = np.abs(held - tile.found) <= np.float32(0.5 + _SLACK) * np.abs(step)
        weights, mine = tile.cut(expected), tile.cut(tile.found)
        if weights is None or mine is None:
            return fits, (0, 0, "its groups of columns differ in size")
        most = np.maximum(weights.max(axis=2), 0)
        least = np.minimum(weights.min(axis=2), 0)
        size = np.maximum(most, -least) if symmetric else most - least
        size = as_bf16(size) if dtype == "BF16" else size
        plain = rounded(size / np.float32(steps / 2 if symmetric else steps), dtype)
        middle = np.zeros_like(plain)
        if not symmetric:
            below = as_bf16(least / plain) if dtype == "BF16" else least / plain
            below = as_bf16(low - below) if dtype == "BF16" else low - below
            middle = np.rint(np.clip(below, low, high))
        plain = np.where(plain > 0, plain, np.float32(EPS[dtype]))[:, :, None]
        middle = middle[:, :, None]
        # Products with the inverse, as the search has them: an error along the weights says which side
        # of a tie a code is on.
        codes = np.clip(np.rint(weights * (np.float32(1) / plain)), low - middle, high - middle)
        allowed, lost = _lost(weights, codes * plain), _lost(weights, mine)
        wrong = (lost > allowed * _WORSE) & (size > np.float32(_LEAST))
    return fits, _first(wrong, lost, allowed)


def nvfp4_fits(
    expected: Floats, found: Floats, factor: Floats, unit: float
) -> tuple[Bools, tuple[int, int, str] | None]:
    """The same of NVFP4: `factor` [n, K / 16] are block scales times the global one, `unit` is the
    global one. Largest / 6 may be rounded to the next E4M3 number on either side."""
    import numpy as np

    table = np.sort(fp8_table("F8_E4M3")[1:0x7F]).astype(np.float64)
    with np.errstate(all="ignore"):
        step = np.repeat(factor.astype(np.float64), BLOCK, axis=1)
        held = np.clip(expected, -6 * step, 6 * step)
        size = np.abs(held) / step
        half = np.where(size < 2, 0.25, np.where(size < 4, 0.5, 1.0)) + _SLACK
        fits: Bools = np.abs(held - found) <= half * step
        weights, mine = (v.reshape(*factor.shape, BLOCK) for v in (expected, found))
        largest = np.abs(weights).max(axis=2).astype(np.float64)
        needed = largest / 6 / unit
        at = np.searchsorted(table, needed)
        # On both sides of ties: an error along the weights says which one a code is on.
        tried = [
            _lost(weights, _nearest_fp4(weights, plain * unit * side))
            for plain in (table[np.clip(at - below, 0, table.size - 1)] for below in (0, 1))
            for side in (1 - 2.0**-18, 1 + 2.0**-18)
        ]
        allowed, lost = np.max(tried, axis=0), _lost(weights, mine)
        # A scale below E4M3's numbers is another in either dialect.
        wrong = (lost > allowed * _WORSE) & (needed >= _LEAST_E4M3)
    return fits, _first(wrong, lost, allowed)


def _nearest_fp4(weights: Floats, factor: Float64s) -> Float64s:
    """Blocks [n, blocks, 16] as the nearest codes of E2M1 times a factor each."""
    import numpy as np

    each = factor[:, :, None]
    size = np.abs(weights) / each
    step = np.where(size < 2, 0.5, np.where(size < 4, 1.0, 2.0))
    found: Float64s = np.sign(weights) * np.minimum(np.rint(size / step) * step, 6) * each
    return found


def _lost(weights: Floats, found: Any) -> Float64s:
    """Errors of groups [n, groups, G]."""
    import numpy as np

    exact = weights.astype(np.float64)
    off = exact - found
    squares, along, own = (
        np.einsum("ijk,ijk->ij", a, b) for a, b in ((off, off), (off, exact), (exact, exact))
    )
    more = exact.shape[2] / 16 if exact.shape[2] <= 256 else 1024
    made: Float64s = squares + more * np.square(along) / np.where(own > 0, own, 1)
    return made


def _first(wrong: Bools, found: Float64s, allowed: Float64s) -> tuple[int, int, str] | None:
    import numpy as np

    if not wrong.any():
        return None
    row, group = divmod(int(np.argmax(wrong)), wrong.shape[1])
    return (
        row,
        group,
        (
            "expected a scale that loses no more than that of the largest weight there, an error "
            f"of {allowed[row, group]:.4g}, found {found[row, group]:.4g}"
        ),
    )
