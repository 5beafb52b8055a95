"""Products of float32 matrices, on a GPU by its tensor cores: each number as a sum of two of BF16.

a b is a_high b_high + a_high b_low + a_low b_high, added up in float32; what is left out is 2^-16 of a
product of magnitudes. It is one product of BF16, with three times the inner dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.calibrate.kernel_choice import by_triton

if TYPE_CHECKING:
    import torch


def product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Float32 [B, N, K] times [B, K, M]: [B, N, M]."""
    import torch

    return by_halves(one, other) if one.is_cuda else torch.bmm(one, other)


def by_halves(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A product as a GPU takes it; on a CPU to try it, as slow as it is there."""
    import torch

    high, low = halves(one)
    above, below = halves(other)
    return _multiplied(torch.cat([high, high, low], 2), torch.cat([above, below, above], 1))


def _multiplied(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of BF16 numbers, whose products are exact in float32."""
    import torch

    if one.is_cuda:
        return torch.bmm(one, other, out_dtype=torch.float32)
    return torch.bmm(one.float(), other.float())


def add_product(to: torch.Tensor, one: torch.Tensor, other: torch.Tensor, *, sign: int = 1) -> None:
    """Add a product, or take it away, in place."""
    if by_triton(to) and to.numel():
        from qconvert.calibrate import triton_kernels as kernel

        kernel.add_product(to, one, other, sign)
    elif not to.is_cuda:
        to.baddbmm_(one, other, alpha=sign)
    elif to.numel():
        to.add_(product(one, other), alpha=sign)


def product_with_codes(one: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Float32 [B, N, K] times whole numbers up to 256 [B, K, M], which BF16 holds as they are."""
    import torch

    return codes_by_halves(one, codes) if one.is_cuda else torch.bmm(one, codes)


def codes_by_halves(one: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """`product_with_codes` as a GPU takes it."""
    import torch

    exact = codes.bfloat16()
    return _multiplied(torch.cat(halves(one), 2), torch.cat([exact, exact], 1))


def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 numbers whose sum is a float32 one, to 2^-16 of it."""
    high = values.bfloat16()
    return high, (values - high.float()).bfloat16()
