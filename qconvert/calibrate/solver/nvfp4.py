"""NVFP4: E2M1 codes and E4M3 block scales, found together.

E2M1 has few codes and E4M3 few scales, so the scale that fits a block's weights is seldom the one
that fits what GPTQ has made of them when it comes to the block. Here a block's scale is chosen then: the
E4M3 numbers around largest / 6 are tried, each with the codes it leads to, errors weighted by what no
later column makes up for. Sweeps over the blocks follow, each solved anew while the others stay. On
heavy-tailed matrices with outlier channels the loss was 0.37 of rounding's where scales were searched
for first, 0.30 where they are chosen in the loop, and 0.23 after two sweeps.

A weight is counted in units of the matrix's own scale: an E2M1 number times an E4M3 one then, whichever
the dialect. Blocks stay together in the order of solving (0.30 against 0.34 as stored).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.calibrate.settings import Settings
from qconvert.calibrate.solver.best import row_parts
from qconvert.calibrate.solver.curvature import (
    Curvature,
    Rounding,
    curvature,
    in_groups,
    meant,
    rounding,
)
from qconvert.core.parameter_names import Dialect
from qconvert.formats.nvfp4.format import RANGE
from qconvert.ops.fp4 import BLOCK, SIZES

if TYPE_CHECKING:
    import torch


# One block of NVFP4: numbers of E2M1 and E4M3 in torch, and the best of some scales for it. Numbers as
# in ops/fp4.py: nearest, ties to even, E2M1's largest for all that is larger, no -0.


LARGEST = SIZES[-1]
MOST, LEAST = 448.0, 2.0**-9  # of E4M3
_LEAST_CODE, _HIGHEST_CODE = 0x01, 0x7E
_ONE, _FOUR = 127 << 23, 129 << 23
_ROUNDER = (22 << 23) + (1 << 22)


def e2m1(values: torch.Tensor) -> torch.Tensor:
    """Float32 values, which are overwritten, as E2M1 numbers."""
    import torch

    # E2M1's step is half of a number's own power of two, from 1 to 4. Adding 1.5 * 2^23 steps rounds
    # to a step, ties to even.
    bits = values.view(torch.int32).bitwise_and(0x7F800000).clamp_(_ONE, _FOUR).add_(_ROUNDER)
    rounder = bits.view(torch.float32)
    return values.add_(rounder).sub_(rounder).clamp_(-LARGEST, LARGEST)


def e4m3(values: torch.Tensor) -> torch.Tensor:
    """Float32 values from 0 to 448 -> codes int64."""
    import torch

    return values.to(torch.float8_e4m3fn).view(torch.uint8).long()


def number_of(codes: torch.Tensor) -> torch.Tensor:
    """Return what codes of E4M3 mean, float32."""
    import torch

    return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()


def around(codes: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    """The numbers some codes above and below codes [...]: [offsets, ...], all above 0."""
    import torch

    steps = torch.tensor(offsets, device=codes.device).view(-1, *[1] * codes.dim())
    return number_of((codes.unsqueeze(0) + steps).clamp_(_LEAST_CODE, _HIGHEST_CODE))


@dataclass(frozen=True, eq=False)
class BlockChoice:
    """E2M1 numbers [B, W, N] of a block, its scale [B, N], each column's error over its factor
    [B, W, N], and their squares' sum [B, N]."""

    steps: torch.Tensor
    scale: torch.Tensor
    errors: torch.Tensor
    loss: torch.Tensor


def chosen(goal: torch.Tensor, factor: torch.Tensor, tried: torch.Tensor) -> BlockChoice:
    """The best of the scales `tried` [C, B, N] for blocks of float32 weights [B, W, N], columns solved
    in their order: with U the `factor` [B, W, W], U^T U the inverse of the Hessian, the loss d H d^T of
    a block is the sum of its errors' squares. Of equal ones the first."""
    import torch

    left = goal.unsqueeze(0).repeat(tried.shape[0], 1, 1, 1)
    steps, errors = torch.empty_like(left), torch.empty_like(left)
    lost, inverse = torch.zeros_like(tried), tried.reciprocal()
    for at in range(goal.shape[1]):
        value = left[:, :, at]
        step = e2m1(value * inverse)
        error = torch.addcmul(value, step, tried, value=-1).div_(factor[:, at, at, None])
        lost.addcmul_(error, error)
        steps[:, :, at], errors[:, :, at] = step, error
        left[:, :, at + 1 :].addcmul_(factor[:, at, at + 1 :, None], error.unsqueeze(2), value=-1)
    best = lost.argmin(0, keepdim=True)
    wide = best.unsqueeze(2).expand(-1, -1, goal.shape[1], -1)
    return BlockChoice(
        steps.gather(0, wide)[0], tried.gather(0, best)[0], errors.gather(0, wide)[0],
        lost.gather(0, best)[0],
    )  # fmt: skip


