"""Scales searched for: parts of the range that lose the least when codes are rounded to nearest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.calibrate.kernels.choice import fused
from qconvert.calibrate.solver.problem import Grid, in_groups, spread

if TYPE_CHECKING:
    import torch

# Parts of amax / (half the range) that are tried, 1.05 to 0.1.
CLIPS = tuple(round(1.05 - 0.025 * number, 4) for number in range(39))
_AT_ONCE = 1 << 18  # numbers that a CPU's caches hold


def searched(
    weight: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor, grid: Grid
) -> torch.Tensor:
    """For each group of float32 [B, K, N] the scale with the least squared error, columns weighted by
    `weights` [B, K], among `scale` [B, G, N] and CLIPS, of both signs where the grid takes them.
    Weighted by 1 / [H^-1]_ii, the error that cannot be made up for in other columns, scales follow what
    the inputs need, not the largest weight: with outlier channels a third of the loss."""
    import torch

    kernels = fused(weight, grid.width)
    if kernels is not None and grid.low.numel() == 1:
        signs = (1.0, -1.0) if grid.signed else (1.0,)
        ladder = torch.tensor([sign * clip for sign in signs for clip in CLIPS])
        half = float((grid.high - grid.low) / 2)
        best: torch.Tensor = kernels.search(
            weight, scale, weights, grid, ladder.to(weight.device), half
        )
        return best
    rows = weight.shape[2]
    step = rows if weight.is_cuda else max(1, _AT_ONCE // (weight.shape[0] * weight.shape[1]))
    found = torch.empty_like(scale)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        found[..., part] = _searched(
            weight[..., part], scale[..., part], weights, grid.cut(start, start + step)
        )
    return found


def _searched(
    weight: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor, grid: Grid
) -> torch.Tensor:
    import torch

    cut = in_groups(weight, grid.width).contiguous()
    share = weights.reshape(weights.shape[0], -1, grid.width, 1)
    low, high = grid.low.unsqueeze(2), grid.high.unsqueeze(2)
    half = (grid.high - grid.low) / 2  # 7.5, and 7 for -7 to 7
    largest = cut.abs().amax(2) / half

    def error(tried: torch.Tensor) -> torch.Tensor:
        wide = tried.unsqueeze(2)
        off = (cut / wide).round_().clamp_(low, high).mul_(wide).sub_(cut)
        return off.square_().mul_(share).sum(2)

    best, least = scale, error(scale)
    for sign in (1, -1) if grid.signed else (1,):
        for clip in CLIPS:
            tried = grid.stored(largest * (sign * clip), scale)
            lost = error(tried)
            wins = lost < least
            best, least = torch.where(wins, tried, best), torch.where(wins, lost, least)
    return best


def nearest(weight: torch.Tensor, scale: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Steps [B, K, N] of a weight rounded to nearest."""
    cut = in_groups(weight, grid.width)
    low, high = grid.low.unsqueeze(2), grid.high.unsqueeze(2)
    return (cut / spread(scale, grid.width)).round_().clamp_(low, high).flatten(1, 2)
