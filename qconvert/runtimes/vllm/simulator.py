"""Simulator of vLLM's loader: `simulate` builds the rank's parameters from the config, offers
every tensor of the headers to them, and says what is written, read, refused or misread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qconvert.core.dtypes import TensorType
from qconvert.core.shown import count
from qconvert.core.versions import VLLM, is_release
from qconvert.runtimes.classes.build import built
from qconvert.runtimes.classes.names import RecordedNames, check_draft
from qconvert.runtimes.classes.record import Record, architecture_of, check_form, class_record
from qconvert.runtimes.loading.building import Config, RankBuild, text_config
from qconvert.runtimes.loading.load_weights import (
    PASSED,
    Found,
    SimulatedLoad,
    Target,
    Tensors,
    offered,
)
from qconvert.runtimes.loading.schemes import NoQuantization, Unquantized
from qconvert.runtimes.loading.setting import HOPPER, LoadRefused, NotSimulated, Setting
from qconvert.runtimes.vllm.building import Rank
from qconvert.runtimes.vllm.classes import (
    CLASSES,
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
from qconvert.runtimes.vllm.ignore_matching import Renames
from qconvert.runtimes.vllm.quantization import GptqCodes, ModelFacts, quantization_of, refuse_forms
from qconvert.runtimes.vllm.weight_mapping import (
    GATE_UP,
    GDN,
    LATENT,
    QKV,
    DeepSeek,
    Walk,
    gate_up_of,
)

# The classes by which vLLM loads a draft model from the folder of the model that it drafts for: one
# layer or several, between projections of their own, beside embeddings and head of the model. Read in
# vLLM: `models/qwen3_next_mtp.py`, `qwen3_5_mtp.py`, `deepseek_mtp.py`, `glm4_moe_mtp.py`,
# `models/utils.py` (get_spec_layer_idx_from_weight_name). They are asked for by names of the folder
# and held under others, and those of DeepSeek and GLM state no names that they fuse.

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
    check_heads(rank, config.number("num_attention_heads"))
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
    check_heads(rank, config.number("num_attention_heads"))
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


def _complete(build: RankBuild, tensors: Mapping[str, TensorType]) -> None:
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


def of_draft(config: Mapping[str, Any], tensors: Mapping[str, TensorType]) -> dict[str, TensorType]:
    """Tensors that the class of a folder's draft may read; none for a folder without one. Raises
    NotSimulated for an unknown class."""
    name, numbers = architecture_of(config), text_config(config)
    if name not in CLASSES:
        check_draft(numbers, tensors)
    return draft_tensors(name, numbers, tensors)


def simulate(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorType],
    setting: Setting | None = None,
    *,
    groups: int | None = None,
    draft: bool = False,
    version: str | None = None,
) -> SimulatedLoad:
    """Load a folder on one rank: its config.json and the headers of its tensors, in the order of its
    files. `groups`: in how many groups the rows of its fused linear-attention projections are, 0 for
    split ones, as its manifest states; headers cannot show it, and without it any order is taken for
    right. `draft`: load the draft model that the folder holds. `version`: of vLLM, whose table of the
    class is asked, in forms that were compared with the loader. Raises NotSimulated for what has no rule
    here, a class among it, unless vLLM refuses the quantization of any."""
    asked = setting or Setting()
    name = architecture_of(config)
    try:
        refuse_forms(config, tensors)
    except LoadRefused as refused:
        return SimulatedLoad(asked, refused)
    numbers = text_config(config)
    if not (name in CLASSES and (version is None or is_release(version, VLLM.version))):
        record = class_record("vllm", name, version)
        check_form(record, config, tensors, asked)
        if draft:
            raise NotSimulated(f"a draft of {name}")
        return by_table(record, config, tensors, asked)
    kind = CLASSES[name]
    if draft:
        if name not in DRAFTS:
            raise NotSimulated(f"a draft of {name}")
        if asked.pp > 1:
            raise NotSimulated("a draft in pipeline stages")
        kind = DRAFTS[name]
    _check_setting(asked)
    try:
        at = _in_stages(asked, numbers.number("num_hidden_layers"))
        fused, plain = kind.fused(numbers), Unquantized(numbers.dtype)
        quantization = quantization_of(
            config, ModelFacts(fused, Renames(kind.renames), plain, tensors)
        )
        rank = Rank(at, quantization, numbers.dtype)
        kind.build(rank, numbers)
    except LoadRefused as refused:
        return SimulatedLoad(asked, refused)
    finder = kind.names(rank, numbers, bool(quantization.name))

    def after(build: RankBuild, tensors: Mapping[str, TensorType]) -> None:
        if kind.after is not None:
            kind.after(build, tensors)
        if not quantization.name:
            _all_written(build, tensors)

    # The loader reads the names of a file sorted.
    done = offered(rank, finder, Tensors.of(tensors).by_name, asked, after=after)
    wanted = kind.groups(numbers) if kind.groups is not None and groups else None
    if not wanted or groups == wanted:
        return done
    return done.in_groups(groups or 0, wanted, tensors)


def _check_setting(asked: Setting) -> None:
    """Raise NotSimulated for a server that there are no rules for."""
    if asked.capability != HOPPER or asked.a2a != "none" or asked.moe_runner != "auto":
        raise NotSimulated("another GPU than an H200, or other options")
    if asked.ep not in (1, asked.tp):
        raise NotSimulated(f"ep {asked.ep}: vLLM divides all experts among its {asked.tp} ranks")


def by_table(
    record: Record, config: Mapping[str, Any], tensors: Mapping[str, TensorType], asked: Setting
) -> SimulatedLoad:
    """Load a folder on one rank by the table of its class, in whatever form."""
    try:
        refuse_forms(config, tensors)
    except LoadRefused as refused:
        return SimulatedLoad(asked, refused)
    _check_setting(asked)
    numbers = text_config(config)
    plain, sizes = Unquantized(numbers.dtype), record.sizes({**config, **numbers.values})
    facts = ModelFacts(
        record.packed, Renames(record.starts, record.parts, record.ends), plain, tensors
    )
    try:
        layers = next((sizes.of(size) for size in record.layers.values()), 0)
        rank = Rank(_in_stages(asked, layers), quantization_of(config, facts), numbers.dtype)
        heads = "num_attention_heads"
        check_heads(rank, 0 if sizes.flag(heads) is None else sizes.of(heads))
        made = built(record, rank, sizes, tensors)
    except LoadRefused as refused:
        return SimulatedLoad(asked, refused)
    quantized = bool(rank.quantization.name)
    finder = RecordedNames(made, ("g_idx",) if quantized else ())

    def after(build: RankBuild, tensors: Mapping[str, TensorType]) -> None:
        if not quantized:
            _all_written(build, tensors)

    return offered(rank, finder, Tensors.of(tensors).by_name, asked, after=after)


def _in_stages(setting: Setting, layers: int) -> Setting:
    """The setting with the partition that vLLM makes where none is stated: the stages counted backwards
    from the second-last own one layer more (distributed/utils.py, get_pp_indices)."""
    if setting.pp == 1:
        return setting
    if setting.partition is not None:
        if sum(setting.partition) != layers:
            raise LoadRefused(
                "ValueError", "does not match", "model.layers",
                f"the partition {list(setting.partition)} is not of {layers} layers",
            )  # fmt: skip
        return setting
    share, rest = divmod(layers, setting.pp)
    sizes = [share] * setting.pp
    for number in range(2, rest + 2):
        sizes[-number] += 1
    return replace(setting, partition=tuple(sizes))


def _all_written(build: RankBuild, tensors: Mapping[str, TensorType]) -> None:
    """The loader's own check, of unquantized models alone: norms and the like that no tensor came to.
    Linears, experts and embeddings are not looked at (default_loader.py, track_weights_loading)."""
    empty = [
        name
        for name, parameter in build.parameters.items()
        if not parameter.parts and not _is_exempt(name, build)
    ]
    if empty:
        raise LoadRefused(
            "ValueError", "Following weights were not initialized from checkpoint", empty[0],
            f"{count(len(empty), 'parameter')} have no tensor in the folder",
        )  # fmt: skip


def _is_exempt(name: str, build: RankBuild) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:number]) in build.schemes for number in range(1, len(parts)))
