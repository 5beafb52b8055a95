"""Numbers that a served model must compute: products of dequantized weights in float32, and logits of
transformers.

Nothing here is of a runtime, or of qconvert beyond its `dequant`, which is compared with other libraries
elsewhere (tests/test_peers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

hf: Any = transformers
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Quantizer = Callable[[Tensor], Tensor]

# Parts of what runtimes multiply as one, in the order of its rows.
_FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_ENOUGH = 8  # tokens, for a median


@dataclass(frozen=True, slots=True)
class Seen:
    """Inputs [tokens, K] and outputs [tokens, N] of one module of a served model."""

    module: str
    kind: Literal["linear", "experts"]
    decoding: bool
    inputs: Tensor
    outputs: Tensor


@dataclass(frozen=True, slots=True)
class Watched:
    """The first prefill and the first decoding step of each module of a model that answers `prompts`
    prompts of `tokens` tokens in all."""

    prompts: int
    tokens: int
    found: dict[tuple[str, bool], Seen] = field(default_factory=dict)

    def keep(
        self, name: str, kind: Literal["linear", "experts"], inputs: Any, outputs: Any
    ) -> None:
        """Note what a module was given and what it made, if it is one of these steps."""
        if not (isinstance(inputs, Tensor) and isinstance(outputs, Tensor)) or inputs.dim() != 2:
            return
        key = name, inputs.shape[0] == self.prompts
        if inputs.shape[0] in (self.prompts, self.tokens) and key not in self.found:
            self.found[key] = Seen(
                name, kind, key[1], inputs.detach().clone(), outputs.detach().clone()
            )


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens [prompts, new] of a folder, log-probabilities [prompts, last tokens, vocabulary],
    the last of them of the last new token, the modules that were seen, and the class and kernel of each
    kind of module."""

    tokens: Tensor
    log_probabilities: Tensor
    seen: list[Seen]
    kernels: Mapping[str, str]


class Weights:
    """Tensors of a folder in float32 on the GPU, by the names that checkpoints have."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            opened: Any = safe_open(path, "pt")
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def get(self, name: str) -> Tensor | None:
        found = self._files.get(name)
        return None if found is None else found.get_tensor(name).float().to(DEVICE)

    def __getitem__(self, name: str) -> Tensor:
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def linear(self, module: str) -> Tensor | None:
        """The weight [N, K] of a module, its parts one below another where it is fused."""
        return self._whole(module, "weight")

    def bias(self, module: str) -> Tensor | None:
        """The bias [N] of a module, as its weight."""
        return self._whole(module, "bias")

    def _whole(self, module: str, parameter: str) -> Tensor | None:
        for name in _names(module):
            if (whole := self.get(f"{name}.{parameter}")) is not None:
                return whole
            above, _, last = name.rpartition(".")
            parts = [self.get(f"{above}.{part}.{parameter}") for part in _FUSED.get(last, ())]
            found = [part for part in parts if part is not None]
            if found and len(found) == len(parts):
                return torch.cat(found)
        return None

    def experts(self, module: str) -> tuple[Tensor, Tensor] | None:
        """The weights [E, 2 I, K] and [E, K, I] of a module of experts, gate above up."""
        if (stacked := self.get(f"{module}.gate_up_proj")) is not None:
            return stacked, self[f"{module}.down_proj"]
        first: list[Tensor] = []
        second: list[Tensor] = []
        while (gate := self.get(f"{module}.{len(first)}.gate_proj.weight")) is not None:
            at = f"{module}.{len(first)}"
            first.append(torch.cat([gate, self[f"{at}.up_proj.weight"]]))
            second.append(self[f"{at}.down_proj.weight"])
        return (torch.stack(first), torch.stack(second)) if first else None


def _names(module: str) -> Iterable[str]:
    """The names that a checkpoint may have for a runtime's module."""
    yield module
    yield module.removeprefix("model.")
    yield module.replace("language_model.model.", "model.language_model.")
    yield module.replace(".attn.", ".self_attn.")  # vLLM's gpt-oss
    above, _, last = module.rpartition(".")
    yield f"{above}.self_attn.{last}"  # sglang's Qwen3-Next and Qwen3.5


