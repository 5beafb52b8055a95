"""Codes of matrices from their Hessians: by `solver/`, or GPTQ as llm-compressor solves it.

The latter is by its own functions on a CPU (llmcompressor_backend.py), and by solver/parity.py on a
GPU. What is added to it: narrow codes (-7 to 7, which AMX kernels take and compressed-tensors has no
name for), scales chosen by weighted error, and `actorder: group`, which llm-compressor no longer has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qconvert.calibrate import llmcompressor_backend
from qconvert.calibrate.settings import CLIPS, Settings
from qconvert.calibrate.solver import nvfp4
from qconvert.calibrate.solver.best import best, least_squares
from qconvert.calibrate.solver.parity import parity
from qconvert.core.int_scheme import Codes, IntScheme, Nvfp4Scheme, ScaleDtype, Scheme

if TYPE_CHECKING:
    import torch


# Integer codes of matrices: scales by the largest weight, the codes of values, and what codes mean.
# What compressed-tensors computes for integers (`quantization/utils/helpers.py`, calculate_qparams;
# `quantization/lifecycle/forward_helpers.py`, _quantize and _dequantize), step by step in its dtypes,
# so to the last bit; tests/test_integers.py compares. Written anew because importing it takes 1 to 4 s
# of a calibration's start: datasets, pandas and llm-compressor come along.


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


@dataclass(frozen=True, eq=False)
class Quantized:
    """A matrix [N, K] on its device: int8 codes, scale [N, groups] in the scheme's dtype, zero int8 or
    None, g_idx int32 [K] or None; `weight` is what the codes mean, BF16 [N, K]; `global_scale` is the
    scale of the whole matrix in NVFP4."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    g_idx: torch.Tensor | None
    weight: torch.Tensor
    global_scale: float | None = None

    def rows(self, start: int, stop: int) -> Quantized:
        zero = None if self.zero is None else self.zero[start:stop]
        return Quantized(
            self.codes[start:stop],
            self.scale[start:stop],
            zero,
            self.g_idx,
            self.weight[start:stop],
            self.global_scale,
        )

    def numpy(self) -> Codes:
        import torch

        def down(tensor: torch.Tensor | None) -> Any:
            if tensor is None or not tensor.is_cuda:
                return None if tensor is None else tensor.contiguous().numpy()
            into = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return into.copy_(tensor).numpy()

        scale, zero, g_idx = down(self.scale.float()), down(self.zero), down(self.g_idx)
        return Codes(down(self.codes), scale, zero, g_idx, self.global_scale)


