"""Simulator of sglang's loader: `simulate` builds the rank's parameters from the config, offers
every tensor of the headers to them, and says what is written, read, refused or misread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from qconvert.core.dtypes import TensorType
from qconvert.core.versions import SGLANG, is_release
from qconvert.runtimes.classes.build import built
from qconvert.runtimes.classes.names import RecordedNames, check_draft
from qconvert.runtimes.classes.record import (
    Record,
    architecture_of,
    check_form,
    class_record,
    recorded,
)
from qconvert.runtimes.loading.building import Config, RankBuild, divided, text_config
from qconvert.runtimes.loading.load_weights import NameResolver, SimulatedLoad, offered
from qconvert.runtimes.loading.schemes import NoQuantization, Quantization, Unquantized
from qconvert.runtimes.loading.setting import HOPPER, LoadRefused, NotSimulated, Setting
from qconvert.runtimes.sglang.classes import (
    CLASSES,
    QWEN,
    QWEN35,
    ModelClass,
    check_stages,
    deepseek_layer,
    deepseek_shared,
    fused_mla,
    gdn_layers,
    glm4_layer,
    glm_shared,
    no_shared,
    qwen_shared,
    runner_of,
    whole_kv_b,
)
from qconvert.runtimes.sglang.quantization import Mixed, Renames, quantization_of
from qconvert.runtimes.sglang.weight_mapping import DeepSeek, Qwen3Moe, Qwen3Next, Qwen35Draft

# The classes by which sglang loads a draft model from the folder of the model that it drafts for: one
# layer, between projections of its own. Embeddings and head are the model's. Read in sglang:
# `configs/model_config.py` (_config_draft_model), `models/qwen3_next_mtp.py`, `qwen3_5_mtp.py`,
# `glm4_moe_nextn.py`, `deepseek_nextn.py`.

BORROWED = frozenset({"model.embed_tokens.weight", "lm_head.weight"})
# Modules of the layer are named so, and its head.
_HEAD = "model.shared_head.head"


def layer_of(architecture: str, config: Config) -> str:
    """Beginnings of names of the draft's tensors, for the class of the model."""
    if architecture.startswith("Qwen"):
        return "mtp."
    return f"{_next_layer(config)}."


def _next_layer(config: Config) -> str:
    layers = config.number("num_hidden_layers")
    return f"model.layers.{0 if layers == 1 else layers}"


def _plain(build: RankBuild) -> Quantization:
    return NoQuantization(Unquantized(build.dtype))


def _ends(build: RankBuild, config: Config, head: Quantization | None, asked: str) -> None:
    """Embeddings, and the head by the scheme that `asked` has; None: the embeddings are the head."""
    vocabulary, hidden = config.number("vocab_size"), config.number("hidden_size")
    build.vocabulary("model.embed_tokens", vocabulary, hidden)
    if head is None:
        build.aliases["lm_head.weight"] = "model.embed_tokens.weight"
    else:
        build.vocabulary("lm_head", vocabulary, hidden, head.head(asked))
    build.borrowed = BORROWED


def _mtp(build: RankBuild, config: Config, fused: int, *, next_model: bool, dense: bool) -> None:
    """Qwen's: a layer of full attention."""
    hidden = config.number("hidden_size")
    one = config.replaced(num_hidden_layers=1, full_attention_interval=1)
    build.whole("fc.weight", hidden, 2 * hidden)
    build.norm("pre_fc_norm_embedding", hidden)
    build.norm("pre_fc_norm_hidden", hidden)
    if next_model:
        gdn_layers(build, one, fused, base="model", own="qwen3_next", dense=False)
        head, asked = build.quantization, _HEAD
    else:
        stated = build.quantization
        unnamed = isinstance(stated, Mixed) and not stated.names("mtp.")
        if stated.name == "modelopt_fp4" or unnamed:
            build.quantization = _plain(build)  # the class takes such a draft for bf16
        gdn_layers(build, one, fused, base="mtp", own="qwen3_5", dense=dense)
        head, asked = build.quantization, "lm_head"
    build.norm("model.norm", hidden)
    tied = not next_model and config.flag("tie_word_embeddings")
    _ends(build, config, None if tied else head, asked)


