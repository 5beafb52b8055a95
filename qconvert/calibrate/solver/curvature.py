"""A problem of a solver (weights, the Hessian of their inputs, the codes there are), and factors of many
Hessians at once, by blocks: one after the other, as cuSOLVER takes them, a GPU
is idle for most of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qconvert.calibrate.kernel_choice import product
from qconvert.core.int_scheme import IntScheme, Signs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Curvature:
    """Of B matrices: `hessian` float32 [B, K, K], damped; `factor` U, upper, with U^T U the inverse of
    the Hessian whose columns are in the order `order` int64 [B, K]; `inverse` [B, K], the diagonal of
    the Hessian's inverse, columns as stored; `failed` [B]: not positive definite, so replaced by the
    identity, under which solving is rounding to nearest."""

    hessian: torch.Tensor
    factor: torch.Tensor
    order: torch.Tensor
    inverse: torch.Tensor
    failed: torch.Tensor


@dataclass(frozen=True, eq=False)
class Grid:
    """Range of a matrix's codes, as steps from its zero point: float32 `low` and `high`, one number
    or [B, G, N]; G groups of `width` columns, and scales that are values of `dtype`, below 0 too where
    they are `signed`: codes -8 to 7 are then 8 to -7 steps of the same size."""

    low: torch.Tensor
    high: torch.Tensor
    width: int
    dtype: torch.dtype
    signed: bool = False

    @classmethod
    def of(
        cls,
        scheme: IntScheme,
        columns: int,
        zero: torch.Tensor,
        dtype: torch.dtype,
        signs: Signs = "positive",
    ) -> Grid:
        """`zero` int8 [B, G, N], all 0 for symmetric schemes."""
        import torch

        shift = torch.zeros((1, 1, 1), device=zero.device) if scheme.symmetric else zero.float()
        signed = signs == "both" and scheme.gains_by_signs
        return cls(scheme.low - shift, scheme.high - shift, scheme.width(columns), dtype, signed)

    def cut(self, start: int, stop: int) -> Grid:
        """Of some rows."""
        if self.low.shape[-1] == 1:
            return self
        return replace(self, low=self.low[..., start:stop], high=self.high[..., start:stop])

    def stored(self, scale: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
        """Scales as the dtype holds them, in float32; `fallback` where that is no number above 0, or,
        where they are signed, 0."""
        import torch

        kept = scale.to(self.dtype).float()
        usable = kept != 0 if self.signed else kept > 0
        return torch.where(usable & kept.isfinite(), kept, fallback)


@dataclass(frozen=True, eq=False)
class Rounding:
    """Codes as steps from the zero point, float32 [B, K, N], their scales float32 [B, G, N], and what
    each row loses by them, float32 [B, N]."""

    steps: torch.Tensor
    scale: torch.Tensor
    loss: torch.Tensor

    def better(self, other: Rounding) -> Rounding:
        """Row by row the one that loses less."""
        import torch

        wins = (other.loss < self.loss)[:, None]
        return Rounding(
            torch.where(wins, other.steps, self.steps),
            torch.where(wins, other.scale, self.scale),
            torch.where(wins[:, 0], other.loss, self.loss),
        )


def spread(values: torch.Tensor, width: int) -> torch.Tensor:
    """Of groups [B, G, N], for each of their columns: a view [B, G, width, N]."""
    return values.unsqueeze(2).expand(-1, -1, width, -1)


def in_groups(values: torch.Tensor, width: int) -> torch.Tensor:
    """[B, K, N] -> [B, K / width, width, N]."""
    batch, _, rows = values.shape
    return values.reshape(batch, -1, width, rows)


def meant(steps: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return what steps [B, K, N] mean."""
    width = steps.shape[1] // scale.shape[1]
    return (in_groups(steps, width) * scale.unsqueeze(2)).flatten(1, 2)


def rounding(
    weight: torch.Tensor, steps: torch.Tensor, scale: torch.Tensor, hessian: torch.Tensor
) -> Rounding:
    """With what each row loses: d H d^T, never less than 0."""
    off = meant(steps, scale).sub_(weight)
    return Rounding(steps, scale, product(hessian, off).mul_(off).sum(1).clamp_(min=0))


_BLOCK = 128


