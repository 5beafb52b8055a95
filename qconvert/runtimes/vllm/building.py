"""A rank's parameters while a class of vLLM is built."""

from __future__ import annotations

from dataclasses import dataclass

from qconvert.runtimes.loading.building import RankBuild
from qconvert.runtimes.loading.parameters import (
    Experts,
    Kind,
    Linear,
    Parameter,
    Whole,
    Wrapped,
)
from qconvert.runtimes.loading.schemes import Named, Scheme
from qconvert.runtimes.vllm.schemes import LinearPart, expert_part


@dataclass
class Rank(RankBuild):
    """With vLLM's ways to put a tensor into a parameter."""

    def linear(
        self,
        module: str,
        kind: Kind,
        inputs: int,
        *outputs: int,
        asked: str = "",
        scheme: Scheme | None = None,
        bias: bool = False,
        wrapped: Wrapped = "",
        replicas: int = 1,
        whole: bool = False,
    ) -> Scheme:
        made = RankBuild.linear(
            self, module, kind, inputs, *outputs, asked=asked, scheme=scheme, bias=bias,
            replicas=replicas, whole=whole,
        )  # fmt: skip
        if bias:
            parameter = self.parameters[f"{module}.bias"]
            parameter.slot = _own(parameter)
        return made

    def cache_scales(self, module: str, *, latent: bool = False) -> None:
        """Scales of attention, 1 unless given; modelopt's methods alone have those of latent attention
        (their get_quant_method)."""
        if latent and not self.quantization.name.startswith("modelopt"):
            return
        if self.quantization.name == "compressed-tensors":
            for which in ("k", "v", "q"):
                for name, dtype in (("scale", "F32"), ("zero_point", self.dtype)):
                    made = Parameter(dtype, (1,), Whole(), needed=False, default=True)
                    self.parameters[f"{module}.{which}_{name}"] = made
        elif self.quantization.cache:
            for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):
                made = Parameter(self.dtype, (), Whole(), needed=False, default=True)
                self.parameters[f"{module}.{name}"] = made

    def _add(self, module: str, named: Named) -> None:
        RankBuild._add(self, module, ((name, _converted(made)) for name, made in named))


def _own(parameter: Parameter) -> LinearPart:
    slot = parameter.slot
    assert isinstance(slot, Linear)
    if isinstance(slot, LinearPart):
        return slot
    return LinearPart(slot.layout, slot.role, slot.block, slot.packed)


def _converted(parameter: Parameter) -> Parameter:
    """The same parameter with vLLM's way to put a tensor into it."""
    if isinstance(parameter.slot, Linear):
        parameter.slot = _own(parameter)
    elif isinstance(parameter.slot, Experts):
        parameter.slot = expert_part(parameter)
    return parameter