def _groups(values: Tensor, size: int | None) -> Tensor:
    return values if size is None else values.reshape(*values.shape[:-1], -1, size)


def _fp8(
    values: Tensor, size: int | None = None, *, power: bool = False, times: bool = False
) -> Tensor:
    """Values under a scale for each `size` of a token, or all of it. Kernels divide by the scale, or
    multiply by its reciprocal (`times`): of a value half-way between two codes they take different
    ones, and one such code of a large value is 0.01 of a token's output."""
    parts = _groups(values, size)
    scale = (parts.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    if power:
        scale = scale.log2().ceil().exp2()
    scaled = parts * (1 / scale) if times else parts / scale
    made = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return made.reshape(values.shape)


def _fp8_under(values: Tensor, scale: float | Tensor) -> Tensor:
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def _int8(values: Tensor) -> Tensor:
    scale = (values.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12)
    return (values / scale).round().clamp(-128, 127) * scale


QUANTIZERS: Mapping[str, Quantizer] = {
    "bf16": lambda values: values,
    "fp8-token": _fp8,
    "fp8-128": lambda values: _fp8(values, 128),
    "fp8-128-times": lambda values: _fp8(values, 128, times=True),
    "fp8-128-power": lambda values: _fp8(values, 128, power=True),
    "fp8-tensor": lambda values: _fp8_under(values, (values.abs().max() / 448).clamp(min=1e-12)),
    "fp8-0.05": lambda values: _fp8_under(values, 0.05),
    "int8-token": _int8,
}


def _errors(found: Tensor, wanted: Tensor) -> Tensor:
    """|found - wanted| / |wanted| of each token, [tokens]."""
    sizes: Tensor = wanted.norm(dim=-1).clamp(min=1e-9)
    lost: Tensor = torch.linalg.vector_norm(found - wanted, dim=-1)
    return lost / sizes


def module_error(
    seen: Seen, weights: Weights, config: Mapping[str, Any], inputs: Iterable[str]
) -> float | None:
    """The error of a module against its dequantized weights, the least over the quantizations of its
    inputs that `inputs` name; None for a module whose weights are not in the folder.

    Of a linear layer it is the median over tokens; of experts the largest of the medians over the tokens
    of one expert, since a wrong expert is seen by few tokens."""
    given, made = seen.inputs.to(DEVICE).float(), seen.outputs.to(DEVICE).float()
    if seen.kind == "linear":
        weight, bias = weights.linear(seen.module), weights.bias(seen.module)
        if weight is None or weight.shape != (made.shape[-1], given.shape[-1]):
            return None
        return min(
            float(_errors(made, functional.linear(QUANTIZERS[name](given), weight, bias)).median())
            for name in inputs
        )
    if (block := Experts.of(weights, seen.module, config)) is None:
        return None
    factors, chosen = block.routed(given)
    errors = [_errors(made, block(given, factors, chosen, QUANTIZERS[name])) for name in inputs]
    return min(_of_worst_expert(one, chosen) for one in errors)


def _of_worst_expert(errors: Tensor, chosen: Tensor) -> float:
    """The largest median of errors [tokens] over the tokens that chose an expert [tokens, k], of experts
    that enough tokens chose; over all tokens where there are few."""
    medians = [errors.median()]
    for number in range(int(chosen.max()) + 1):
        own = errors[(chosen == number).any(-1)]
        if len(own) >= _ENOUGH:
            medians.append(own.median())
    return float(torch.stack(medians).max())


@dataclass(frozen=True, slots=True)
class Experts:
    """A block of routed experts, with shared ones where the runtime adds them in the same module.
    `first` [E, 2 I, K] are gate above up, `second` [E, K, I]; of gpt-oss also biases
    and its own activation."""

    weights: Weights
    above: str
    config: Mapping[str, Any]
    first: Tensor
    second: Tensor
    biases: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, weights: Weights, module: str, config: Mapping[str, Any]) -> Experts | None:
        """The experts of a runtime's module, None where the folder has none there."""
        above = module.rpartition(".")[0]
        if (
            weights.get(f"{above}.router.weight") is not None
        ):  # gpt-oss: [E, inputs, outputs], interleaved
            first = weights[f"{module}.gate_up_proj"].transpose(1, 2)
            bias = weights[f"{module}.gate_up_proj_bias"]
            return cls(
                weights, above, config, torch.cat([first[:, ::2], first[:, 1::2]], 1),
                weights[f"{module}.down_proj"].transpose(1, 2),
                (torch.cat([bias[:, ::2], bias[:, 1::2]], 1), weights[f"{module}.down_proj_bias"]),
            )  # fmt: skip
        found = weights.experts(module)
        return None if found is None else cls(weights, above, config, *found)

    def routed(self, given: Tensor) -> tuple[Tensor, Tensor]:
        """The factor and the number of each token's experts, [tokens, k]; logits are bf16, as in
        runtimes."""
        count, name = self.config["num_experts_per_tok"], f"{self.above}.gate"
        if self.biases is not None:
            name = f"{self.above}.router"
            bias = self.weights[f"{name}.bias"].bfloat16()
            router = self.weights[f"{name}.weight"].bfloat16()
            top = functional.linear(given.bfloat16(), router, bias).float().topk(count, -1)
            return top.values.softmax(-1), top.indices
        router = self.weights[f"{name}.weight"].bfloat16()
        logits = functional.linear(given.bfloat16(), router).float()
        correction = self.weights.get(f"{name}.e_score_correction_bias")
        if correction is None:
            top = logits.softmax(-1).topk(count, -1)
            return top.values / top.values.sum(-1, keepdim=True), top.indices
        scores = logits.sigmoid()
        chosen = (scores + correction).topk(count, -1).indices
        factors = scores.gather(-1, chosen)
        factors = factors / factors.sum(-1, keepdim=True)
        return factors * self.config.get("routed_scaling_factor", 1.0), chosen

    def __call__(
        self, given: Tensor, factors: Tensor, chosen: Tensor, quantizer: Quantizer
    ) -> Tensor:
        """Outputs [tokens, K]."""
        inputs, made = quantizer(given), self._shared(given, quantizer)
        for number in range(self.first.shape[0]):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            if not len(token):
                continue
            biases = (
                (None, None)
                if self.biases is None
                else (self.biases[0][number], self.biases[1][number])
            )
            both = functional.linear(inputs[token], self.first[number], biases[0])
            hidden = quantizer(self._activated(*both.chunk(2, -1)))
            added = functional.linear(hidden, self.second[number], biases[1])
            made.index_add_(0, token, added * factors[token, slot].unsqueeze(-1))
        return made

    def _activated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.biases is None:
            return functional.silu(gate) * up
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * (1.702 * gate).sigmoid()

    def _shared(self, given: Tensor, quantizer: Quantizer) -> Tensor:
        """Outputs of shared experts, zeros where there are none."""
        for name in (f"{self.above}.shared_expert", f"{self.above}.shared_experts"):
            parts = [
                self.weights.get(f"{name}.{part}_proj.weight") for part in ("gate", "up", "down")
            ]
            gate, up, down = parts
            if gate is None or up is None or down is None:
                continue
            inputs = quantizer(given)
            hidden = functional.silu(functional.linear(inputs, gate)) * functional.linear(
                inputs, up
            )
            made = functional.linear(quantizer(hidden), down)
            opened = self.weights.get(f"{self.above}.shared_expert_gate.weight")
            return made if opened is None else made * functional.linear(given, opened).sigmoid()
        return torch.zeros_like(given)


def log_probabilities(folder: Path, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Log-probabilities [prompts, tokens, vocabulary] of transformers, in float32."""
    model = hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    model = model.to(DEVICE).eval()
    with torch.no_grad():
        logits = model(input_ids=tokens.to(DEVICE), use_cache=False).logits
    return torch.log_softmax(logits.float(), -1)


def divergence(wanted: Tensor, found: Tensor) -> Tensor:
    """KL of each token's distribution, [prompts, tokens]."""
    return (wanted.exp() * (wanted - found)).sum(-1)
