"""Integer codes of matrices: scales by the largest weight, the codes of values, and what codes mean.

What compressed-tensors computes for integers (`quantization/utils/helpers.py`, calculate_qparams;
`quantization/lifecycle/forward_helpers.py`, _quantize and _dequantize), step by step in its dtypes, so
to the last bit; tests/test_integers.py compares. Written anew because importing it takes 1 to 4 s of
a calibration's start: datasets, pandas and llm-compressor come along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.core.int_scheme import IntScheme, ScaleDtype

if TYPE_CHECKING:
    import torch


def dtype_of(name: ScaleDtype) -> torch.dtype:
    import torch

    return {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[name]


def grouped(values: torch.Tensor, width: int) -> torch.Tensor:
    """[..., K] -> [..., K / width, width]."""
    return values.reshape(*values.shape[:-1], -1, width)


def observed(
    weight: torch.Tensor, scheme: IntScheme, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, computed in `dtype`, and zero points int8 [..., G] of weights [..., K], whose dtype is no
    wider: the range from the least to the largest weight of a group, or as far to both sides as the
    larger magnitude, in all codes. A group of zeros has the dtype's eps for a scale."""
    import torch

    cut = grouped(weight, scheme.width(weight.shape[-1]))
    low = torch.amin(cut, -1).to(dtype).clamp_(max=0)
    high = torch.amax(cut, -1).to(dtype).clamp_(min=0)

    def number(value: float) -> torch.Tensor:
        # On the device: a GPU divides by a number of the CPU by multiplying with its reciprocal.
        return torch.full((), value, dtype=dtype, device=weight.device)

    steps = (1 << scheme.bits) - 1
    if scheme.symmetric:
        scale = torch.maximum(low.abs(), high.abs()) / number(steps / 2)
        zero = torch.zeros_like(scale, dtype=torch.int8)
    else:
        first, last = -(1 << (scheme.bits - 1)), (1 << (scheme.bits - 1)) - 1
        scale = (high - low) / number(steps)
        # Of a group of zeros it is the code of NaN, which torch makes 0.
        zero = (number(first) - low / scale).clamp_(first, last).round_().to(torch.int8)
    return torch.where(scale == 0, torch.finfo(dtype).eps, scale), zero


def coded(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, scheme: IntScheme
) -> torch.Tensor:
    """The nearest codes int8 [..., K] of values [..., K], divided in the values' dtype, under scales and
    zero points [..., G]."""
    import torch

    cut = grouped(values, scheme.width(values.shape[-1])) / scale.to(values.dtype).unsqueeze(-1)
    if zero is not None:
        cut += zero.to(values.dtype).unsqueeze(-1)
    return cut.clamp_(scheme.low, scheme.high).round_().to(torch.int8).flatten(-2)


def meaning(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, scheme: IntScheme
) -> torch.Tensor:
    """Return what codes int8 [..., K] mean, in the dtype of the scales [..., G]."""
    cut = grouped(codes, scheme.width(codes.shape[-1])).to(scale.dtype)
    if zero is not None:
        cut = cut - zero.to(scale.dtype).unsqueeze(-1)
    return (cut * scale.unsqueeze(-1)).flatten(-2)
