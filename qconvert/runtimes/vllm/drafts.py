"""The classes by which vLLM loads a draft model from the folder of the model that it drafts for: one
layer or several, between projections of their own, beside embeddings and head of the model.

Read in vLLM: `models/qwen3_next_mtp.py`, `qwen3_5_mtp.py`, `deepseek_mtp.py`, `glm4_moe_mtp.py`,
`models/utils.py` (get_spec_layer_idx_from_weight_name). They are asked for by names of the folder and
held under others, and those of DeepSeek and GLM state no names that they fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from qconvert.core.dtypes import TensorType
from qconvert.runtimes.loading.building import Build, Config
from qconvert.runtimes.loading.offering import PASSED, Found, Target
from qconvert.runtimes.loading.refusal import LoadRefused
from qconvert.runtimes.loading.schemes import NoQuantization, Unquantized
from qconvert.runtimes.vllm.building import Rank
from qconvert.runtimes.vllm.classes import (
    QWEN,
    ModelClass,
    check_heads,
    deepseek_layer,
    drafts,
    gdn_model,
    glm4_layer,
    head,
    walk,
)
from qconvert.runtimes.vllm.names import GATE_UP, GDN, LATENT, QKV, DeepSeek, Walk, gate_up_of
from qconvert.runtimes.vllm.quantization import GptqCodes

_ENDS = ("embed_tokens", "lm_head")
# Modules of a layer that its block does not hold.
_BESIDE = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head")


def draft_tensors(
    architecture: str, config: Config, tensors: Mapping[str, TensorType]
) -> dict[str, TensorType]:
    """The tensors that the draft's class may read: its layers, embeddings and head; none for a folder
    without such layers."""
    if architecture not in DRAFTS:
        return {}
    own: tuple[str, ...] = ("mtp.",)
    if not architecture.startswith("Qwen"):
        own = tuple(f"model.layers.{layer}." for layer in drafts(config))
    if not any(name.startswith(own) for name in tensors):
        return {}
    ends = ("embed_tokens.weight", "lm_head.weight")
    return {
        name: one for name, one in tensors.items() if name.startswith(own) or name.endswith(ends)
    }


def _held_as(rank: Rank, old: str, new: str, *, beside: tuple[str, ...] = ()) -> None:
    """Hold what was asked for as `old` under `new`, but for modules that begin with `beside`."""

    def name(asked: str) -> str:
        inner = asked.removeprefix(old)
        return asked if inner == asked or inner.startswith(beside or "-") else new + inner

    rank.parameters = {name(asked): made for asked, made in rank.parameters.items()}
    rank.schemes = {name(asked): made for asked, made in rank.schemes.items()}
    rank.fused = {name(asked) for asked in rank.fused}
    rank.aliases = {name(alias): name(of) for alias, of in rank.aliases.items()}


def _qwen(rank: Rank, config: Config, *, next_model: bool, dense: bool) -> None:
    check_heads(rank, config)
    hidden, stated = config.number("hidden_size"), rank.quantization
    layers = config.number("num_nextn_predict_layers" if next_model else "mtp_num_hidden_layers", 1)
    plain = Unquantized(rank.dtype)
    scheme = plain if stated.name == "modelopt_fp4" else None
    rank.linear("mtp.fc", "column", 2 * hidden, hidden, scheme=scheme)
    for which in ("embedding", "hidden"):
        rank.norm(f"mtp.pre_fc_norm_{which}", hidden)
    if not next_model and isinstance(stated, GptqCodes) and stated.excludes("mtp"):
        rank.quantization = NoQuantization(plain)
    full = config.replaced(num_hidden_layers=layers, full_attention_interval=1, layer_types=None)
    gdn_model(rank, full, "mtp", interleaved=next_model, dense=dense)
    rank.quantization = stated
    head(rank, config, "", "mtp", here=True, ties=not next_model, plain=next_model)
    if rank.aliases:  # tied: a module of its own with the embeddings' weight
        rank.schemes["lm_head"] = rank.schemes["mtp.embed_tokens"]
    _held_as(rank, "mtp.", "model.")
    rank.borrowed = frozenset(("model.embed_tokens.weight", "lm_head.weight"))


class _QwenWalk(Walk):
    """The walk along a draft of Qwen's, which passes over the model."""

    def _mapped(self, name: str) -> str | None:
        if not name.startswith("mtp.") and not any(end in name for end in _ENDS):
            return None
        return Walk._mapped(self, name)


