"""The refinements one after the other, none of which makes a row worse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.calibrate.kernel_choice import add_product, fused, product, product_with_codes
from qconvert.calibrate.settings import Settings
from qconvert.calibrate.solver.curvature import (
    Curvature,
    Grid,
    Rounding,
    curvature,
    in_groups,
    meant,
    rounding,
    spread,
)
from qconvert.core.int_scheme import IntScheme, Signs

if TYPE_CHECKING:
    import torch


# Scales searched for: parts of the range that lose the least when codes are rounded to nearest.


# Parts of amax / (half the range) that are tried, 1.05 to 0.1.
CLIPS = tuple(round(1.05 - 0.025 * number, 4) for number in range(39))
_SEARCHED_AT_ONCE = 1 << 18  # numbers that a CPU's caches hold


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
    step = (
        rows if weight.is_cuda else max(1, _SEARCHED_AT_ONCE // (weight.shape[0] * weight.shape[1]))
    )
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


# GPTQ's loop over columns: each is rounded, and what that loses is taken back in those that follow.


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


# Scales by least squares: the ones that fit codes as they are best.


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


# Coordinate descent: codes changed one column at a time, each to the best one while the others stay.


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
