"""The classes by which sglang loads a draft model from the folder of the model that it drafts for: one
layer, between projections of its own. Embeddings and head are the model's.

Read in sglang: `configs/model_config.py` (_config_draft_model), `models/qwen3_next_mtp.py`,
`qwen3_5_mtp.py`, `glm4_moe_nextn.py`, `deepseek_nextn.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from qconvert.runtimes.loading.building import Build, Config
from qconvert.runtimes.loading.offering import Finder
from qconvert.runtimes.loading.refusal import LoadRefused
from qconvert.runtimes.loading.schemes import NoQuantization, Quantization, Unquantized
from qconvert.runtimes.sglang.classes import (
    QWEN,
    QWEN35,
    ModelClass,
    deepseek_layer,
    deepseek_shared,
    fused_mla,
    gdn_layers,
    glm4_layer,
    glm_shared,
    no_shared,
    qwen_shared,
    whole_kv_b,
)
from qconvert.runtimes.sglang.names import DeepSeek, Qwen3Moe, Qwen3Next, Qwen35Draft
from qconvert.runtimes.sglang.quantization import Mixed, Renames

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


def _plain(build: Build) -> Quantization:
    return NoQuantization(Unquantized(build.dtype))


def _ends(build: Build, config: Config, head: Quantization | None, asked: str) -> None:
    """Embeddings, and the head by the scheme that `asked` has; None: the embeddings are the head."""
    vocabulary, hidden = config.number("vocab_size"), config.number("hidden_size")
    build.vocabulary("model.embed_tokens", vocabulary, hidden)
    if head is None:
        build.aliases["lm_head.weight"] = "model.embed_tokens.weight"
    else:
        build.vocabulary("lm_head", vocabulary, hidden, head.head(asked))
    build.borrowed = BORROWED


def _mtp(build: Build, config: Config, fused: int, *, next_model: bool, dense: bool) -> None:
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


def _next(build: Build, config: Config, layer: Callable[[Build, str, Config], None]) -> None:
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


def _glm4(build: Build, config: Config, fused: int) -> None:
    _next(build, config, lambda b, at, c: glm4_layer(b, at, c, fused, dense=False))


def _deepseek(build: Build, config: Config, fused: int) -> None:
    _next(build, config, lambda b, at, c: deepseek_layer(b, at, c, fused, dense=False))


def _deepseek_names(build: Build, config: Config, fused: int) -> Finder:
    return DeepSeek(
        build.parameters, config.number("n_routed_experts"), fused, range(0),
        fuses_first=config.get("q_lora_rank") is not None, draft=_next_layer(config),
    )  # fmt: skip


def _qwen35(*, dense: bool) -> ModelClass:
    def built(build: Build, config: Config, fused: int) -> None:
        _mtp(build, config, fused, next_model=False, dense=dense)

    def names(build: Build, config: Config, fused: int) -> Finder:
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