def _qwen_class(*, next_model: bool, dense: bool = False) -> ModelClass:
    def built(rank: Rank, config: Config) -> None:
        _qwen(rank, config, next_model=next_model, dense=dense)

    def names(rank: Rank, config: Config, quantized: bool) -> Walk:
        found = walk(
            rank, config.replaced(num_hidden_layers=1), quantized, kind=_QwenWalk,
            experts=0 if dense else config.number("num_experts"),
            stacks=(*QKV, *GATE_UP, *gate_up_of("shared_expert"), *(() if next_model else GDN)),
            prefixes=(("mtp.", "model."), ("model.language_model.", "model.")),
        )  # fmt: skip
        return replace(found, same=())  # a tied head is read, too

    return ModelClass(lambda config: QWEN, built, names)


def _layers(rank: Rank, config: Config, layer: Callable[[Rank, int, Config], None]) -> None:
    """DeepSeek's and GLM's: the layers behind the last."""
    check_heads(rank, config)
    hidden, vocabulary = config.number("hidden_size"), config.number("vocab_size")
    borrowed = {"model.embed_tokens.weight"}
    for number in drafts(config):
        at = f"model.layers.{number}"
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            rank.norm(f"{at}.{norm}", hidden)
        rank.whole(f"{at}.eh_proj.weight", hidden, 2 * hidden)
        scheme = rank.quantization.head(f"{at}.head")
        rank.vocabulary(f"{at}.shared_head.head", vocabulary, hidden, scheme)
        layer(rank, number, config)
        _held_as(rank, f"{at}.", f"{at}.mtp_block.", beside=_BESIDE)
        borrowed.add(f"{at}.shared_head.head.weight")
    rank.vocabulary("model.embed_tokens", vocabulary, hidden)
    rank.borrowed = frozenset(borrowed)


@dataclass
class _Layers(DeepSeek):
    """A lookup of the layers behind the last. `own`: their numbers."""

    own: range = range(0)
    glm: bool = False

    def find(self, tensor: str, stored: TensorType) -> Found:
        name, at = tensor, f"model.layers.{self.own.start}."
        if self.glm and tensor == "lm_head.weight":
            return (Target(self._required(tensor, f"{at}shared_head.head.weight")),)
        layer = next((n for n in self.own if tensor.startswith(f"model.layers.{n}.")), None)
        if layer is None:
            return (Target(tensor),) if tensor == "model.embed_tokens.weight" else PASSED
        at = f"model.layers.{layer}."
        beside = next((word for word in _BESIDE if word in tensor), "")
        if not beside:
            name = tensor.replace(at, f"{at}mtp_block.")
        elif beside == "embed_tokens":
            if layer != self.own.start:
                return PASSED
            name = tensor.replace(at, "model.")
        if self.glm and name.endswith(".weight_scale") and self._plain_one(name):
            return PASSED
        return DeepSeek.find(self, name, stored)

    def _plain_one(self, name: str) -> bool:
        """Tell whether a name is not of experts nor of a fused module, and of no parameter."""
        whole = any(part in name for part, _, _ in self.parts)
        return not whole and ".experts." not in name and name not in self.parameters


def _layers_class(layer: Callable[[Rank, int, Config], None], *, glm: bool) -> ModelClass:
    parts = tuple((part[1:], whole[1:], shard) for part, whole, shard in QKV)

    def names(rank: Rank, config: Config, quantized: bool) -> DeepSeek:
        return _Layers(
            rank.parameters, config.number("n_routed_experts"), range(0), range(0), (), range(0),
            parts=(*parts, *LATENT[:2]) if glm else LATENT, own=drafts(config), glm=glm,
        )  # fmt: skip

    return ModelClass(
        lambda config: {}, lambda rank, config: _layers(rank, config, layer), names,
        after=None if glm else _complete,
    )  # fmt: skip


def _complete(build: Build, tensors: Mapping[str, TensorType]) -> None:
    """DeepSeek's class refuses a folder without one of the layers that the config counts."""
    starts = dict.fromkeys(
        ".".join(name.split(".")[:3]) for name in build.parameters if ".layers." in name
    )
    for start in starts:
        if not any(p.parts for n, p in build.parameters.items() if n.startswith(f"{start}.")):
            number = start.rpartition(".")[2]
            raise LoadRefused(
                "ValueError", f"MTP speculative decoding layer {number} weights", start,
                "config.json counts a draft layer that the folder does not have",
            )  # fmt: skip


# By the class of the model that a draft is for.
DRAFTS: dict[str, ModelClass] = {
    "Qwen3NextForCausalLM": _qwen_class(next_model=True),
    "Qwen3_5ForConditionalGeneration": _qwen_class(next_model=False, dense=True),
    "Qwen3_5MoeForConditionalGeneration": _qwen_class(next_model=False),
    "Qwen3_5ForCausalLM": _qwen_class(next_model=False, dense=True),
    "Qwen3_5MoeForCausalLM": _qwen_class(next_model=False),
    "Glm4MoeForCausalLM": _layers_class(glm4_layer, glm=True),
    "DeepseekV3ForCausalLM": _layers_class(deepseek_layer, glm=False),
}