def _next(
    build: RankBuild, config: Config, layer: Callable[[RankBuild, str, Config], None]
) -> None:
    """DeepSeek's and GLM's: the layer behind the last, always with experts."""
    layers = config.number("num_nextn_predict_layers")
    if layers != 1:
        raise LoadRefused(
            "AssertionError", "Only 1 nextn layer is supported", "config.json",
            f"num_nextn_predict_layers is {layers}, and the class takes 1",
        )  # fmt: skip
    hidden, head = config.number("hidden_size"), build.quantization
    if head.name == "modelopt_fp4":
        build.quantization = _plain(build)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        build.norm(f"model.{norm}", hidden)
    build.whole("model.eh_proj.weight", hidden, 2 * hidden)
    layer(build, "model.decoder", config)
    _ends(build, config, head, _HEAD)


def _glm4(build: RankBuild, config: Config, fused: int) -> None:
    _next(build, config, lambda b, at, c: glm4_layer(b, at, c, fused, dense=False))


def _deepseek(build: RankBuild, config: Config, fused: int) -> None:
    _next(build, config, lambda b, at, c: deepseek_layer(b, at, c, fused, dense=False))


def _deepseek_names(build: RankBuild, config: Config, fused: int) -> NameResolver:
    return DeepSeek(
        build.parameters, config.number("n_routed_experts"), fused, range(0),
        fuses_first=config.get("q_lora_rank") is not None, draft=_next_layer(config),
    )  # fmt: skip


def _qwen35(*, dense: bool) -> ModelClass:
    def built(build: RankBuild, config: Config, fused: int) -> None:
        _mtp(build, config, fused, next_model=False, dense=dense)

    def names(build: RankBuild, config: Config, fused: int) -> NameResolver:
        experts = 0 if dense else config.number("num_experts")
        return Qwen35Draft(build.parameters, experts, fused, range(1))

    return ModelClass(lambda config: QWEN35, no_shared, built, names)


# By the class of the model that a draft is for.
DRAFTS: dict[str, ModelClass] = {
    "Qwen3NextForCausalLM": ModelClass(
        lambda config: QWEN, qwen_shared,
        lambda build, config, fused: _mtp(build, config, fused, next_model=True, dense=False),
        lambda build, config, fused: Qwen3Next(
            build.parameters, config.number("num_experts"), fused, range(1), draft=True
        ),
    ),
    "Qwen3_5ForConditionalGeneration": _qwen35(dense=True),
    "Qwen3_5MoeForConditionalGeneration": _qwen35(dense=False),
    "Qwen3_5ForCausalLM": _qwen35(dense=True),
    "Qwen3_5MoeForCausalLM": _qwen35(dense=False),
    "Glm4MoeForCausalLM": ModelClass(
        lambda config: {}, glm_shared, _glm4,
        lambda build, config, fused: Qwen3Moe(
            build.parameters, config.number("n_routed_experts"), fused, range(0),
            first_unread=0, draft=_next_layer(config),
        ),
    ),
    # Its mapper renames the layer of a model of 61, in the names that the quantization config lists.
    "DeepseekV3ForCausalLM": ModelClass(
        fused_mla, deepseek_shared, _deepseek, _deepseek_names,
        after=lambda build, tensors: whole_kv_b(build, "model.decoder"),
        renames=Renames(parts=(("model.layers.61", "model.decoder"),)),
    ),
}  # fmt: skip