def _scales(
    weight: torch.Tensor, means: torch.Tensor, scheme: IntScheme, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [B, N, G] of BF16 weights [B, N, K]; `means` [B, K] weigh the columns."""
    import torch

    dtype = dtype_of(scheme.scale_dtype)
    # llm-compressor computes scales in the weight's dtype; others are computed wide and rounded once.
    within = weight.dtype if scheme.scale_dtype == "BF16" else torch.float32
    if scheme.narrow:
        cut = grouped(weight, scheme.width(weight.shape[-1]))
        largest = torch.maximum(cut.amax(-1), -cut.amin(-1))
        scale = largest.float() / scheme.high
        zero = torch.zeros_like(scale, dtype=torch.int8)
    elif _by_llmcompressor(settings, weight):
        pairs = [llmcompressor_backend.observed(one.to(within), scheme) for one in weight]
        scale, zero = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    else:
        scale, zero = observed(weight, scheme, within)
    scale = scale.to(dtype)
    # A group of zeros, or of less than the dtype can tell from it, still needs something to divide by.
    scale = torch.where(scale > 0, scale, torch.finfo(dtype).eps)
    if settings.searches(scheme):
        found = [_least_error(*each, scheme) for each in zip(weight, means, scale, strict=True)]
        scale = torch.stack(found)
    return scale, zero


def _by_llmcompressor(settings: Settings, weight: torch.Tensor) -> bool:
    """Return whether llm-compressor's own functions are called for a matrix."""
    return llmcompressor_backend.are_asked(settings.solver, weight.device.type)


def _least_error(
    weight: torch.Tensor, means: torch.Tensor, scale: torch.Tensor, scheme: IntScheme
) -> torch.Tensor:
    """For each group the part of its scale whose codes lose the least, columns weighted by `means`."""
    import torch

    cut = grouped(weight.float(), scheme.width(weight.shape[1]))
    weights = grouped(means.float(), cut.shape[-1])
    best, least = scale, torch.full(scale.shape, torch.inf, device=scale.device)
    for clip in CLIPS:
        tried = (scale.float() * clip).to(scale.dtype)
        tried = torch.where(tried > 0, tried, scale)
        wide = tried.float().unsqueeze(-1)
        codes = torch.clamp(torch.round(cut / wide), scheme.low, scheme.high)
        error = ((cut - codes * wide).square_() * weights).sum(-1)
        best = torch.where(error < least, tried, best)
        least = torch.minimum(error, least)
    return best


def rounded(weight: torch.Tensor, scheme: Scheme, settings: Settings) -> Quantized:
    """A BF16 matrix [N, K] rounded to nearest, all columns alike."""
    import torch

    if isinstance(scheme, Nvfp4Scheme):
        return _fp4(nvfp4.rounded(weight, scheme.dialect, settings))
    alike = torch.ones((1, weight.shape[1]), device=weight.device)
    scale, zero = (parts[0] for parts in _scales(weight[None], alike, scheme, settings))
    if settings.solver == "best" and settings.scales == "search" and scheme.symmetric:
        scale = least_squares(weight, scale, scheme, settings.signs)
    by_llmcompressor = _by_llmcompressor(settings, weight)
    # llm-compressor divides in the weight's dtype on a CPU: 3 to 9 % of codes are not the nearest then.
    # On a GPU its kernel divides in float32 (compressed-tensors, forward_helpers.py, _quantize_kernel).
    wide = weight if by_llmcompressor and scheme.scale_dtype == "BF16" else weight.float()
    g_idx = None
    if scheme.actorder == "group":
        g_idx = torch.arange(weight.shape[1], device=weight.device) // scheme.width(weight.shape[1])
        g_idx = g_idx.to(torch.int32)
    codes = (llmcompressor_backend.coded if by_llmcompressor else coded)(
        wide, scale, None if scheme.symmetric else zero, scheme
    )
    return _meaning(codes, scale, zero, scheme, g_idx)


def _meaning(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    scheme: IntScheme,
    g_idx: torch.Tensor | None,
) -> Quantized:
    """Codes with what they mean."""
    import torch

    zeros = None if scheme.symmetric else zero
    # llm-compressor goes on with products in the scale's dtype, which is BF16 there.
    factor = scale if scheme.scale_dtype == "BF16" else scale.float()
    meant = meaning(codes, factor, zeros, scheme).to(torch.bfloat16)
    return Quantized(codes, scale, zeros, g_idx, meant)


def solved(
    weights: Sequence[torch.Tensor],
    hessians: torch.Tensor,
    scheme: Scheme,
    settings: Settings,
) -> tuple[list[Quantized], list[bool]]:
    """GPTQ of B matrices BF16 [N, K] with Hessians float32 [B, K, K], which are overwritten; and which
    of them were only rounded because their Hessian could not be factorized."""
    import torch

    if isinstance(scheme, Nvfp4Scheme):
        stacked = torch.stack(list(weights))
        found4, failed = nvfp4.solved(stacked, hessians, scheme.dialect, settings)
        return [_fp4(one) for one in found4], [bool(flag) for flag in failed.tolist()]
    columns = weights[0].shape[1]
    means = torch.diagonal(hessians, dim1=-2, dim2=-1)
    order = None
    if scheme.actorder == "group":
        order = torch.argsort(means, dim=-1, descending=True)
        hessians = torch.stack([h[p][:, p] for h, p in zip(hessians, order, strict=True)])
        weights = [w[:, p] for w, p in zip(weights, order, strict=True)]
        means = torch.diagonal(hessians, dim1=-2, dim2=-1)
    means = means.clone()
    stacked = torch.stack(list(weights))
    scale, zero = _scales(stacked, means, scheme, settings)
    ordered = order is not None
    results, bad = _matrices(stacked, hessians, scale, zero, scheme, settings, ordered=ordered)
    made = []
    for number, found in enumerate(results):
        if order is not None:
            back = torch.argsort(order[number])
            groups = torch.arange(columns, device=back.device, dtype=torch.int32)
            groups = torch.div(groups, scheme.width(columns), rounding_mode="floor")
            found = Quantized(
                found.codes[:, back], found.scale, found.zero, groups[back], found.weight[:, back]
            )
        made.append(found)
    return made, [bool(flag) for flag in bad.tolist()]


def _fp4(made: nvfp4.Nvfp4Solution) -> Quantized:
    return Quantized(made.steps, made.scale, None, None, made.weight, float(made.global_scale))


def _matrices(
    weight: torch.Tensor,
    hessians: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    scheme: IntScheme,
    settings: Settings,
    *,
    ordered: bool,
) -> tuple[list[Quantized], torch.Tensor]:
    """Matrices [B, N, K] by the asked solver, from an observer's scales [B, N, G], and fallback flags
    [B]."""
    if settings.solver == "best":
        codes, scale, failed = best(
            weight, hessians, scale, zero, scheme, settings, ordered=ordered
        )
    elif _by_llmcompressor(settings, weight):
        values, failed = llmcompressor_backend.gptq(
            weight.float(), hessians, scale, zero, scheme, settings
        )
        # Divided in float32: in BF16, as compressed-tensors' packer does it, a product of an 8-bit code
        # and a scale is not always told from its neighbour's.
        codes = llmcompressor_backend.coded(
            values, scale, None if scheme.symmetric else zero, scheme
        )
    else:
        codes, failed = parity(weight, hessians, scale, zero, scheme, settings)
    made = [_meaning(*each, scheme, None) for each in zip(codes, scale, zero, strict=True)]
    return made, failed