# Codes of E4M3, eight of which are a factor of two, around a block's own: what its first search tries,
# and a sweep. Wider ones found nothing more, or less than half a percent.
_FIRST, _AGAIN = tuple(range(-6, 9)), tuple(range(-3, 4))
_ZEROS = 0.125  # the scale of a block of zeros


@dataclass(frozen=True, eq=False)
class Nvfp4Solution:
    """Of one matrix: twice its E2M1 numbers, int8 [N, K], its E4M3 ones, float32 [N, K / 16]; its own
    scale, float32 []; and what codes mean, BF16 [N, K]."""

    steps: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor
    weight: torch.Tensor


def global_scale_of(weight: torch.Tensor, dialect: Dialect) -> torch.Tensor:
    """The scale that BF16 weights [..., N, K] share, float32 [...]: see formats/nvfp4/scales.py."""
    import torch

    largest = weight.abs().amax((-2, -1)).bfloat16().float()
    if dialect == "modelopt":
        global_scale = largest / RANGE
        return torch.where(global_scale > 0, global_scale, 1.0)
    divisor = (largest.reciprocal().bfloat16().float() * RANGE).bfloat16().float()
    return torch.where(divisor.isfinite(), divisor, 1.0)


def solved(
    weights: torch.Tensor,
    hessians: torch.Tensor,
    dialect: Dialect,
    settings: Settings,
) -> tuple[list[Nvfp4Solution], torch.Tensor]:
    """BF16 matrices [B, N, K] solved with their Hessians float32 [B, K, K], which are overwritten; and
    which of those could not be factorized: these matrices are rounded to nearest. No row loses more
    than it does when it is rounded as formats/nvfp4/encode.py rounds it."""
    found = curvature(
        hessians,
        settings.dampening_frac,
        by_importance=settings.order == "importance",
        together=BLOCK,
    )
    factors = block_factors(found.hessian)
    global_scale = global_scale_of(weights, dialect)

    def made(part: torch.Tensor) -> Rounding:
        first = plain(part, global_scale, dialect)
        return _rows(units(part, global_scale, dialect), first, found, factors, settings)

    return _found(weights, global_scale, dialect, made), found.failed


def rounded(weight: torch.Tensor, dialect: Dialect, settings: Settings) -> Nvfp4Solution:
    """A BF16 matrix [N, K] rounded to nearest, with scales searched for by least squares where the
    settings say so."""
    global_scale = global_scale_of(weight[None], dialect)

    def made(part: torch.Tensor) -> Rounding:
        first = plain(part, global_scale, dialect)
        search = settings.scales == "search"
        return _least_squares(units(part, global_scale, dialect), first) if search else first

    return _found(weight[None], global_scale, dialect, made)[0]