def lower_inverse(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of positive definite float32 [B, K, K], which are overwritten: the inverse of each one's lower
    Cholesky factor [B, K, K], and which [B] are not positive definite; what is returned of these is
    not to be used."""
    import torch

    batch, columns = matrices.shape[:2]
    failed = torch.zeros(batch, dtype=torch.bool, device=matrices.device)
    found = torch.zeros_like(matrices)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        own, info = torch.linalg.cholesky_ex(matrices[:, start:stop, start:stop])
        failed |= info != 0
        alone = torch.eye(stop - start, device=matrices.device).expand_as(own)
        inverse = torch.linalg.solve_triangular(own, alone, upper=False)
        found[:, start:stop, start:stop] = inverse
        if start:
            reach = torch.bmm(matrices[:, start:stop, :start], found[:, :start, :start])
            found[:, start:stop, :start] = torch.bmm(inverse, reach).neg_()
        if stop < columns:
            panel = torch.bmm(matrices[:, stop:, start:stop], inverse.transpose(1, 2))
            matrices[:, stop:, start:stop] = panel
            matrices[:, stop:, stop:].baddbmm_(panel, panel.transpose(1, 2), alpha=-1)
    diagonal = found.diagonal(dim1=1, dim2=2)
    failed |= ~found.isfinite().flatten(1).all(1) | ~(diagonal > 0).all(1)
    return found, failed


def upper_factor(matrices: torch.Tensor) -> torch.Tensor:
    """Put into the place of positive definite float32 M [B, K, K] the upper U of each with U^T U = M.
    Returns which [B] are not positive definite; their place holds nothing of use."""
    import torch

    batch, columns = matrices.shape[:2]
    failed = torch.zeros(batch, dtype=torch.bool, device=matrices.device)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        own, info = torch.linalg.cholesky_ex(matrices[:, start:stop, start:stop])
        failed |= info != 0
        matrices[:, start:stop, start:stop] = own.transpose(1, 2)
        if stop < columns:
            alone = torch.eye(stop - start, device=matrices.device).expand_as(own)
            inverse = torch.linalg.solve_triangular(own, alone, upper=False)
            panel = torch.bmm(inverse, matrices[:, start:stop, stop:])
            matrices[:, start:stop, stop:] = panel
            matrices[:, stop:, start:stop] = 0
            matrices[:, stop:, stop:].baddbmm_(panel.transpose(1, 2), panel, alpha=-1)
    diagonal = matrices.diagonal(dim1=1, dim2=2)
    return failed | ~matrices.isfinite().flatten(1).all(1) | ~(diagonal > 0).all(1)


# Damping, the order in which columns are solved, and the Hessian's factor in that order.


def curvature(
    hessians: torch.Tensor, dampening: float, *, by_importance: bool, together: int = 1
) -> Curvature:
    """Of Hessians float32 [B, K, K], which are overwritten: `dampening` times their mean diagonal is
    added to the diagonal. `by_importance` solves the columns with the largest inputs first, whose error
    the others then make up for; groups stay as they are stored, so nothing has to say so. `together`
    adjacent columns are solved one after the other, in the place of the most important of them.

    An input that was never seen has only the damping: its column is rounded to nearest.
    """
    import torch

    batch, columns = hessians.shape[:2]
    diagonal = hessians.diagonal(dim1=1, dim2=2)
    if by_importance:
        order = _by_importance(diagonal, together)
    else:
        order = torch.arange(columns, device=hessians.device).expand(batch, -1)
    diagonal.add_(dampening * diagonal.mean(1, keepdim=True))
    if hessians.is_cuda:
        factor, failed = _factorize_all(hessians, order)
    else:
        factor = torch.empty_like(hessians)
        failed = torch.zeros(batch, dtype=torch.bool)
        for number in range(batch):
            failed[number] = _factorize(hessians[number], order[number], factor[number])
    # Columns of U squared add up to the inverse's diagonal.
    inverse = torch.empty_like(diagonal)
    inverse.scatter_(1, order, factor.square().sum(1))
    return Curvature(hessians, factor, order, inverse, failed)


def _by_importance(diagonal: torch.Tensor, together: int) -> torch.Tensor:
    """Columns int64 [B, K] in the order to solve them in."""
    import torch

    if together == 1:
        return torch.argsort(diagonal, dim=1, descending=True, stable=True)
    cut = diagonal.reshape(diagonal.shape[0], -1, together)
    groups = torch.argsort(cut.amax(2), dim=1, descending=True, stable=True).unsqueeze(2)
    within = torch.argsort(cut, dim=2, descending=True, stable=True)
    chosen = within.gather(1, groups.expand_as(within))
    return (chosen + groups * together).flatten(1, 2)


def _factorize_all(
    hessians: torch.Tensor, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `_factorize` finds, of all [B, K, K] at once, and which [B] failed."""
    import torch

    turned = order.flip(1)
    each = torch.arange(hessians.shape[0], device=hessians.device)[:, None, None]
    found, failed = lower_inverse(hessians[each, turned[:, :, None], turned[:, None, :]])
    factor = found.flip(1, 2)
    del found
    if bool(failed.any()):
        alone = torch.eye(hessians.shape[1], device=hessians.device)
        factor[failed], hessians[failed] = alone, alone
    return factor, failed


def _factorize(hessian: torch.Tensor, order: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Fill U [K, K] with U^T U = H^-1, of H in that order: H = R R^T with R upper, and U = R^-1. R is
    Cholesky's factor of H turned around. A third of the work of inverting H and factorizing that,
    and no inverse of an inverse. Returns whether it failed; H and U are the identity then."""
    import torch

    turned = order.flip(0)
    lower, info = torch.linalg.cholesky_ex(hessian[turned][:, turned])
    upper = lower.flip(0, 1)
    del lower
    alone = torch.eye(upper.shape[0], device=upper.device)
    torch.linalg.solve_triangular(upper, alone, upper=True, out=factor)
    failed: torch.Tensor = (info != 0) | ~factor.isfinite().all() | ~(factor.diagonal() > 0).all()
    if failed:
        factor.copy_(alone)
        hessian.copy_(alone)
    return failed
