"""Problem of a solver: weights, the Hessian of their inputs, and the codes there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qconvert.calibrate.solver.product import product
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