def _found(
    weights: torch.Tensor,
    global_scale: torch.Tensor,
    dialect: Dialect,
    made: Callable[[torch.Tensor], Rounding],
) -> list[Nvfp4Solution]:
    """Matrices [B, N, K] of which `made` makes some rows [B, K, N] at a time."""
    import torch

    batch, rows, columns = weights.shape
    steps = torch.empty(weights.shape, dtype=torch.int8, device=weights.device)
    scale = weights.new_empty((batch, rows, columns // BLOCK), dtype=torch.float32)
    meaning = torch.empty(weights.shape, dtype=torch.bfloat16, device=weights.device)
    for start, stop in row_parts(weights):
        one = made(weights[:, start:stop].float().transpose(1, 2).contiguous())
        steps[:, start:stop] = (2 * one.steps).to(torch.int8).transpose(1, 2)
        scale[:, start:stop] = one.scale.transpose(1, 2)
        wide = meant(one.steps, factors(one.scale, global_scale, dialect))
        meaning[:, start:stop] = wide.bfloat16().transpose(1, 2)
    return [Nvfp4Solution(steps[n], scale[n], global_scale[n], meaning[n]) for n in range(batch)]


def factors(scale: torch.Tensor, global_scale: torch.Tensor, dialect: Dialect) -> torch.Tensor:
    """Return what codes are multiplied with: block scales [B, ...] with the matrices' own [B]."""
    each = global_scale.view(-1, *[1] * (scale.dim() - 1))
    return scale * each if dialect == "modelopt" else scale / each


def units(weight: torch.Tensor, global_scale: torch.Tensor, dialect: Dialect) -> torch.Tensor:
    """Float32 weights [B, K, N] in units of their own scales [B]."""
    each = global_scale.view(-1, 1, 1)
    return weight / each if dialect == "modelopt" else weight * each


def plain(weight: torch.Tensor, global_scale: torch.Tensor, dialect: Dialect) -> Rounding:
    """BF16 weights, as float32 [B, K, N], rounded to nearest as formats/nvfp4/encode.py rounds them; the
    loss is left infinite."""
    import torch

    cut = in_groups(weight, BLOCK)
    largest, each = cut.abs().amax(2), global_scale.view(-1, 1, 1)
    if dialect == "modelopt":
        asked = largest / (LARGEST * each)
        scale = torch.where(asked > 0, asked, 1.0).clamp_(LEAST, MOST)
    else:
        scale = (largest / LARGEST).bfloat16().float().mul_(each).clamp_(max=MOST)
    scale = number_of(e4m3(scale))
    scale = torch.where(scale > 0, scale, _ZEROS)
    steps = e2m1(cut / factors(scale, global_scale, dialect).unsqueeze(2)).flatten(1, 2)
    return Rounding(steps, scale, torch.full_like(weight[:, 0], torch.inf))


def _least_squares(goal: torch.Tensor, first: Rounding) -> Rounding:
    """Some rows [B, K, N] with each block's best scale, all columns alike."""
    import torch

    alone = torch.eye(BLOCK, device=goal.device)[None]
    blocks = in_groups(goal, BLOCK)
    steps, scale = torch.empty_like(blocks), torch.empty_like(first.scale)
    for number in range(blocks.shape[1]):
        was = first.scale[:, number]
        tried = torch.cat([was.unsqueeze(0), around(e4m3(was), _FIRST)])
        one = chosen(blocks[:, number], alone.expand(goal.shape[0], -1, -1), tried)
        steps[:, number], scale[:, number] = one.steps, one.scale
    return Rounding(steps.flatten(1, 2), scale, torch.full_like(goal[:, 0], torch.inf))


def _rows(
    goal: torch.Tensor,
    first: Rounding,
    found: Curvature,
    within: torch.Tensor,
    settings: Settings,
) -> Rounding:
    """Some rows [B, K, N] of matrices, in units of their own scales, with their plain rounding."""
    hessian = found.hessian
    wide = max(1, settings.block_size // BLOCK) * BLOCK
    search = settings.scales == "search"
    steps, scale = gptq(goal, first.scale, found, wide, search=search)
    now = rounding(goal, first.steps, first.scale, hessian)
    now = now.better(rounding(goal, steps, scale, hessian))
    for sweep in range(max(settings.refit, settings.descent)):
        offsets = _AGAIN if sweep < settings.refit else (0,)
        now = swept(goal, now, hessian, within, offsets, wide)
    return now


def gptq(
    goal: torch.Tensor, scale: torch.Tensor, found: Curvature, wide: int, *, search: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """GPTQ over blocks: E2M1 numbers of float32 weights [B, K, N] and their scales [B, G, N]. With
    `search` a block's scale is chosen when it is reached, else it is that of `scale`. Blocks' columns
    are adjacent in the order; `wide` columns are solved before their error goes on to the rest, in one
    product. Source: as solver/gptq.py."""
    import torch

    batch, columns, rows = goal.shape
    order, factor = found.order, found.factor
    left = torch.gather(goal, 1, order.unsqueeze(-1).expand_as(goal))
    groups = torch.div(order[:, ::BLOCK], BLOCK, rounding_mode="floor")
    each = torch.arange(batch, device=goal.device)
    made, kept = torch.empty_like(left), torch.empty_like(scale)
    for start in range(0, columns, wide):
        stop = min(start + wide, columns)
        lost = left.new_empty(batch, stop - start, rows)
        for at in range(start, stop, BLOCK):
            global_scale, after = slice(at, at + BLOCK), slice(at + BLOCK, stop)
            group = groups[:, at // BLOCK]
            tried = scale[each, group].unsqueeze(0)
            if search:
                largest = left[:, global_scale].abs().amax(1).div_(LARGEST).clamp_(max=MOST)
                tried = torch.cat([tried, around(e4m3(largest), _FIRST)])
            one = chosen(left[:, global_scale], factor[:, global_scale, global_scale], tried)
            made[:, global_scale], kept[each, group] = one.steps, one.scale
            lost[:, at - start : at - start + BLOCK] = one.errors
            left[:, after].baddbmm_(
                factor[:, global_scale, after].transpose(1, 2), one.errors, alpha=-1
            )
        left[:, stop:].baddbmm_(factor[:, start:stop, stop:].transpose(1, 2), lost, alpha=-1)
    steps = torch.empty_like(made)
    return steps.scatter_(1, order.unsqueeze(-1).expand_as(made), made), kept


def block_factors(hessian: torch.Tensor) -> torch.Tensor:
    """U [B, G, 16, 16], upper, with U^T U the inverse of each block of 16 columns on a Hessian's
    diagonal. Where that cannot be factorized, the columns are taken for unrelated."""
    import torch

    count = hessian.shape[1] // BLOCK
    cut = hessian.reshape(-1, count, BLOCK, count, BLOCK)
    global_scale = cut.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    lower, info = torch.linalg.cholesky_ex(global_scale.flip(2, 3))
    alone = torch.eye(BLOCK, device=hessian.device).expand_as(global_scale)
    factor = torch.linalg.solve_triangular(lower.flip(2, 3), alone, upper=True)
    apart = global_scale.diagonal(dim1=2, dim2=3).rsqrt().diag_embed()
    bad = (info != 0) | ~factor.isfinite().flatten(2).all(2)
    return torch.where(bad[..., None, None], apart, factor)


def swept(
    goal: torch.Tensor,
    now: Rounding,
    hessian: torch.Tensor,
    within: torch.Tensor,
    offsets: tuple[int, ...],
    wide: int,
) -> Rounding:
    """Each block in turn solved anew, the others as they are, under scales `offsets` codes from its own;
    it stays where that does not help. `within` are its factors: see `block_factors`. A block's
    gradient needs what changed before it: within `wide` columns that is brought up to date at
    once, for the rest in one product."""
    import torch

    columns = goal.shape[1]
    steps, scale = now.steps.clone(), now.scale.clone()
    slope = torch.bmm(hessian, meant(steps, scale).sub_(goal))
    for start in range(0, columns, wide):
        stop = min(start + wide, columns)
        near = slope[:, start:stop].clone()
        moved = torch.empty_like(near)
        for at in range(start, stop, BLOCK):
            global_scale, here = slice(at, at + BLOCK), slice(at - start, at - start + BLOCK)
            factor, was = within[:, at // BLOCK], scale[:, at // BLOCK].clone()
            old = steps[:, global_scale] * was.unsqueeze(1)
            # Where a block would lose least were there no codes: by U g, squared, less than it does.
            off = torch.bmm(factor, near[:, here])
            best = old - torch.bmm(factor.transpose(1, 2), off)
            one = chosen(best, factor, around(e4m3(was), offsets))
            wins = one.loss < off.square_().sum(1)
            steps[:, global_scale] = torch.where(
                wins.unsqueeze(1), one.steps, steps[:, global_scale]
            )
            scale[:, at // BLOCK] = torch.where(wins, one.scale, was)
            change = (steps[:, global_scale] * scale[:, at // BLOCK].unsqueeze(1)).sub_(old)
            moved[:, here] = change
            near.baddbmm_(hessian[:, start:stop, global_scale], change)
        slope.baddbmm_(hessian[:, :, start:stop], moved)
    return now.better(rounding(goal, steps, scale, hessian))
