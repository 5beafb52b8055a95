"""One block of NVFP4: numbers of E2M1 and E4M3 in torch, and the best of some scales for it.

Numbers as in ops/fp4.py: nearest, ties to even, E2M1's largest for all that is larger, no -0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.ops.fp4 import SIZES

if TYPE_CHECKING:
    import torch

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
class Choice:
    """E2M1 numbers [B, W, N] of a block, its scale [B, N], each column's error over its factor
    [B, W, N], and their squares' sum [B, N]."""

    steps: torch.Tensor
    scale: torch.Tensor
    errors: torch.Tensor
    loss: torch.Tensor


def chosen(goal: torch.Tensor, factor: torch.Tensor, tried: torch.Tensor) -> Choice:
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
    return Choice(
        steps.gather(0, wide)[0], tried.gather(0, best)[0], errors.gather(0, wide)[0],
        lost.gather(0, best)[0],
    )  # fmt: skip
