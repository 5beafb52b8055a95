"""Parameters of a model after a load, told by bytes: every byte of a parameter is marked before it, and
what keeps its mark was never written."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .flow import Flow

# Bytes of FP8 have the mark's value by chance once in 256, wider types never.
_MARK = 0xA5
_BY_CHANCE = {1: 0.05}
_NEVER = 0.0005
# Filled by the class itself, not by the checkpoint.
_COMPUTED = ("rotary", "cos_sin")
# Scales of attention in FP8, which few checkpoints have; what is not given counts as 1.
_WITH_DEFAULTS = (
    ".k_scale", ".v_scale", ".q_scale", ".prob_scale",
    ".k_zero_point", ".v_zero_point", ".q_zero_point",
)  # fmt: skip

# Input scales of experts: loaders of compressed-tensors' FP8 take what is not 1 for one that another
# matrix brought, so that these keep their 1, and are unwritten while all do.
_ONES = ("w13_input_scale", "w2_input_scale")


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.data for n, p in model.named_parameters(remove_duplicate=False) if p.numel()}


def mark(model: torch.nn.Module) -> None:
    """Set every byte of every parameter to the mark."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel() and not (name.endswith(_ONES) and (parameter.data == 1).all()):
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
            parameter.data.reshape(-1).view(torch.uint8).fill_(_MARK)


def unwritten(model: torch.nn.Module, before: Iterable[str]) -> list[str]:
    """Parameters of which more elements are as they were marked than chance explains."""
    found, now = [], parameters(model)
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for name in before:
        if name in now and not has_default(name):
            if name.endswith(_ONES) and (now[name] == 1).all():
                found.append(name)
                continue
            size = now[name].element_size()
            marked = int.from_bytes(bytes([_MARK] * size), sys.byteorder, signed=size > 1)
            same = (_bytes_of(now[name]).view(widths[size]) == marked).float().mean().item()
            if same > _BY_CHANCE.get(size, _NEVER):
                found.append(name)
    return found


def hashes(model: torch.nn.Module) -> dict[str, list[Any]]:
    """Type, shape and digest of every parameter and buffer."""
    return {
        name: [
            str(value.dtype).removeprefix("torch."),
            list(value.shape),
            hashlib.sha256(_bytes_of(value).numpy().tobytes()).hexdigest()[:16],
        ]
        for name, value in stored(model).items()
    }


def stored(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that a checkpoint may fill."""
    kept = model.state_dict()  # without buffers that a class computes for itself
    buffers = {name: value for name, value in model.named_buffers() if name in kept}
    return {
        name: value
        for name, value in {**parameters(model), **buffers}.items()
        if value.numel() and not any(word in name for word in _COMPUTED)
    }


def has_default(name: str) -> bool:
    """Tell whether a parameter may be left as it was made."""
    return name.endswith(_WITH_DEFAULTS)


def empty(model: torch.nn.Module) -> list[str]:
    """Parameters without an element: a rank whose share of a group of scales is none has such."""
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not parameter.numel()]


def schemes(model: torch.nn.Module) -> dict[str, str]:
    """Methods with which modules load their weights."""
    found = {}
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        scheme: Any = getattr(module, "scheme", None)
        if method is not None:
            own = f"[{type(scheme).__name__}]" if scheme is not None else ""
            found[name] = type(method).__name__ + own
    return found


class ByBytes:
    """A load whose weights are read: what of them reached a parameter, told by bytes."""

    def __init__(self) -> None:
        self._flow = Flow()
        self._before: list[str] = []

    def begin(self, model: torch.nn.Module) -> None:
        """Mark a model's parameters, and follow weights from now on."""
        self._before = list(parameters(model))
        mark(model)
        self._flow.install()

    def handed(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as a loader takes them."""
        return self._flow.handed(weights)

    def tell(self, model: torch.nn.Module, told: Callable[[str, Any], None]) -> None:
        """Tell what was written, and what was read of the folder."""
        told("unwritten", unwritten(model, self._before))
        told("unused", self._flow.unused)
        told("parameters", hashes(model))
