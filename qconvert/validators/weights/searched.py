"""Matrices whose scales were searched for: a weight beyond the last code of its scale is at that code,
any other within half a step, and no group is further from the source than under the scale of its largest
weight, which the search tries too. Not a validator itself: it has no `VALIDATOR`, so discovery skips it.

What that scale is comes from the formats' definitions: compressed-tensors (`calculate_qparams`,
see weights/int_bounds.py), and for NVFP4 largest / 6 in E4M3 (see formats/nvfp4.py).
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
from qconvert.validators.weights.int_bounds import EPS, Kept, Tile, code_range

if TYPE_CHECKING:
    from qconvert.core.arrays import Bools, Float64s
    from qconvert.validators.reading.decode import Floats


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
        codes = np.clip(np.rint(weights / plain + middle), low, high) - middle
        allowed = _error(weights, codes * plain)
        wrong = (_error(weights, mine) > allowed * _WORSE) & (size > np.float32(_LEAST))
    return fits, _first(wrong, _error(weights, mine), allowed)


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
        tried = [
            _error(
                weights, _nearest_fp4(weights, table[np.clip(at - below, 0, table.size - 1)] * unit)
            )
            for below in (0, 1)
        ]
        allowed = np.maximum(*tried)
        # A scale below E4M3's numbers is another in either dialect.
        wrong = (_error(weights, mine) > allowed * _WORSE) & (needed >= _LEAST_E4M3)
    return fits, _first(wrong, _error(weights, mine), allowed)


def _nearest_fp4(weights: Floats, factor: Float64s) -> Float64s:
    """Blocks [n, blocks, 16] as the nearest codes of E2M1 times a factor each."""
    import numpy as np

    each = factor[:, :, None]
    size = np.abs(weights) / each
    step = np.where(size < 2, 0.5, np.where(size < 4, 1.0, 2.0))
    found: Float64s = np.sign(weights) * np.minimum(np.rint(size / step) * step, 6) * each
    return found


def _error(weights: Floats, found: Any) -> Float64s:
    """Squared errors of groups [n, groups, G]."""
    import numpy as np

    off = weights.astype(np.float64) - found
    made: Float64s = np.einsum("ijk,ijk->ij", off, off)
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
            "expected a scale that loses no more than that of the largest weight there, a squared error "
            f"of {allowed[row, group]:.4g}, found {found[row, group]:.4g}"
        ),
    )
