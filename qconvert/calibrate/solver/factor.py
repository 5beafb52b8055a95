"""Factors of many Hessians at once, by blocks: one after the other, as cuSOLVER takes them, a GPU
is idle for most of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
