"""GPTQ's loop over columns: each is rounded, and what that loses is taken back in those that follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.calibrate.kernels.choice import fused
from qconvert.calibrate.solver.problem import Curvature, Grid
from qconvert.calibrate.solver.product import add_product

if TYPE_CHECKING:
    import torch


def gptq(
    weight: torch.Tensor, scale: torch.Tensor, grid: Grid, found: Curvature, block: int
) -> torch.Tensor:
    """Steps [B, K, N] of float32 weights [B, K, N] under fixed scales [B, G, N]. `block` columns are
    solved before their error goes on to the rest, in one product. Source: Frantar et al., GPTQ,
    algorithm 1 (arXiv 2210.17323)."""
    import torch

    batch, columns, rows = weight.shape
    order, factor = found.order, found.factor
    left = torch.gather(weight, 1, order.unsqueeze(-1).expand_as(weight))
    groups = torch.div(order, grid.width, rounding_mode="floor")
    each = torch.arange(batch, device=weight.device)
    made = torch.empty_like(left)
    kernels = fused(weight, block)
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        if kernels is not None:
            lost = kernels.gptq_block(left, factor, groups, scale, grid, made, start, stop)
        else:
            lost = left.new_empty(batch, stop - start, rows)
        for at in range(start, stop) if kernels is None else ():
            group = groups[:, at]
            step, value = scale[each, group], left[:, at]
            low = grid.low if grid.low.shape[1] == 1 else grid.low[each, group]
            high = grid.high if grid.high.shape[1] == 1 else grid.high[each, group]
            code = torch.clamp(torch.round(value / step), _flat(low), _flat(high))
            made[:, at] = code
            error = (value - code * step) / factor[:, at, at, None]
            lost[:, at - start] = error
            left[:, at + 1 : stop].addcmul_(
                factor[:, at, at + 1 : stop, None], error.unsqueeze(1), value=-1
            )
        add_product(left[:, stop:], factor[:, start:stop, stop:].transpose(1, 2), lost, sign=-1)
    steps = torch.empty_like(made)
    return steps.scatter_(1, order.unsqueeze(-1).expand_as(made), made)


def _flat(bound: torch.Tensor) -> torch.Tensor:
    """A bound of one number, or [B, N], against columns [B, N]."""
    return bound.flatten(0, 1) if bound.dim() == 3 else bound
