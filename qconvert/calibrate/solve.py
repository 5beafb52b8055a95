"""Codes of matrices from their Hessians: by `solver/`, or GPTQ by llm-compressor's own functions.

Of the latter `quantize_weight` and its parts are those of llmcompressor 0.14 (modifiers/gptq/), scales
those of its memoryless_minmax observer, codes those that compressed-tensors 0.19 stores of the result.
What is added: narrow codes (-7 to 7, which AMX kernels take and compressed-tensors has no name for),
scales chosen by weighted error, and `actorder: group`, which llm-compressor no longer has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.settings import CLIPS, Settings
from qconvert.calibrate.solver import nvfp4
from qconvert.calibrate.solver.best import best, least_squares
from qconvert.core.fp4_scheme import Nvfp4Scheme
from qconvert.core.int_scheme import Codes, IntScheme, Scheme

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Quantized:
    """A matrix [N, K] on its device: int8 codes, scale [N, groups] in the scheme's dtype, zero int8 or
    None, g_idx int32 [K] or None; `weight` is what the codes mean, BF16 [N, K]; `own` is NVFP4's scale
    of the whole matrix."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    g_idx: torch.Tensor | None
    weight: torch.Tensor
    own: float | None = None

    def rows(self, start: int, stop: int) -> Quantized:
        zero = None if self.zero is None else self.zero[start:stop]
        return Quantized(
            self.codes[start:stop],
            self.scale[start:stop],
            zero,
            self.g_idx,
            self.weight[start:stop],
            self.own,
        )

    def numpy(self) -> Codes:
        import torch

        def down(tensor: torch.Tensor | None) -> Any:
            if tensor is None or not tensor.is_cuda:
                return None if tensor is None else tensor.contiguous().numpy()
            into = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return into.copy_(tensor).numpy()

        scale, zero, g_idx = down(self.scale.float()), down(self.zero), down(self.g_idx)
        return Codes(down(self.codes), scale, zero, g_idx, self.own)


def args_of(scheme: IntScheme) -> Any:
    """compressed-tensors' QuantizationArgs of a scheme."""
    from compressed_tensors.quantization import QuantizationArgs

    # Groups of alike columns are sorted before they are solved, so the solver has nothing to order.
    order = "static" if scheme.actorder == "static" else None
    common = {"num_bits": scheme.bits, "symmetric": scheme.symmetric, "actorder": order}
    if scheme.group is None:
        return QuantizationArgs(strategy="channel", **common)
    return QuantizationArgs(strategy="group", group_size=scheme.group, **common)


