"""Ways in which the classes of sglang find the parameter of a tensor: names are rewritten and looked up,
and a name that leads nowhere is skipped, warned about, or ends the load.

Read in sglang, `load_weights` of `models/qwen3_next.py`, `qwen3_5.py`, `qwen3_5_text.py`,
`qwen3_moe.py`, `qwen3_vl_moe.py`, `glm4_moe.py`, `qwen3_5_mtp.py` and
`models/deepseek_common/deepseek_weight_loader.py`.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Literal

from qconvert.core.dtypes import TensorType
from qconvert.runtimes.loading.load_weights import PASSED, Found, Target
from qconvert.runtimes.loading.parameters import Shard
from qconvert.runtimes.loading.setting import LoadRefused

_EXPERT = re.compile(r"experts\.([0-9]{1,6})\.(gate|down|up)_proj\.")
_LAYER = re.compile(r"layers\.([0-9]{1,6})\.")
_PARTS: dict[str, Literal["w1", "w2", "w3"]] = {"gate": "w1", "down": "w2", "up": "w3"}
QKV: tuple[tuple[str, str, Shard], ...] = (
    ("qkv_proj", "q_proj", "q"),
    ("qkv_proj", "k_proj", "k"),
    ("qkv_proj", "v_proj", "v"),
)
GATE_UP: tuple[tuple[str, str, Shard], ...] = (
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
)
GDN: tuple[tuple[str, str, Shard], ...] = (
    ("in_proj_qkvz.", "in_proj_qkv.", (0, 1, 2)), ("in_proj_qkvz.", "in_proj_z.", 3),
    ("in_proj_ba.", "in_proj_b.", 0), ("in_proj_ba.", "in_proj_a.", 1),
)  # fmt: skip
_CACHE = {
    ".self_attn.k_proj.k_scale": ".attn.k_scale", ".self_attn.v_proj.v_scale": ".attn.v_scale",
    ".self_attn.k_scale": ".attn.k_scale", ".self_attn.v_scale": ".attn.v_scale",
}  # fmt: skip

_BESIDE_MTP = (
    "mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
)  # fmt: skip

Stacked = tuple[tuple[str, str, Shard], ...]


@dataclass
class Names:
    """Parts that every class shares: a rank's parameters and layers."""

    parameters: Container[str]
    experts: int  # routed ones
    fused: int  # shared ones in slots behind
    layers: range
    missing: list[str] = field(default_factory=list)  # looked for under a name that is not there
    stacked: bool = False  # 3-D experts were met

    def known(self, name: str) -> bool:
        return name in self.parameters

    def required(self, tensor: str, name: str) -> str:
        """A name that is looked up without asking whether it is there."""
        if not self.known(name):
            raise LoadRefused(
                "KeyError", name, tensor,
                f"the class builds no parameter {name} here, and ends the load where it finds none",
            )  # fmt: skip
        return name

    def expert(self, name: str) -> tuple[str, Shard] | None:
        """The name of the parameter of all experts, and which of them a tensor is."""
        match = _EXPERT.search(name)
        if match is None or int(match[1]) >= self.experts + self.fused:
            return None
        which = "experts.w2_" if match[2] == "down" else "experts.w13_"
        return name.replace(match[0], which), (int(match[1]), _PARTS[match[2]])

    def elsewhere(self, name: str) -> bool:
        """Tell whether a tensor is of a layer of another stage."""
        match = _LAYER.search(name)
        return match is not None and int(match[1]) not in self.layers


def next_token(name: str, layer: str) -> str | None:
    """The name that the class of a draft layer gives to a tensor, None for one that it passes over
    (deepseek_weight_loader.py and glm4_moe.py: embeddings and head are the model's own)."""
    if not name.startswith(layer) or "shared_head.head" in name or "embed_tokens" in name:
        return None
    beside = any(part in name for part in ("shared_head.norm", "eh_proj", "enorm", "hnorm"))
    return name.replace(layer, "model" if beside else "model.decoder")


