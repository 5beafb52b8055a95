"""Error that layers before lost by quantization, put right in the weights that are solved for.

A layer of the result is given inputs X~, of a model whose layers before are quantized, where the
unquantized model gives it X. Its codes are solved against weights that answer X~ more as W answers X,
half of the way there, because what is fitted to the samples alone is lost again on others:

    W + a W (dX^T X~) (X~^T X~ + l I)^-1,  dX = X - X~ over the same tokens

Source: Arai and Ichikawa, Quantization Error Propagation (arXiv 2504.09629), equation for the corrected
weight; a is its propagation strength.

X and X~ must be of the same tokens, row by row. An expert's pairs are of those tokens that the router
gives it in the quantized stream: these are what it will be given when it is served, and what its Hessian
X~^T X~ is the sum of. Tokens that the unquantized model gives it and the quantized one does not have no
X~. Down's X is what the unquantized gate and up make of the unquantized stream's input; its X~ what
their codes make of the quantized one's, so gate and up are solved before down's inputs are seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.calibrate.activation_store import InFiles, TokenRows
from qconvert.calibrate.background_writer import WrittenBehind
from qconvert.calibrate.kernel_choice import product
from qconvert.calibrate.solver.curvature import lower_inverse

if TYPE_CHECKING:
    import torch

    from qconvert.calibrate.experts import Expert

STRENGTH = 0.5
# Of the mean diagonal of X~^T X~: what few tokens say is not to be believed.
DAMPING = 0.05
_ROWS = 1024  # worked on together


Kept = InFiles | WrittenBehind


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Hidden states that go into a layer: of the model whose layers before are quantized, and, where
    errors are corrected, of the unquantized one."""

    quantized: Kept
    plain: Kept | None = None

    @property
    def all(self) -> tuple[Kept, ...]:
        return (self.quantized,) if self.plain is None else (self.quantized, self.plain)

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Of both the same."""
        for one in self.all:
            one.write(start, rows)

    def sync(self) -> None:
        for one in self.all:
            one.sync()

    def close(self) -> None:
        for one in self.all:
            one.close()


@dataclass(frozen=True, eq=False)
class UnquantizedInputs:
    """The unquantized model beside some experts: what goes into its experts, by token [T, H], and those
    experts as they were read."""

    inputs: TokenRows
    experts: Sequence[Expert]


def corrected_together(
    weights: Sequence[torch.Tensor],
    hessians: Sequence[torch.Tensor],
    crosses: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """`corrected` of some matrices of one shape at once, on an accelerator."""
    import torch

    damped = torch.stack(list(hessians))
    diagonal = damped.diagonal(dim1=1, dim2=2)
    diagonal.add_(DAMPING * diagonal.mean(1, keepdim=True))
    lower, failed = lower_inverse(damped)
    del damped
    targets = []
    for number, (weight, cross) in enumerate(zip(weights, crosses, strict=True)):
        target = weight.float()
        own = lower[number]
        shift = product(target[None], cross[None])
        shift = product(product(shift, own.t()[None]), own[None])[0].mul_(STRENGTH)
        usable = shift.isfinite().all() & ~failed[number]
        targets.append(target.add_(torch.where(usable, shift, 0)))
    return targets


def corrected(weight: torch.Tensor, hessian: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
    """Float32 [N, K], what to solve a matrix BF16 [N, K] against: `hessian` is c X~^T X~ and `cross`
    c dX^T X~, both float32 [K, K], with the same c. Where the damped Hessian cannot be factorized these
    are the weights themselves. A column whose X~ is zero throughout keeps its weights."""
    import torch

    damped = hessian.clone()
    diagonal = damped.diagonal()
    diagonal.add_(DAMPING * diagonal.mean())
    lower, info = torch.linalg.cholesky_ex(damped)
    del damped
    target = weight.float()
    if int(info) or not bool(lower.isfinite().all()):
        return target
    for start in range(0, target.shape[0], _ROWS):
        rows = target[start : start + _ROWS]
        pull = (rows @ cross).t()
        shift = torch.cholesky_solve(pull, lower).t().mul_(STRENGTH)
        if bool(shift.isfinite().all()):
            rows += shift
    return target
