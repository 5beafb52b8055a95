"""GPTQ as llm-compressor solves it, for a batch of matrices on a GPU.

The steps of llmcompressor (`modifiers/gptq/gptq_quantize.py`, quantize_weight; `helpers.py`,
apply_activation_ordering and factorize_hessian) and of compressed-tensors' fake_quantize: columns
without inputs become zeros, the Hessian is damped, inverted and factorized, columns are rounded in
float32 and what codes mean is rounded to the scale's dtype. A code differs from theirs only where a
value lies within float rounding of the middle of two codes; the columns after it in its row then see
another error, so of some thousand rows one has other codes. Codes are found again in what was rounded,
as theirs are when they are stored: of 8 bits with zero points BF16 does not tell all from their
neighbours, which is 3 % of the loss. What differs is how it is computed: columns
first ([B, K, N]), factors of all matrices at once by blocks (cuSOLVER takes one after the other), a
block's columns in one launch. Products are of full float32, torch's default: no TF32, no halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.calibrate.kernel_choice import fused
from qconvert.calibrate.settings import Settings
from qconvert.calibrate.solver.curvature import lower_inverse, upper_factor
from qconvert.core.int_scheme import IntScheme

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Lattice:
    """Range that values are rounded to: codes from `low` to `high`, scales float32 [B, G, N] and zero
    points int8 of that shape, None where all are 0; codes times scales are numbers of `dtype`."""

    low: int
    high: int
    scale: torch.Tensor
    zero: torch.Tensor | None
    dtype: torch.dtype


def parity(
    weight: torch.Tensor,
    hessians: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    scheme: IntScheme,
    settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [B, N, K] of matrices [B, N, K] under an observer's scales and zero points [B, N, G],
    and which Hessians float32 [B, K, K], which are overwritten, could not be factorized: those matrices
    are rounded to nearest."""
    import torch

    batch, rows, columns = weight.shape
    left = torch.empty((batch, columns, rows), device=weight.device)
    left.copy_(weight.transpose(1, 2))
    order = torch.arange(columns, device=weight.device).expand(batch, -1)
    ordered = scheme.actorder == "static"
    if ordered:
        order = torch.argsort(hessians.diagonal(dim1=1, dim2=2), dim=1, descending=True)
        each = torch.arange(batch, device=weight.device)[:, None, None]
        hessians = hessians[each, order[:, :, None], order[:, None, :]]
        left = left.gather(1, order.unsqueeze(2).expand_as(left))
    factor, failed = _factorized(hessians, left, settings.dampening_frac)
    lattice = Lattice(
        scheme.low,
        scheme.high,
        scale.float().transpose(1, 2).contiguous(),
        None if scheme.symmetric else zero.transpose(1, 2).contiguous(),
        # Narrow codes are ours, and mean float32 numbers.
        torch.float32 if scheme.narrow else scale.dtype,
    )
    groups = torch.div(order, scheme.width(columns), rounding_mode="floor")
    made = torch.empty((batch, columns, rows), dtype=torch.int8, device=weight.device)
    kernels = fused(left, settings.block_size)
    for start in range(0, columns, settings.block_size):
        stop = min(start + settings.block_size, columns)
        block = _block if kernels is None else kernels.parity_block
        lost = block(left, factor, groups, lattice, made, start, stop)
        if stop < columns:
            reach = factor[:, start:stop, stop:].transpose(1, 2)
            left[:, stop:].baddbmm_(reach, lost, alpha=-1)
    if ordered:
        made = torch.empty_like(made).scatter_(1, order.unsqueeze(2).expand_as(made), made)
    return made.transpose(1, 2).contiguous(), failed


def _factorized(
    hessians: torch.Tensor, left: torch.Tensor, dampening: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """U [B, K, K], upper, with U^T U the inverse of the damped Hessian, and which [B] have none: the
    identity, then. Both arguments are overwritten; columns of `left` [B, K, N] without inputs by 0."""
    import torch

    diagonal = hessians.diagonal(dim1=1, dim2=2)
    dead = diagonal == 0
    diagonal.masked_fill_(dead, 1)
    left.masked_fill_(dead.unsqueeze(2), 0)
    diagonal.add_(dampening * diagonal.mean(1, keepdim=True))
    alone = torch.eye(hessians.shape[1], device=hessians.device)
    lower, failed = lower_inverse(hessians)
    if bool(failed.any()):
        lower[failed] = alone
    inverse = torch.bmm(lower.transpose(1, 2), lower, out=hessians)
    del lower
    late = upper_factor(inverse)
    if bool(late.any()):
        inverse[late] = alone
    failed |= late
    return inverse, failed


def _block(
    left: torch.Tensor, factor: torch.Tensor, groups: torch.Tensor, lattice: Lattice,
    made: torch.Tensor, start: int, stop: int,
) -> torch.Tensor:  # fmt: skip
    """Codes of the columns [start, stop) of `left` [B, K, N], which are overwritten, into `made`, with
    the groups int64 [B, K]. Returns the errors [B, stop - start, N], each over its factor [B, K, K]."""
    import torch

    batch, _, rows = left.shape
    each = torch.arange(batch, device=left.device)
    lost = left.new_empty(batch, stop - start, rows)
    for at in range(start, stop):
        group, value = groups[:, at], left[:, at]
        step = lattice.scale[each, group]
        code = value / step
        nothing = None if lattice.zero is None else lattice.zero[each, group].float()
        if nothing is not None:
            code += nothing
        code = code.clamp_(lattice.low, lattice.high).round_()
        if nothing is not None:
            code -= nothing
        meant = (code * step).to(lattice.dtype).float()
        stored = meant / step
        if nothing is not None:
            stored += nothing
        made[:, at] = stored.round_().clamp_(lattice.low, lattice.high).to(torch.int8)
        error = (value - meant) / factor[:, at, at, None]
        lost[:, at - start] = error
        left[:, at + 1 : stop] -= factor[:, at, at + 1 : stop, None] * error.unsqueeze(1)
    return lost
