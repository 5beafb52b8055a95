"""Activations as runtimes quantize them beside a format's weights: what a config states of a module, and
a layer of transformers that computes so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validators.reading.quantization import group_of, judged, scheme_of
from qconvert.validators.reading.stated_schemes import pair

if TYPE_CHECKING:
    import torch

    from qconvert.calibrate.model import Layer
    from qconvert.evaluate.side import LoadedSide, Rounds

# The type of codes, and how many columns share a scale (0: all of a token's).
Inputs = tuple[Literal["fp8", "int8", "fp4"], int]
BITS: Mapping[str, int] = {"fp8": 8, "int8": 8, "fp4": 4}
_LARGEST: Mapping[str, float] = {"fp8": 448.0, "int8": 127.0, "fp4": 6.0}
_KINDS: Mapping[tuple[object, object], Literal["fp8", "int8", "fp4"]] = {
    ("float", 8): "fp8", ("int", 8): "int8", ("float", 4): "fp4",
}  # fmt: skip

# Of all rows that kt-kernel's AMX kernels multiply (0.7.2, `operators/amx/la/amx_buffers.hpp`).
_OF_CPU: Inputs = ("int8", 0)


def stated_inputs(checkpoint: Checkpoint, module: str) -> Inputs | None:
    """Return how activations are quantized that a module's weight is multiplied with, by the folder's
    block; None where they are not, or where nothing that is read here states it. Scales that are stored
    (static) are taken as those of each token."""
    weights = scheme_of(checkpoint, module)
    block = judged(checkpoint.quantization_configs)
    if weights is None or block is None:
        return None
    if block.method == "compressed-tensors":
        stated = (group_of(checkpoint, module) or {}).get("input_activations")
        if not isinstance(stated, Mapping):
            return None
        kind = _KINDS.get((stated.get("type", "int"), stated.get("num_bits", 8)))
        size = stated.get("group_size")
        return None if kind is None else (kind, size if type(size) is int and size > 0 else 0)
    if "A16" in str(block.block.get("quant_algo")) or weights.get("type") != "float":
        return None
    if weights.get("num_bits") == 4:
        return ("fp4", 16) if weights.get("strategy") == "tensor_group" else None
    sizes = pair(weights.get("block_structure"))
    return "fp8", sizes[1] if sizes else 0


@dataclass(frozen=True)
class StatedInputs:
    """Statements of a folder's config about modules; `found` keeps those that were asked for."""

    checkpoint: Checkpoint
    found: dict[str, Inputs | None] = field(default_factory=dict)

    def __call__(self, module: str) -> Inputs | None:
        if module not in self.found:
            self.found[module] = stated_inputs(self.checkpoint, module)
        return self.found[module]


def rounding(inputs: Inputs | None) -> Rounds | None:
    """Return what a runtime makes of activations [T, N] that it quantizes: codes of a scale for each
    token, or some columns of it, times the scale, which stays float32. FP8: vLLM,
    `csrc/quantization/fp8`, amax / 448; INT8: amax / 127, to the nearest; FP4: amax / 6, to E2M1."""
    if inputs is None:
        return None
    kind, columns = inputs

    def rounds(rows: torch.Tensor) -> torch.Tensor:
        import torch

        from qconvert.calibrate.solver.nvfp4 import e2m1

        width = rows.shape[-1]
        size = columns or width
        padded = torch.nn.functional.pad(rows.float(), (0, -width % size))
        parts = padded.reshape(*padded.shape[:-1], -1, size)
        most = _LARGEST[kind]
        scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most
        codes = parts / scale
        if kind == "fp8":
            codes = codes.clamp(-most, most).to(torch.float8_e4m3fn).float()
        elif kind == "fp4":
            codes = e2m1(codes)
        else:
            codes = codes.round()
        found: torch.Tensor = (codes * scale).flatten(-2)[..., :width].to(rows.dtype)
        return found

    return rounds


@contextmanager
def before(linears: Iterable[tuple[Any, Rounds | None]]) -> Iterator[None]:
    """Within this, what goes into linears of torch is rounded."""
    hooks = [
        linear.register_forward_pre_hook(
            lambda _, given, rounds=rounds: (rounds(given[0]), *given[1:])
        )
        for linear, rounds in linears
        if rounds is not None
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def as_stated(
    opened: LoadedSide, layer: Layer, inputs: Callable[[str], Inputs | None]
) -> Iterator[LoadedSide]:
    """Within this, a layer's linears and the experts of the side that is given get activations that are
    rounded as `inputs` says of their modules, experts for CPU kernels as those round them."""
    number = layer.number
    linears = (
        (layer.module.get_submodule(name), rounding(inputs(module)))
        for name, module in opened.layers.model.linears(number)
    )
    experts = (one.module for at, one in opened.projections.items() if at[0] == number)
    first = next(experts, None)
    of_experts = _OF_CPU if opened.side.amx else None if first is None else inputs(first)
    with before(linears):
        yield replace(opened, rounds=rounding(of_experts))