def of_draft(config: Mapping[str, Any], tensors: Mapping[str, TensorType]) -> dict[str, TensorType]:
    """Tensors of the draft model in a folder, and embeddings, which its class may read, too; none for a
    folder without one. Raises NotSimulated for an unknown class."""
    kind = architecture_of(config)
    if kind not in CLASSES:
        check_draft(text_config(config), tensors)
    if kind not in DRAFTS:
        return {}
    layer = layer_of(kind, text_config(config))
    if not any(name.startswith(layer) for name in tensors):
        return {}
    beside = "embed_tokens"
    return {n: one for n, one in tensors.items() if n.startswith(layer) or beside in n}


def known_apart(config: Mapping[str, Any], version: str | None) -> bool:
    """Tell whether the class of a config is known with its shared experts kept apart alone, as
    --disable-shared-experts-fusion does."""
    name = architecture_of(config)
    if _is_by_hand(name, version):
        return False
    record = recorded("sglang", name, version)
    return record is not None and record.fuses_shared


def _is_by_hand(name: str, version: str | None) -> bool:
    return name in CLASSES and (version is None or is_release(version, SGLANG.version))


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
    right. `draft`: load the draft model that the folder holds. `version`: of sglang, whose table of the
    class is asked, in forms that were compared with the loader. Raises NotSimulated for what the
    simulator has no rule for."""
    asked = setting or Setting()
    name = architecture_of(config)
    if not _is_by_hand(name, version):
        record = class_record("sglang", name, version)
        check_form(record, config, tensors, asked)
        if draft:
            raise NotSimulated(f"a draft of {name}")
        return by_table(record, config, tensors, asked)
    kind = CLASSES[name]
    setting = replace(asked, moe_runner=runner_of(kind, config, asked))
    if draft:
        if name not in DRAFTS:
            raise NotSimulated(f"a draft of {name}")
        if setting.pp > 1:
            raise NotSimulated("a draft in pipeline stages")
        kind = DRAFTS[name]
    if setting.tp % setting.ep:
        raise NotSimulated(f"tp {setting.tp} that ep {setting.ep} does not divide")
    numbers = text_config(config)
    fused = 0
    try:
        quantization = quantization_of(
            config, kind.fused(numbers), setting, numbers.dtype, kind.renames
        )
        build = RankBuild(setting, quantization, numbers.dtype)
        fused = kind.shared(numbers, quantization, setting)
        kind.build(build, numbers, fused)
    except LoadRefused as refused:
        return SimulatedLoad(asked, refused, shared_fused=fused > 0)
    finder = kind.names(build, numbers, fused)
    done = offered(build, finder, tensors, asked, shared_fused=fused > 0, after=kind.after)
    wanted = kind.groups(numbers) if kind.groups is not None and groups else None
    if wanted is None or groups == wanted:
        return done
    return done.in_groups(groups or 0, wanted, tensors)


def by_table(
    record: Record, config: Mapping[str, Any], tensors: Mapping[str, TensorType], asked: Setting
) -> SimulatedLoad:
    """Load a folder on one rank by the table of its class, in whatever form."""
    if asked.tp % asked.ep:
        raise NotSimulated(f"tp {asked.tp} that ep {asked.ep} does not divide")
    if asked.capability != HOPPER or asked.a2a != "none" or asked.moe_runner != "auto":
        raise NotSimulated("another GPU than an H200, or other options")
    if record.fuses_shared and not asked.disable_shared_experts_fusion:
        raise NotSimulated("its shared experts, which it may load as routed ones")
    numbers = text_config(config)
    sizes, renames = (
        record.sizes({**config, **numbers.values}),
        Renames(record.parts, record.starts),
    )
    try:
        stated = quantization_of(config, record.packed, asked, numbers.dtype, renames)
        build = RankBuild(asked, stated, numbers.dtype)
        for size in tuple(record.layers.values())[:1]:
            check_stages(asked, sizes.of(size))
        heads = "num_attention_heads"
        if sizes.flag(heads) is not None:  # of linears that ranks share otherwise, too
            divided(sizes.of(heads), asked.tp, heads)
        made = built(record, build, sizes, tensors)
    except LoadRefused as refused:
        return SimulatedLoad(asked, refused)
    return offered(build, RecordedNames(made), tensors, asked)