def _scales(
    weight: torch.Tensor, means: torch.Tensor, scheme: IntScheme, *, search: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point [N, groups] of a BF16 weight [N, K]; `means` [K] weigh the columns."""
    import torch
    from llmcompressor.observers import Observer

    dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[scheme.scale_dtype]
    # llm-compressor computes scales in the weight's dtype; others are computed wide and rounded once.
    seen = weight if scheme.scale_dtype == "BF16" else weight.float()
    if scheme.narrow:
        largest = _grouped(seen, scheme.width(weight.shape[1])).abs().amax(-1)
        scale = largest.float() / scheme.high
        zero = torch.zeros_like(scale, dtype=torch.int8)
    else:
        observer = Observer.load_from_registry(
            "memoryless_minmax", base_name="weight", args=args_of(scheme)
        )
        found = observer(seen).get_qparams()
        scale, zero = found["scale"], found["zero_point"]
    scale = scale.to(dtype)
    # A group of zeros, or of less than the dtype can tell from it, still needs something to divide by.
    scale = torch.where(scale > 0, scale, torch.finfo(dtype).eps)
    if search:
        scale = _least_error(weight, means, scale, scheme)
    return scale, zero


def _grouped(values: torch.Tensor, width: int) -> torch.Tensor:
    """[..., K] -> [..., K / width, width]."""
    return values.reshape(*values.shape[:-1], -1, width)


def _least_error(
    weight: torch.Tensor, means: torch.Tensor, scale: torch.Tensor, scheme: IntScheme
) -> torch.Tensor:
    """For each group the part of its scale whose codes lose the least, columns weighted by `means`."""
    import torch

    cut = _grouped(weight.float(), scheme.width(weight.shape[1]))
    weights = _grouped(means.float(), cut.shape[-1])
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
    alike = torch.ones(weight.shape[1], device=weight.device)
    scale, zero = _scales(weight, alike, scheme, search=settings.searches(scheme))
    if settings.solver == "best" and settings.scales == "search" and scheme.symmetric:
        scale = least_squares(weight, scale, scheme, settings.signs)
    # llm-compressor divides in the weight's dtype: 3 to 9 % of codes are not the nearest then.
    theirs = settings.solver == "llmcompressor" and scheme.scale_dtype == "BF16"
    wide = weight if theirs else weight.float()
    g_idx = None
    if scheme.actorder == "group":
        g_idx = torch.arange(weight.shape[1], device=weight.device) // scheme.width(weight.shape[1])
        g_idx = g_idx.to(torch.int32)
    return _coded(wide, scale, zero, scheme, g_idx)


def _coded(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    scheme: IntScheme,
    g_idx: torch.Tensor | None,
) -> Quantized:
    """Codes of values that have been rounded to them already, or are to be, in the values' dtype."""
    import torch
    from compressed_tensors.quantization.lifecycle.forward import quantize

    args = args_of(scheme)
    zeros = None if scheme.symmetric else zero
    codes = quantize(values, scale.to(values.dtype), zeros, args, dtype=torch.int8)
    if scheme.narrow:
        codes.clamp_(min=scheme.low)
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
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    zeros = None if scheme.symmetric else zero
    # llm-compressor goes on with products in the scale's dtype, which is BF16 there.
    factor = scale if scheme.scale_dtype == "BF16" else scale.float()
    meant = dequantize(codes, factor, zeros, args_of(scheme)).to(torch.bfloat16)
    return Quantized(codes, scale, zeros, g_idx, meant)


def weight_of(codes: Codes, scheme: Scheme, device: str) -> torch.Tensor:
    """What codes mean, BF16 [N, K]: to the last bit what `Quantized.weight` of them was."""
    import torch

    def up(array: Any) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(device)

    steps, scale = up(codes.codes), up(codes.scale)
    if isinstance(scheme, Nvfp4Scheme):
        own = torch.tensor([codes.own], dtype=torch.float32, device=device)
        each = nvfp4.factors(scale[None], own, scheme.dialect)[0]
        wide = _grouped(steps.float() / 2, steps.shape[1] // scale.shape[1]) * each.unsqueeze(-1)
        return wide.flatten(1).bfloat16()
    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    scale = scale.to(dtypes[scheme.scale_dtype])
    zero = None if codes.zero is None else up(codes.zero)
    zero = torch.zeros_like(scale, dtype=torch.int8) if zero is None else zero
    if codes.g_idx is None:
        return _meaning(steps, scale, zero, scheme, None).weight
    order = torch.argsort(up(codes.g_idx), stable=True)
    meant = _meaning(steps[:, order], scale, zero, scheme, None).weight
    return meant[:, torch.argsort(order)]


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
    search = settings.searches(scheme)
    means = torch.diagonal(hessians, dim1=-2, dim2=-1)
    order = None
    if scheme.actorder == "group":
        order = torch.argsort(means, dim=-1, descending=True)
        hessians = torch.stack([h[p][:, p] for h, p in zip(hessians, order, strict=True)])
        weights = [w[:, p] for w, p in zip(weights, order, strict=True)]
        means = torch.diagonal(hessians, dim1=-2, dim2=-1)
    means = means.clone()
    pairs = [_scales(w, m, scheme, search=search) for w, m in zip(weights, means, strict=True)]
    scale = torch.stack([s for s, _ in pairs])
    zero = torch.stack([z for _, z in pairs])
    ordered = order is not None
    results, bad = _matrices(weights, hessians, scale, zero, scheme, settings, ordered=ordered)
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


def _fp4(made: nvfp4.Found) -> Quantized:
    return Quantized(made.steps, made.scale, None, None, made.weight, float(made.own))


def _matrices(
    weights: Sequence[torch.Tensor],
    hessians: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    scheme: IntScheme,
    settings: Settings,
    *,
    ordered: bool,
) -> tuple[list[Quantized], torch.Tensor]:
    """Matrices by the asked solver, from an observer's scales [B, N, G], and fallback flags [B]."""
    import torch

    numbers = range(len(weights))
    if settings.solver == "best":
        codes, scale, failed = best(
            torch.stack(list(weights)), hessians, scale, zero, scheme, settings, ordered=ordered
        )
        return [_meaning(codes[n], scale[n], zero[n], scheme, None) for n in numbers], failed
    wide = torch.stack([w.float() for w in weights])
    values, failed = _gptq(wide, hessians, scale, zero, scheme, settings)
    # Divided in float32: in BF16, as compressed-tensors' packer does it, a product of an 8-bit code and
    # a scale is not always told from its neighbour's.
    return [_coded(values[n], scale[n], zero[n], scheme, None) for n in numbers], failed


def _gptq(
    wide: torch.Tensor,
    hessians: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    scheme: IntScheme,
    settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 values [B, N, K] that codes stand for, and fallback flags [B]."""
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    if scheme.narrow:
        return _narrow_gptq(wide, hessians, scale, scheme, settings)
    found: Any = quantize_weight(
        weights=wide,
        hessians=hessians,
        scale=scale,
        zero_point=zero,
        global_scale=None,
        quant_args=args_of(scheme),
        blocksize=settings.block_size,
        percdamp=settings.dampening_frac,
    )
    values, _, failed = found
    return values, failed


def _narrow_gptq(
    wide: torch.Tensor,
    hessians: torch.Tensor,
    scale: torch.Tensor,
    scheme: IntScheme,
    settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GPTQ with codes that leave out the lowest one, so that the error of clamping is propagated too."""
    import torch
    from llmcompressor.modifiers.gptq.helpers import apply_activation_ordering, factorize_hessian

    batch, columns = wide.shape[0], wide.shape[-1]
    order = args_of(scheme).actorder
    wide, hessians, perm = apply_activation_ordering(wide, hessians, order)
    failed = torch.zeros(batch, dtype=torch.bool, device=wide.device)
    inverse = factorize_hessian(wide, hessians, settings.dampening_frac, failed)
    where = (
        perm if perm is not None else torch.arange(columns, device=wide.device).expand(batch, -1)
    )
    groups = torch.div(where, scheme.width(columns), rounding_mode="floor")
    scales = scale.float()
    for start in range(0, columns, settings.block_size):
        stop = min(start + settings.block_size, columns)
        block = wide[:, :, start:stop].clone()
        errors = torch.empty_like(block)
        factors = inverse[:, start:stop, start:stop]
        index = groups[:, None, start:stop].expand(-1, scales.shape[1], -1)
        spread = torch.gather(scales, -1, index)
        for i in range(stop - start):
            column, factor = block[:, :, i], spread[:, :, i]
            value = torch.clamp(torch.round(column / factor), scheme.low, scheme.high) * factor
            error = (column - value) / factors[:, i, i, None]
            wide[:, :, start + i] = value
            errors[:, :, i] = error
            block[:, :, i:] -= error.unsqueeze(-1) * factors[:, i, None, i:]
        wide[:, :, stop:] -= torch.bmm(errors, inverse[:, start:stop, stop:])
    if perm is not None:
        back = torch.argsort(perm, dim=-1).unsqueeze(-2).expand_as(wide)
        wide = torch.gather(wide, -1, back)
    return wide, failed
