"""Scales by least squares: the ones that fit codes as they are best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.calibrate.kernels.choice import fused
from qconvert.calibrate.solver.problem import Grid, Rounding, in_groups, rounding
from qconvert.calibrate.solver.product import product_with_codes

if TYPE_CHECKING:
    import torch

_AT_ONCE = 1 << 24  # numbers of rows' normal equations on a CPU
_AT_ONCE_THERE = 1 << 28  # and on an accelerator
_MOST = 4.0  # times the scale before: a fit that wants more is of codes that say little


def refitted(
    weight: torch.Tensor, pull: torch.Tensor, now: Rounding, hessian: torch.Tensor, grid: Grid
) -> Rounding:
    """The same codes with scales that minimize each row's loss over all its groups together, rounded to
    the scale's dtype. Rows that this does not help keep theirs. `pull` is the Hessian times weights."""
    import torch

    batch, columns, rows = weight.shape
    groups = columns // grid.width
    goal = in_groups(pull * now.steps, grid.width).sum(2)
    room = normal_room(on_cpu=not weight.is_cuda)
    step = max(1, room // (batch * max(groups * groups, columns)))
    scale = torch.empty_like(now.scale)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        scale[..., part] = _fit(
            now.steps[..., part], now.scale[..., part], goal[..., part], hessian, grid
        )
    return now.better(rounding(weight, now.steps, scale, hessian))


def normal_room(*, on_cpu: bool) -> int:
    """Numbers of normal equations that are in memory at a time."""
    return _AT_ONCE if on_cpu else _AT_ONCE_THERE


def _normal(steps: torch.Tensor, hessian: torch.Tensor, grid: Grid) -> torch.Tensor:
    """For each row A = [c_a H_ab c_b] of its groups a and b, float32 [B, N, G, G]; the upper half may
    hold anything."""
    batch, columns, rows = steps.shape
    groups = columns // grid.width
    kernels = fused(steps, grid.width)
    if kernels is not None and kernels.can_multiply(grid.width):
        found: torch.Tensor = kernels.normal(steps, hessian, grid.width)
        return found
    normal = steps.new_empty(batch, rows, groups, groups)
    for group in range(groups):
        own = slice(group * grid.width, (group + 1) * grid.width)
        seen = product_with_codes(hessian[:, :, own], steps[:, own]).mul_(steps)
        normal[..., group] = in_groups(seen, grid.width).sum(2).transpose(1, 2)
    return normal


def _fit(
    steps: torch.Tensor, scale: torch.Tensor, goal: torch.Tensor, hessian: torch.Tensor, grid: Grid
) -> torch.Tensor:
    """Minimize s A s - 2 s goal over the scales s of a row, A = [c_a H_ab c_b] of its groups' codes."""
    import torch

    normal = _normal(steps, hessian, grid)
    diagonal = normal.diagonal(dim1=2, dim2=3)
    diagonal.add_(1e-6 * diagonal.mean(-1, keepdim=True) + 1e-12)
    lower, info = torch.linalg.cholesky_ex(normal)
    asked = goal.transpose(1, 2).unsqueeze(-1)
    fit = torch.cholesky_solve(asked, lower).squeeze(-1).transpose(1, 2)
    # A fit of the other sign is of codes that say little, too.
    part = fit / scale
    good = (info == 0).unsqueeze(1) & (part > 0) & (part < _MOST)
    return grid.stored(torch.where(good, fit, scale), scale)
