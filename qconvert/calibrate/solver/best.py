"""The refinements one after the other, none of which makes a row worse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.calibrate.settings import Settings
from qconvert.calibrate.solver.descent import descended
from qconvert.calibrate.solver.gptq import gptq
from qconvert.calibrate.solver.order import curvature
from qconvert.calibrate.solver.problem import Curvature, Grid, Rounding, rounding
from qconvert.calibrate.solver.product import product
from qconvert.calibrate.solver.refit import normal_room, refitted
from qconvert.calibrate.solver.scales import nearest, searched
from qconvert.core.int_scheme import IntScheme, Signs

if TYPE_CHECKING:
    import torch

_ROWS = 1024  # worked on together: what a CPU needs at a time is then the same for any matrix
_NARROWEST = 16  # columns of a group, where memory is counted
_NUMBERS = 1 << 28  # of an accelerator's rows that are worked on together, where that is more


def best(
    weight: torch.Tensor,
    hessians: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    scheme: IntScheme,
    settings: Settings,
    *,
    ordered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes int8 [B, N, K] of matrices [B, N, K], scales [B, N, G] in the scheme's dtype, and which
    Hessians float32 [B, K, K], which are overwritten, could not be factorized: those matrices are
    rounded to nearest.

    `scale` and `zero` [B, N, G] are an observer's; asymmetric schemes keep both, because a scale that
    is searched for alone moves the zero point. `ordered`: columns are in the order to solve them in.
    """
    import torch

    by_importance = settings.order == "importance" and not ordered
    found = curvature(hessians, settings.dampening_frac, by_importance=by_importance)
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    kept = torch.empty_like(scale)
    for start, stop in row_parts(weight):
        part = slice(start, stop)
        mine = weight[:, part].float().transpose(1, 2).contiguous()
        theirs = zero[:, part].transpose(1, 2)
        grid = Grid.of(scheme, weight.shape[2], theirs, scale.dtype, settings.signs)
        made = _rows(mine, scale[:, part].float().transpose(1, 2), grid, found, scheme, settings)
        wide = theirs.repeat_interleave(grid.width, 1) if not scheme.symmetric else 0
        codes[:, part] = (made.steps + wide).to(torch.int8).transpose(1, 2)
        kept[:, part] = made.scale.transpose(1, 2).to(scale.dtype)
    return codes, kept, found.failed


def row_parts(weight: torch.Tensor) -> list[tuple[int, int]]:
    """Rows [start, stop) of weights [B, N, K] that are solved together. Rows do not depend on one
    another, so this decides about memory alone."""
    batch, rows, columns = weight.shape
    step = _step(batch, columns, on_cpu=not weight.is_cuda)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _step(batch: int, columns: int, *, on_cpu: bool) -> int:
    return _ROWS if on_cpu else max(_ROWS, _NUMBERS // (batch * columns))


def best_bytes(batch: int, rows: int, columns: int, device: str) -> int:
    """Return what `best` takes beside the matrices [B, N, K] and Hessians that it is given: those
    Hessians' factors, and one of them turned around; some rows in float32, twelve times at the most
    (refits: the weight, what is left of it, steps before and after, their errors and gradients); normal
    equations of scales; codes, and what they mean."""
    on_cpu = device == "cpu"
    some = batch * min(rows, _step(batch, columns, on_cpu=on_cpu))
    normal = min(normal_room(on_cpu=on_cpu), some * max(columns, (columns // _NARROWEST) ** 2))
    # All at once there, as they are, in order, inverted and turned around.
    hessians = ((2 if on_cpu else 4) * batch + 5) * columns * columns
    return 4 * (hessians + 12 * some * columns + 2 * normal) + 13 * batch * rows * columns


def _rows(
    weight: torch.Tensor,
    scale: torch.Tensor,
    grid: Grid,
    found: Curvature,
    scheme: IntScheme,
    settings: Settings,
) -> Rounding:
    """Some rows [B, K, N] of matrices, with their observer's scales [B, G, N]."""

    hessian, block = found.hessian, settings.block_size

    def solved(with_scale: torch.Tensor) -> Rounding:
        steps = gptq(weight, with_scale, grid, found, block)
        return rounding(weight, steps, with_scale, hessian)

    refits = settings.refit if scheme.symmetric else 0
    if scheme.symmetric and settings.scales == "search":
        scale = searched(weight, scale, found.inverse.reciprocal(), grid)
    now = rounding(weight, nearest(weight, scale, grid), scale, hessian).better(solved(scale))
    pull = product(hessian, weight) if refits else weight
    for _ in range(refits):
        now = refitted(weight, pull, now, hessian, grid)
        now = now.better(solved(now.scale))
    if settings.descent:
        now = descended(weight, now, hessian, grid, settings.descent, block)
        if refits:
            now = refitted(weight, pull, now, hessian, grid)
    return now


def least_squares(
    weight: torch.Tensor, scale: torch.Tensor, scheme: IntScheme, signs: Signs
) -> torch.Tensor:
    """Scales [N, G] in their dtype with which a matrix [N, K] of a symmetric scheme is best rounded to
    nearest, all columns alike; `scale` is an observer's."""
    import torch

    kept = torch.empty_like(scale)
    alike = torch.ones((1, weight.shape[1]), device=weight.device)
    for start, stop in row_parts(weight[None]):
        part = slice(start, stop)
        first = scale[part].float().t()[None]
        grid = Grid.of(scheme, weight.shape[1], torch.zeros_like(first), scale.dtype, signs)
        found = searched(weight[part].float().t()[None].contiguous(), first, alike, grid)
        kept[part] = found[0].t().to(scale.dtype)
    return kept
