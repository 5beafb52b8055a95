"""Ways in which the classes of vLLM find the parameter of a tensor. Most hand their tensors to one
loader that walks along the modules and ends the load where a name leads nowhere; DeepSeek's looks names
up itself.

Read in vLLM: `models/utils.py` (WeightsMapper, AutoWeightsLoader), `layers/linear.py`
(load_weights), `layers/fused_moe/routed_experts.py` (load_weights), `models/deepseek_v2.py`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from qconvert.core.dtypes import TensorType
from qconvert.runtimes.loading.load_weights import PASSED, Found, Target
from qconvert.runtimes.loading.parameters import Shard
from qconvert.runtimes.loading.setting import LoadRefused

_EXPERT = re.compile(r"experts\.([0-9]{1,6})\.(gate|down|up)_proj\.")
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,6})(?:\.|$)")
_PARTS: dict[str, Literal["w1", "w2", "w3"]] = {"gate": "w1", "down": "w2", "up": "w3"}
_ROTARY = (
    "rotary_pos_emb.inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached",
)  # fmt: skip
# What a quantized model may lack of attention.
_OF_CACHES = (
    ".q_scale", ".k_scale", ".v_scale", ".q_zero_point", ".k_zero_point", ".v_zero_point",
)  # fmt: skip
# What every quantization config rewrites, the first that fits (base_config.py, get_cache_scale_mapper).
_SCALES_OF_CACHES = (
    (
        re.compile(r"\.self_attn\.(?:[kv]|qkv|qkqkv)_proj\.([kv])_scale$"),
        r".self_attn.attn.\1_scale",
    ),
    (re.compile(r"(?<!\.attn)\.([qkv])_(scale|zero_point)$"), r".attn.\1_\2"),
)
Stacked = Sequence[tuple[str, str, Shard]]
QKV: Stacked = (
    (".q_proj", ".qkv_proj", "q"), (".k_proj", ".qkv_proj", "k"), (".v_proj", ".qkv_proj", "v"),
)  # fmt: skip
GATE_UP: Stacked = (
    (".mlp.gate_proj", ".mlp.gate_up_proj", 0), (".mlp.up_proj", ".mlp.gate_up_proj", 1),
)  # fmt: skip
GDN: Stacked = (
    (".in_proj_qkv", ".in_proj_qkvz", (0, 1, 2)), (".in_proj_z", ".in_proj_qkvz", 3),
    (".in_proj_b", ".in_proj_ba", 0), (".in_proj_a", ".in_proj_ba", 1),
)  # fmt: skip

LATENT: Stacked = (
    ("gate_proj", "gate_up_proj", 0), ("up_proj", "gate_up_proj", 1),
    ("q_a_proj", "fused_qkv_a_proj", 0), ("kv_a_proj_with_mqa", "fused_qkv_a_proj", 1),
)  # fmt: skip


def gate_up_of(module: str) -> Stacked:
    """The same of shared experts."""
    both = f".{module}.gate_up_proj"
    return (f".{module}.gate_proj", both, 0), (f".{module}.up_proj", both, 1)


@dataclass
class Walk:
    """AutoWeightsLoader. `fused`: modules of several parts; `absent`: modules of other stages, `same`:
    names of parameters that another holds; `whole`: all layers of the model; `prefixes`: what names
    begin with and are rewritten to, None if they are dropped; `root`: where stacked names lie."""

    parameters: Container[str]
    experts: int
    fused: Container[str]
    modules: Container[str]
    layers: range
    whole: range
    prefixes: Sequence[tuple[str, str | None]] = ()
    stacks: Stacked = ()
    root: str = "model."
    absent: Sequence[str] = ()
    same: Container[str] = ()
    spare: tuple[str, ...] = ()
    quantized: bool = False
    drafts: range = range(0)
    missing: list[str] = field(default_factory=list)
    stacked: bool = False

    def find(self, tensor: str, stored: TensorType) -> Found:
        mapped = self._mapped(tensor)
        if mapped is None or mapped in self.same:
            return PASSED
        name, shard = mapped, None
        if name.startswith(self.root):
            if self._of_draft(name):
                return PASSED
            found = self._stacked(name)
            if found is None:
                return PASSED
            name, shard = found
        if self._elsewhere(name):
            return PASSED
        head, experts, _ = name.partition(".experts.")
        if experts and f"{head}.experts" in self.modules:
            return self._expert(name, stored)
        module, _, leaf = name.rpartition(".")
        if module in self.fused:
            if name in self.parameters:
                return (Target(name, shard),)
            if leaf == "bias":
                return PASSED
            raise LoadRefused(
                "AttributeError", "has no attribute 'data'", tensor,
                f"{module} has no parameter {leaf}: it is built as if stored in another form",
            )  # fmt: skip
        if name in self.parameters:
            return (Target(name),)
        return self._nowhere(tensor, name)

    def _mapped(self, name: str) -> str | None:
        for old, new in self.prefixes:
            if name.startswith(old):
                if new is None:
                    return None
                name = name.replace(old, new, 1)
        if any(part in name for part in _ROTARY):
            return None
        if not self.quantized:
            return name
        for pattern, replaced in _SCALES_OF_CACHES:
            name = pattern.sub(replaced, name)
        return None if name.endswith(".g_idx") else name

    def _stacked(self, name: str) -> tuple[str, Shard] | None:
        inner, shard = f".{name.removeprefix(self.root)}", None
        for part, whole, number in self.stacks:
            if part in inner:
                inner, shard = inner.replace(part, whole, 1), number
        return self.root + inner[1:], shard

    def _of_draft(self, name: str) -> bool:
        match = _LAYER.search(name)
        return match is not None and int(match[1]) in self.drafts

    def _elsewhere(self, name: str) -> bool:
        """Tell whether a tensor is of a module of another stage."""
        if any(name.startswith(f"{module}.") for module in self.absent):
            return True
        match = _LAYER.search(name)
        if match is None or not name.startswith(f"{self.root}layers."):
            return False
        number = int(match[1])
        return number in self.whole and number not in self.layers

    def _expert(self, name: str, stored: TensorType) -> Found:
        head, _, rest = name.rpartition("experts.")
        base = f"{head}experts.routed_experts."
        match = _EXPERT.search(name)
        if match is not None and int(match[1]) < self.experts:
            which, tail = _PARTS[match[2]], name[match.end() :]
            parameter = f"{base}{'w2' if which == 'w2' else 'w13'}_{tail}"
            if parameter not in self.parameters:
                if tail == "bias":
                    return PASSED
                self._no_parameter(name, parameter)
            return (Target(parameter, (int(match[1]), which)),)
        if len(stored.shape) != 3:
            return PASSED
        for part, leaf in (("gate_up_proj", "w13_weight"), ("down_proj", "w2_weight")):
            if rest.startswith(part):
                self.stacked = True
                parameter = base + leaf + rest.removeprefix(part)
                if parameter not in self.parameters:
                    self._no_parameter(name, parameter)
                return self._all_experts(parameter, part, stored)
        return PASSED

    def _no_parameter(self, name: str, parameter: str) -> None:
        leaf = parameter.rpartition(".")[2]
        raise LoadRefused(
            "AttributeError", f"has no parameter {leaf!r} for checkpoint weight", name,
            f"the experts have no parameter {leaf}: they are built as if stored in another form",
        )  # fmt: skip

    def _all_experts(self, parameter: str, part: str, stored: TensorType) -> Found:
        numbers, inner = range(stored.shape[0]), stored.shape[1:]
        if part == "down_proj":
            return [Target(parameter, (i, "w2"), inner) for i in numbers]
        half = (inner[0] // 2, *inner[1:])
        return [Target(parameter, (i, which), half) for which in ("w1", "w3") for i in numbers]

    def _nowhere(self, tensor: str, name: str) -> Found:
        """Ends the load, unless the name has an end that a class expects."""
        ends = (*self.spare, ".bias", *(_OF_CACHES if self.quantized else ()))
        parts, found = name.split("."), ""
        for number in range(1, len(parts) + 1):
            found = ".".join(parts[:number])
            if found not in self.modules:
                break
        if found.endswith(ends) or f"{found}.".endswith(ends):
            return PASSED
        inner = found.removeprefix("language_model.").removeprefix("model.")
        if found in self.parameters:
            raise LoadRefused(
                "ValueError", "Attempted to load nested weight", tensor, f"{found} is a parameter"
            )
        raise LoadRefused(
            "ValueError", f"There is no module or parameter named {inner!r}", tensor,
            f"the class builds no {found}, and ends the load where it finds none",
        )  # fmt: skip


@dataclass
class DeepSeek:
    """A lookup of its own: parts that are fused, experts, then the name itself, which must be there."""

    parameters: Container[str]
    experts: int
    layers: range
    whole: range
    absent: Sequence[str]
    drafts: range
    quantized: bool = False
    missing: list[str] = field(default_factory=list)
    stacked: bool = False
    same: Mapping[str, str] = field(default_factory=dict)
    parts: Stacked = LATENT

    def find(self, tensor: str, stored: TensorType) -> Found:
        name = tensor
        if self.quantized and name.endswith(".g_idx"):
            return PASSED
        if any(part in name for part in _ROTARY) or ".indexer." in name:
            return PASSED
        match = _LAYER.search(name)
        if match is not None and int(match[1]) in self.drafts:
            return PASSED
        if not name.startswith("model."):
            if name in self.parameters:
                return (Target(name),)
            if self._elsewhere(name, match) or name.endswith(".bias"):
                return PASSED
            raise LoadRefused(
                "ValueError", "There is no module or parameter named", tensor,
                f"the class builds no {name}, and ends the load where it finds none",
            )  # fmt: skip
        for part, whole, shard in self.parts:
            if part not in name or ("mlp.experts." in name and name not in self.parameters):
                continue
            mapped = name.replace(part, whole)
            if whole == "fused_qkv_a_proj" and mapped not in self.parameters:
                continue
            name = mapped
            if name.endswith(".bias") and name not in self.parameters:
                continue
            if self._elsewhere(name, match):
                continue
            return (Target(self._required(tensor, name), shard),)
        return self._plain(tensor, name, match)

    def _plain(self, tensor: str, name: str, match: re.Match[str] | None) -> Found:
        expert = _EXPERT.search(name)
        if expert is not None and int(expert[1]) < self.experts:
            which = _PARTS[expert[2]]
            leaf = "w2_" if which == "w2" else "w13_"
            mapped = name.replace(expert[0], f"experts.routed_experts.{leaf}")
            if self._elsewhere(mapped, match):
                return PASSED
            return (Target(self._required(tensor, mapped), (int(expert[1]), which)),)
        if name.endswith(".bias") and name not in self.parameters:
            return PASSED
        if self._elsewhere(name, match):
            return PASSED
        if name.endswith(_OF_CACHES) and name not in self.parameters:
            return PASSED
        return (Target(self._required(tensor, name)),)

    def _elsewhere(self, name: str, match: re.Match[str] | None) -> bool:
        if any(name.startswith(f"{module}.") for module in self.absent):
            return True
        if match is None:
            return False
        number = int(match[1])
        return number in self.whole and number not in self.layers

    def _required(self, tensor: str, name: str) -> str:
        if name not in self.parameters:
            raise LoadRefused(
                "KeyError", name.removeprefix("model."), tensor,
                f"the class builds no parameter {name}, and ends the load where it finds none",
            )  # fmt: skip
        return name
