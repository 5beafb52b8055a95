"""llm-compressor's own functions, which the solver "llmcompressor" calls on a CPU: its codes are theirs.

Of llmcompressor the memoryless_minmax observer and `quantize_weight` (modifiers/gptq/) with its
parts, of compressed-tensors `quantize`. Importing them takes 1 to 4 s and 110 MB: on a GPU, and
for other solvers, `solve.py` and `solver/` compute the same. What is added are narrow codes (-7 to
7), which compressed-tensors has no name for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qconvert.calibrate.settings import Settings, Solver
from qconvert.core.int_scheme import IntScheme

if TYPE_CHECKING:
    import torch


def are_asked(solver: Solver, device: str) -> bool:
    """Return whether matrices are solved by these functions on a device, by torch's name of it."""
    return solver == "llmcompressor" and device.partition(":")[0] == "cpu"


def load() -> None:
    """Import all of them, so that what they take can be counted."""
    import llmcompressor.modifiers.gptq.gptq_quantize
    import llmcompressor.observers  # noqa: F401


def args_of(scheme: IntScheme) -> Any:
    """compressed-tensors' QuantizationArgs of a scheme."""
    from compressed_tensors.quantization import QuantizationArgs

    # Groups of alike columns are sorted before they are solved, so the solver has nothing to order.
    order = "static" if scheme.actorder == "static" else None
    common = {"num_bits": scheme.bits, "symmetric": scheme.symmetric, "actorder": order}
    if scheme.group is None:
        return QuantizationArgs(strategy="channel", **common)
    return QuantizationArgs(strategy="group", group_size=scheme.group, **common)


def observed(weight: torch.Tensor, scheme: IntScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [N, G] of a matrix [N, K], computed in its dtype."""
    from llmcompressor.observers import Observer

    observer = Observer.load_from_registry(
        "memoryless_minmax", base_name="weight", args=args_of(scheme)
    )
    found = observer(weight).get_qparams()
    return found["scale"], found["zero_point"]


def coded(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, scheme: IntScheme
) -> torch.Tensor:
    """Codes int8 [N, K] of values [N, K], divided in their dtype."""
    import torch
    from compressed_tensors.quantization.lifecycle.forward import quantize

    codes: torch.Tensor = quantize(
        values, scale.to(values.dtype), zero, args_of(scheme), dtype=torch.int8
    )
    return codes.clamp_(min=scheme.low) if scheme.narrow else codes


def gptq(
    wide: torch.Tensor,
    hessians: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    scheme: IntScheme,
    settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 values [B, N, K] that codes stand for, of matrices of that shape, which are overwritten
    as their Hessians are, and fallback flags [B]."""
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