@dataclass
class Qwen3Next(Names):
    """Strict: a name that leads nowhere ends the load. `draft`: the class of the draft reads its names
    alone."""

    draft: bool = False

    def find(self, tensor: str, stored: TensorType) -> Found:
        name = tensor
        if ("mtp" in name) is not self.draft or "rotary_emb.inv_freq" in name:
            return PASSED
        if name in _BESIDE_MTP:
            name = name.replace("mtp.", "")
        elif self.draft:
            name = name.replace("mtp", "model")
        name = name.replace(".self_attn", "") if ".self_attn." in name else name
        if self.fused and "mlp.shared_expert." in name:
            name = name.replace("mlp.shared_expert.", f"mlp.experts.{self.experts}.")
        for cache in ("k", "v"):
            if name.endswith(f".{cache}_proj.{cache}_scale"):
                name = name.replace(f".{cache}_proj.{cache}_scale", f".attn.{cache}_scale")
        if "mlp.experts" not in name:
            for parameter, part, shard in (*QKV, *GATE_UP, *GDN):
                replaced = name.replace(part, parameter)
                if part in name and self.known(replaced):
                    return (Target(replaced, shard),)
        found = self.expert(name)
        if found is not None:
            mapped, shard = found
            if not mapped.endswith((".bias", "_bias")) or self.known(mapped):
                return (Target(self.required(tensor, mapped), shard),)
        if name.endswith(".bias") and not self.known(name):
            return PASSED
        if name.endswith("_scale") and not self.known(name):
            kind = "AssertionError" if stored.numel == 1 else "RuntimeError"
            raise LoadRefused(kind, "", tensor, f"there is no parameter {name} for this scale")
        return (Target(self.required(tensor, name)),)


@dataclass
class Qwen35(Names):
    """Lenient: a name that leads nowhere is warned about. `moe`: with experts, whose suffixes are
    skipped without a word. Once `stacked`, it looks for experts apart no more."""

    moe: bool = False
    vision: bool = False
    tied: bool = False
    last: bool = True

    def find(self, tensor: str, stored: TensorType) -> Found:
        name = tensor
        if not self.vision:
            if name == "lm_head.weight":
                there = not self.tied and self.known(name)
                return (Target(name),) if there else PASSED
            if not name.startswith("model."):
                return PASSED
            name = name.removeprefix("model.")
        for old, new in _CACHE.items():
            name = name.replace(old, new)
        if "rotary_emb.inv_freq" in name or "mtp" in name:
            return PASSED
        if "visual" in name and not self.vision:
            return PASSED
        if self.vision and not self.moe and name.startswith("language_model."):
            name = f"model.{name}"
        name = name.replace("model.language_model.", "model.")
        name = name.replace(".self_attn", "") if ".self_attn." in name else name
        also: tuple[Target, ...] = ()
        if self.vision and self.tied and self.last and "model.embed_tokens.weight" in name:
            also = (Target("lm_head.weight"),) if self.known("lm_head.weight") else ()
        if self.elsewhere(name):
            return also
        found = self._with_experts(name, stored) if self.moe else self._dense(name)
        return (*also, *found)

    def _held(self, name: str) -> str:
        """The parameter's whole name: a class of text alone strips `model.` from all."""
        return name if self.vision else f"model.{name}"

    def _is(self, name: str) -> bool:
        return self.known(self._held(name))

    def _one(self, name: str, shard: Shard = None) -> Found:
        return (Target(self._held(name), shard),)

    def _dense(self, name: str) -> Found:
        for parameter, part, shard in (*QKV, *GATE_UP, *GDN):
            if part not in name or "visual" in name or "mlp.experts" in name:
                continue
            name = name.replace(part, parameter)
            if self._is(name):
                return self._one(name, shard)
        name = self._seen(name)
        if self._is(name):
            return self._one(name)
        if not name.endswith(".bias"):
            self.missing.append(name)
        return PASSED

    def _seen(self, name: str) -> str:
        if "visual" not in name:
            return name
        return name.replace("attn.qkv.", "attn.qkv_proj.").replace("model.visual.", "visual.")

    def _with_experts(self, name: str, stored: TensorType) -> Found:
        skipped: tuple[str, ...] = (
            ".bias", "_bias", ".k_scale", "_k_scale", ".v_scale", "_v_scale", "_weight_scale",
            "_input_scale",
        )  # fmt: skip
        if not self.vision:
            skipped += (".weight_scale", ".input_scale")
        both = ("experts.gate_up_proj", "experts.down_proj")
        if self.vision:
            self.stacked = self.stacked or name.endswith(both)
        else:
            self.stacked = self.stacked or any(part in name for part in both)
        for parameter, part, shard in (*QKV, *GATE_UP, *GDN):
            if part not in name or "mlp.experts" in name or (self.vision and "visual" in name):
                continue
            name = name.replace(part, parameter)
            if self._is(name):
                return self._one(name, shard)
        if self.stacked:
            for part, parameter in zip(
                both, ("experts.w13_weight", "experts.w2_weight"), strict=True
            ):
                if part in name:
                    return self._all_experts(name.replace(part, parameter), part, stored)
        else:
            found = self.expert(name)
            if found is not None:
                mapped, which = found
                if mapped.endswith(skipped) and not self._is(mapped):
                    return PASSED
                if not self._is(mapped):
                    self.required(name, mapped)
                return self._one(mapped, which)
        name = self._seen(name) if self.vision else name
        if self._is(name):
            return self._one(name)
        if not name.endswith(skipped):
            self.missing.append(name)
        return PASSED

    def _all_experts(self, name: str, part: str, stored: TensorType) -> Found:
        """The parts of a 3-D tensor, if there is a parameter for them."""
        if not self._is(name):
            return PASSED
        return all_experts(self._held(name), stored, self.experts, down=part == "experts.down_proj")


