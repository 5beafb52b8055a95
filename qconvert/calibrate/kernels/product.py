"""A product added to a float32 matrix in place, as a Triton kernel: each number of that is read and
written once. As operators of torch it is twelve launches, and each is read or written four times."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl

from qconvert.calibrate.kernels.choice import there

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_SIDE, _DEEP = 128, 64  # of what a program adds to, and what it multiplies at a time
OPTIONS = {"num_warps": 8, "num_stages": 2}


@triton.jit  # type: ignore[untyped-decorator]
def _add_product(
    to: tl.tensor, one: tl.tensor, other: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    inner: tl.tensor, sign: tl.tensor, to_batch: tl.tensor, to_row: tl.tensor, one_batch: tl.tensor,
    one_row: tl.tensor, one_inner: tl.tensor, other_batch: tl.tensor, other_inner: tl.tensor,
    SIDE: tl.constexpr, DEEP: tl.constexpr, HALVES: tl.constexpr,
) -> None:  # fmt: skip
    column = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    row = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    batch = tl.program_id(2).to(tl.int64)
    within = row < rows
    inside = column < columns
    found = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, inner, DEEP):
        depth = start + tl.arange(0, DEEP)
        left = tl.load(
            one + batch * one_batch + row[:, None] * one_row + depth[None, :] * one_inner,
            mask=within[:, None] & (depth < inner)[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            other + batch * other_batch + depth[:, None] * other_inner + column[None, :],
            mask=(depth < inner)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        if HALVES:
            high, above = left.to(tl.bfloat16), right.to(tl.bfloat16)
            low = (left - high.to(tl.float32)).to(tl.bfloat16)
            below = (right - above.to(tl.float32)).to(tl.bfloat16)
            found = tl.dot(high, above, found)
            found = tl.dot(high, below, found)
            found = tl.dot(low, above, found)
        else:
            found = tl.dot(left, right, found, input_precision="ieee")
    at = to + batch * to_batch + row[:, None] * to_row + column[None, :]
    mask = within[:, None] & inside[None, :]
    tl.store(at, tl.load(at, mask=mask, other=0.0) + sign * found, mask=mask)


@there
def add_product(to: torch.Tensor, one: torch.Tensor, other: torch.Tensor, sign: int) -> None:
    """As product.add_product, of float32 `to` [B, N, M], `one` [B, N, K] and `other` [B, K, M], whose
    rows, but those of `one`, are contiguous. Triton's interpreter has no BF16 to multiply."""
    if to.stride(2) != 1 or other.stride(2) != 1:
        raise ValueError(f"expected contiguous rows, found strides {to.stride()}, {other.stride()}")
    batch, rows, columns = to.shape
    kernel: Any = _add_product
    kernel[triton.cdiv(columns, _SIDE), triton.cdiv(rows, _SIDE), batch](
        to, one, other, rows, columns, one.shape[2], float(sign), to.stride(0), to.stride(1),
        *one.stride(), other.stride(0), other.stride(1), SIDE=_SIDE, DEEP=_DEEP,
        HALVES=not _INTERPRETED, **OPTIONS,
    )  # fmt: skip
