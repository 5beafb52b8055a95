"""Answers of experts, weighted and added up by token, as a Triton kernel: each number is read once. By
torch's operators an expert's answers are read and written four times, and its tokens' sums once more.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qconvert.calibrate.kernels.choice import there

_WIDEST = 1024  # columns that a program works on


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(value: tl.tensor) -> tl.tensor:
    """Float32 to the nearest that BF16 holds, ties to even, as float32; NaN stays one. Triton's
    interpreter cuts bits off where it converts."""
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(value == value, bits.to(tl.float32, bitcast=True), value)


@triton.jit  # type: ignore[untyped-decorator]
def _add_answers(
    rows: tl.tensor, answers: tl.tensor, slots: tl.tensor, weights: tl.tensor, start: tl.tensor,
    stop: tl.tensor, width: tl.tensor, COUNT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(rows + token * width + column, mask=inside, other=0.0).to(tl.float32)
    for i in range(COUNT):
        slot = tl.load(slots + token * COUNT + i)
        if (slot >= start) & (slot < stop):
            answer = tl.load(answers + (slot - start) * width + column, mask=inside, other=0.0)
            weighted = answer.to(tl.float32) * tl.load(weights + slot).to(tl.float32)
            total = _rounded(total + _rounded(weighted))
    tl.store(rows + token * width + column, total.to(tl.bfloat16), mask=inside)


@there
def add_answers(
    rows: torch.Tensor,
    answers: torch.Tensor,
    of_token: torch.Tensor,
    weights: torch.Tensor,
    start: int,
) -> None:
    """As slots.add_answers: rows BF16 [T, H] and answers BF16 [S, H], which are contiguous; a token's
    slots int64 [T, k], ascending, and the weights of all slots."""
    if not (rows.dtype == answers.dtype == torch.bfloat16):
        raise TypeError(f"answers {answers.dtype} to rows {rows.dtype}: expected BF16")
    tokens, width = rows.shape
    block = min(_WIDEST, 1 << (width - 1).bit_length())
    kernel: Any = _add_answers
    kernel[tokens, -(-width // block)](
        rows, answers, of_token, weights, start, start + answers.shape[0], width,
        COUNT=of_token.shape[1], BLOCK=block,
    )  # fmt: skip
