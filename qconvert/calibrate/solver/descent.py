"""Coordinate descent: codes changed one column at a time, each to the best one while the others stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.calibrate.kernels.choice import fused
from qconvert.calibrate.solver.problem import Grid, Rounding, meant, rounding
from qconvert.calibrate.solver.product import add_product, product

if TYPE_CHECKING:
    import torch


def descended(
    weight: torch.Tensor, now: Rounding, hessian: torch.Tensor, grid: Grid, sweeps: int, block: int
) -> Rounding:
    """Some sweeps over all columns. A column's gradient needs what changed before it: within `block`
    columns that is brought up to date at once, for the rest in one product a block."""
    import torch

    columns = weight.shape[1]
    steps = now.steps.clone()
    slope = product(hessian, meant(steps, now.scale).sub_(weight))
    kernels = fused(weight, block)
    for _ in range(sweeps):
        for start in range(0, columns, block):
            stop = min(start + block, columns)
            if kernels is not None:
                moved = kernels.descent_block(slope, hessian, now.scale, grid, steps, start, stop)
                add_product(slope, hessian[:, :, start:stop], moved)
                continue
            own = hessian[:, start:stop, start:stop]
            near = slope[:, start:stop].clone()
            moved = torch.empty_like(near)
            for at in range(start, stop):
                i, group = at - start, at // grid.width
                step, old = now.scale[:, group], steps[:, at]
                low = grid.low[:, group if grid.low.shape[1] > 1 else 0]
                high = grid.high[:, group if grid.high.shape[1] > 1 else 0]
                wanted = old - near[:, i] / (own[:, i, i, None] * step)
                new = torch.clamp(torch.round(wanted), low, high)
                change = (new - old) * step
                steps[:, at] = new
                moved[:, i] = change
                near[:, i + 1 :].addcmul_(own[:, i, i + 1 :, None], change.unsqueeze(1))
            add_product(slope, hessian[:, :, start:stop], moved)
    return now.better(rounding(weight, steps, now.scale, hessian))