def all_experts(
    held: str, stored: TensorType, experts: int, *, down: bool, transposed: bool = False
) -> Found:
    """The parts of a 3-D tensor of all experts, whose matrices are transposed if `transposed`. Raises
    LoadRefused for one of another shape."""
    if len(stored.shape) < 3 or stored.shape[0] < experts:
        raise LoadRefused(
            "IndexError", "", held, f"expected {experts} experts in 3 dimensions, found {stored}"
        )
    inner = stored.shape[1:]
    if transposed:
        inner = (*inner[:-2], inner[-1], inner[-2])
    if down:
        return [Target(held, (expert, "w2"), inner) for expert in range(experts)]
    half = (*inner[:-2], -(-inner[-2] // 2), inner[-1])
    return [
        Target(held, (expert, which), half) for which in ("w1", "w3") for expert in range(experts)
    ]


_QWEN_SKIPPED = (
    ".bias", "_bias", ".k_scale", "_k_scale", ".v_scale", "_v_scale", ".weight_scale",
    "_weight_scale", ".input_scale", "_input_scale",
)  # fmt: skip


@dataclass
class Qwen35Draft(Names):
    """The draft of Qwen3.5, of both of its classes: lenient, and names are chosen tensor by tensor."""

    def find(self, tensor: str, stored: TensorType) -> Found:
        name = tensor
        for old, new in _CACHE.items():
            name = name.replace(old, new)
        if name in ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"):
            return (Target("model.embed_tokens.weight"),)
        if "rotary_emb.inv_freq" in name or "mtp" not in name:
            return PASSED
        if name.startswith("mtp."):
            name = name.replace("mtp.", "model.")
            name = name.replace("model.fc", "fc").replace("model.pre_fc", "pre_fc")
        name = name.replace(".self_attn", "") if ".self_attn." in name else name
        for parameter, part, shard in (*QKV, *GATE_UP):
            replaced = name.replace(part, parameter)
            if part in name and "mlp.experts" not in name and self.known(replaced):
                return (Target(replaced, shard),)
        found = self._experts(tensor, name, stored)
        if found is not None:
            return found
        if self.known(name):
            return (Target(name),)
        if not name.endswith(_QWEN_SKIPPED):
            self.missing.append(name)
        return PASSED

    def _experts(self, tensor: str, name: str, stored: TensorType) -> Found | None:
        """The target of experts, apart or in one tensor; None for any other name."""
        for part, parameter in (
            ("experts.gate_up_proj", "experts.w13_weight"), ("experts.down_proj", "experts.w2_weight")
        ):  # fmt: skip
            if part in name and self.experts:
                mapped = self.required(tensor, name.replace(part, parameter))
                return all_experts(mapped, stored, self.experts, down="down" in part)
        found = self.expert(name)
        if found is None:
            return None
        mapped, which = found
        if self.known(mapped):
            return (Target(mapped, which),)
        if not mapped.endswith(_QWEN_SKIPPED):
            self.missing.append(mapped)
        return PASSED


@dataclass
class Qwen3Moe(Names):
    """Silent: a name that leads nowhere is skipped."""

    stages: bool = True  # looks at the layer's number before the name
    first_unread: int | None = None  # layers from this number on are the draft's
    draft: str = ""  # its layer, for the class of the draft

    def find(self, tensor: str, stored: TensorType) -> Found:
        name = tensor
        if self.first_unread is None:
            if "mtp" in name or self.elsewhere(name):
                return PASSED
        else:
            if self.fused and name.startswith("model.layers."):
                name = name.replace(".mlp.shared_experts.", f".mlp.experts.{self.experts}.", 1)
            if self.draft:
                renamed = next_token(name, self.draft)
                if renamed is None:
                    return PASSED
                name = renamed
            elif name.startswith("model.layers") and _layer(name) >= self.first_unread:
                return PASSED
        if "rotary_emb.inv_freq" in name:
            return PASSED
        if "mlp.experts" not in name:
            for parameter, part, shard in (*QKV, *GATE_UP):
                if part not in name:
                    continue
                name = name.replace(part, parameter)
                if self.known(name):
                    return (Target(name, shard),)
        found = self.expert(name)
        if found is not None:
            mapped, shard = found
            if self.known(mapped):
                return (Target(mapped, shard),)
            self.missing.append(mapped)
            return PASSED
        if self.known(name):
            return (Target(name),)
        if not name.endswith(".bias"):
            self.missing.append(name)
        return PASSED


_VL_STACKED: Stacked = (
    (".qkv_proj", ".q_proj", "q"), (".qkv_proj", ".k_proj", "k"), (".qkv_proj", ".v_proj", "v"),
    ("gate_up_proj", "up_proj", 1), ("gate_up_proj", "gate_proj", 0),
)  # fmt: skip


@dataclass
class Qwen3VlMoe(Names):
    """Experts are looked up strictly, all else with a warning. Once `stacked`, it looks for experts
    apart no more."""

    def find(self, tensor: str, stored: TensorType) -> Found:
        name = tensor.replace("model.language_model.", "model.")
        visual = "visual" in name
        if not visual and self.elsewhere(name):
            return PASSED
        whole = "experts.gate_up_proj", "experts.down_proj"
        self.stacked = self.stacked or any(part in name for part in whole)
        for parameter, part, shard in _VL_STACKED:
            if part not in name or visual or "mlp.experts" in name:
                continue
            name = name.replace(part, parameter)
            if self.known(name):
                return (Target(name, shard),)
        if not visual:
            found = self._experts(tensor, name, stored)
            if found is not None:
                return found
        else:
            name = name.replace("attn.qkv.", "attn.qkv_proj.").replace("model.visual.", "visual.")
        if self.known(name):
            return (Target(name),)
        if not name.endswith(_QWEN_SKIPPED):
            self.missing.append(name)
        return PASSED

    def _experts(self, tensor: str, name: str, stored: TensorType) -> Found | None:
        if self.stacked:
            for part, parameter in (
                ("experts.gate_up_proj", "experts.w13_weight"),
                ("experts.down_proj", "experts.w2_weight"),
            ):
                if part in name:
                    mapped = self.required(tensor, name.replace(part, parameter))
                    return all_experts(
                        mapped, stored, self.experts, down="down" in part, transposed=True
                    )
            return None
        found = self.expert(name)
        if found is None:
            return None
        mapped, which = found
        if mapped.endswith(_QWEN_SKIPPED) and not self.known(mapped):
            return PASSED
        return (Target(self.required(tensor, mapped), which),)


def _layer(name: str) -> int:
    part = name.split(".")[2] if name.count(".") > 1 else ""
    return int(part) if part.isascii() and part.isdecimal() and len(part) < 7 else -1


@dataclass
class DeepSeek(Names):
    """Names of linears and experts are looked up strictly where they are fused, else warned about.
    `waiting`: halves of the fused first projection of attention, until both are there."""

    hidden: int = 0  # layers of the model, the draft's behind them
    fuses_first: bool = True
    last: bool = True
    draft: str = ""  # its layer, for the class of the draft
    waiting: dict[str, tuple[str, TensorType]] = field(default_factory=dict)

    def find(self, tensor: str, stored: TensorType) -> Found:
        name = tensor
        if not self.draft and self.elsewhere(name):
            return PASSED
        if self.fused:
            name = name.replace("mlp.shared_experts", f"mlp.experts.{self.experts}")
        if self.draft:
            renamed = next_token(name, self.draft)
            if renamed is None:
                return PASSED
            name = renamed
        elif name.startswith("model.layers") and _layer(name) >= self.hidden:
            return PASSED
        stacked = self._stacked(name, stored)
        if stacked is not None:
            return stacked
        if "rotary_emb.inv_freq" in name or ".indexer." in name:
            return PASSED
        for parameter, part, shard in GATE_UP:
            if part not in name or ("mlp.experts." in name and not self.known(name)):
                continue
            name = name.replace(part, parameter)
            if name.endswith(".bias") and not self.known(name):
                continue
            return (Target(self.required(tensor, name), shard),)
        found = self.expert(name)
        if found is not None:
            mapped, shard = found
            if self.known(mapped):
                return (Target(mapped, shard),)
            name = mapped
        return self._plain(tensor, name, stored)

    def _stacked(self, name: str, stored: TensorType) -> Found | None:
        """Experts in one tensor."""
        for part, parameter in (
            (".experts.gate_up_proj_scale", ".experts.w13_weight_scale_inv"),
            (".experts.down_proj_scale", ".experts.w2_weight_scale_inv"),
            (".experts.gate_up_proj", ".experts.w13_weight"),
            (".experts.down_proj", ".experts.w2_weight"),
        ):
            mapped = name.removesuffix(part) + parameter
            if not name.endswith(part) or not self.known(mapped):
                continue
            if len(stored.shape) < 3:
                raise LoadRefused("IndexError", "", name, f"expected 3 dimensions, found {stored}")
            inner = stored.shape[1:]
            if "down" in part:
                return [Target(mapped, (i, "w2"), inner) for i in range(stored.shape[0])]
            half = (-(-inner[0] // 2), *inner[1:])
            numbers = range(stored.shape[0])
            return [Target(mapped, (i, which), half) for i in numbers for which in ("w1", "w3")]
        return None

    def _plain(self, tensor: str, name: str, stored: TensorType) -> Found:
        if name.endswith(".bias") and not self.known(name):
            return PASSED
        if ".embed_tokens." in name and not self.known(name):
            return PASSED
        if ".norm." in name and not self.last:
            return PASSED
        if self.fuses_first and ("q_a_proj" in name or "kv_a_proj_with_mqa" in name):
            return self._first(tensor, name, stored)
        if ("k_scale" in name or "v_scale" in name) and not self.known(name):
            which = "k_scale" if "k_scale" in name else "v_scale"
            name = name.replace(f"{which[0]}_proj", "attn_mqa")
        name = self._resolved(name)
        if self.known(name):
            return (Target(name),)
        self.missing.append(name)
        return PASSED

    def _resolved(self, name: str) -> str:
        inverse = name.removesuffix("weight_scale") + "weight_scale_inv"
        also = name.endswith("weight_scale") and not self.known(name) and self.known(inverse)
        return inverse if also else name

    def _first(self, tensor: str, name: str, stored: TensorType) -> Found:
        """q_a_proj and kv_a_proj_with_mqa are concatenated when both are there."""
        if "q_a_proj" in name:
            stem, other = name.replace("q_a_proj", "*"), "kv_a_proj_with_mqa"
        else:
            stem, other = name.replace("kv_a_proj_with_mqa", "*"), "q_a_proj"
        self.waiting[name] = tensor, stored
        partner = stem.replace("*", other)
        if partner not in self.waiting:
            return PASSED
        beside, second = self.waiting.pop(partner)
        self.waiting.pop(name)
        mapped = self._resolved(stem.replace("*", "fused_qkv_a_proj_with_mqa"))
        if not self.known(mapped):
            self.missing.append(mapped)
            return PASSED
        if stored.shape == () and second.shape == ():
            return (Target(mapped, None, None, beside),)
        if not stored.shape or stored.shape[1:] != second.shape[1:]:
            raise LoadRefused(
                "RuntimeError", "", tensor, f"{stored} and {second} cannot be concatenated"
            )
        joined = stored.shape[0] + second.shape[0], *stored.shape[1:]
        return (Target(mapped, None, joined, beside),)
