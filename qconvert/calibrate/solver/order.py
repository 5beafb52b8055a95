"""Damping, the order in which columns are solved, and the Hessian's factor in that order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.calibrate.solver.problem import Curvature

if TYPE_CHECKING:
    import torch


def curvature(hessians: torch.Tensor, dampening: float, *, by_importance: bool) -> Curvature:
    """Of Hessians float32 [B, K, K], which are overwritten: `dampening` times their mean diagonal is
    added to the diagonal. `by_importance` solves the columns with the largest inputs first, whose error
    the others then make up for; groups stay as they are stored, so nothing has to say so.

    An input that was never seen has only the damping: its column is rounded to nearest.
    """
    import torch

    batch, columns = hessians.shape[:2]
    diagonal = hessians.diagonal(dim1=1, dim2=2)
    if by_importance:
        order = torch.argsort(diagonal, dim=1, descending=True, stable=True)
    else:
        order = torch.arange(columns, device=hessians.device).expand(batch, -1)
    diagonal.add_(dampening * diagonal.mean(1, keepdim=True))
    factor = torch.empty_like(hessians)
    failed = torch.zeros(batch, dtype=torch.bool, device=hessians.device)
    for number in range(batch):
        failed[number] = _factorize(hessians[number], order[number], factor[number])
    # Columns of U squared add up to the inverse's diagonal.
    inverse = torch.empty_like(diagonal)
    inverse.scatter_(1, order, factor.square().sum(1))
    return Curvature(hessians, factor, order, inverse, failed)


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
