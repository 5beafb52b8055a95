"""The model classes of sglang that this simulator knows: what each builds on a rank, and how it finds
the parameter of a tensor.

Read in sglang: `models/qwen3_next.py`, `qwen3_5.py`, `qwen3_5_text.py`, `qwen2_moe.py`,
`qwen3_moe.py`, `qwen3_vl.py`, `qwen3_vl_moe.py`, `glm4_moe.py`, `deepseek_v2.py`; runners of experts
that a class asks for in `arg_groups/model_overrides/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qconvert.core.dtypes import TensorType
from qconvert.core.shown import count
from qconvert.runtimes.loading.building import Config, RankBuild, check_states
from qconvert.runtimes.loading.load_weights import NameResolver
from qconvert.runtimes.loading.parameters import Wrapped
from qconvert.runtimes.loading.schemes import Quantization, Unquantized
from qconvert.runtimes.loading.setting import LoadRefused, Setting
from qconvert.runtimes.sglang.ignore_matching import Fused
from qconvert.runtimes.sglang.quantization import Renames, root_block
from qconvert.runtimes.sglang.weight_mapping import (
    DeepSeek,
    Qwen3Moe,
    Qwen3Next,
    Qwen3VlMoe,
    Qwen35,
)

# Backends of communication whose combine happens inside the dispatcher (layers/moe/utils.py,
# is_deepep_class_backend), and those that also replicate the shared experts.
_DEEPEP_CLASS = ("deepep", "deepep_v2", "mooncake", "mori", "pplx")
_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
QWEN: Fused = {"qkv_proj": _QKV, "gate_up_proj": _GATE_UP}
QWEN35: Fused = {
    **QWEN, "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a"),
}  # fmt: skip
_MLA: Fused = {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}


_ALL_FORMS = ("", "fp8", "modelopt_fp4", "modelopt_mixed")


@dataclass(frozen=True)
class ModelClass:
    """A class: the names that it fuses, as its quantization asks for them; whether it loads a shared
    expert as one more routed one, how many; what it builds; how it finds names. `blackwell`: names of
    quantizations (empty: none) for which a B200 gets the trtllm runner; `groups`: in how many groups
    the rows of its fused linear-attention projections must be; `after`: what the class does when all is
    read; `marlin`: the runner that a B200 gets for NVFP4 experts of weights alone beside other forms;
    `renames`: what it replaces in the names that the quantization config lists."""

    fused: Callable[[Config], Fused]
    shared: Callable[[Config, Quantization, Setting], int]
    build: Callable[[RankBuild, Config, int], None]
    names: Callable[[RankBuild, Config, int], NameResolver]
    blackwell: tuple[str, ...] = ()
    groups: Callable[[Config], int] | None = None
    after: Callable[[RankBuild, Mapping[str, TensorType]], None] | None = None
    renames: Renames | None = None
    marlin: bool = True


def runner_of(kind: ModelClass, config: Mapping[str, Any], setting: Setting) -> str:
    """The runner of experts: what is asked for, or what the class chooses on a B200."""
    if setting.moe_runner != "auto" or setting.capability[0] != 10 or setting.a2a != "none":
        return setting.moe_runner
    block = root_block(config)
    method = "" if block is None else str(block.get("quant_method") or "modelopt")
    name = {"modelopt": "modelopt_fp4"}.get(method, method)
    if block is not None and block.get("quant_algo") == "MIXED_PRECISION":
        return _mixed_runner(kind, block)
    chosen = name in kind.blackwell or (
        kind is CLASSES["DeepseekV3ForCausalLM"] and _kimi_int4(block)
    )
    return "flashinfer_trtllm" if chosen else "auto"


def _mixed_runner(kind: ModelClass, block: Mapping[str, Any]) -> str:
    """The runner for modelopt's MIXED_PRECISION on a B200: marlin for experts of weights alone in Qwen's
    classes (model_overrides/qwen3_moe.py), none chosen in GLM's."""
    if "modelopt_mixed" not in kind.blackwell:
        return "auto"
    layers = block.get("quantized_layers")
    entries = layers.items() if isinstance(layers, Mapping) else ()
    weights = any(
        ".experts" in str(name) and isinstance(entry, Mapping)
        and str(entry.get("quant_algo", "")).upper() == "W4A16_NVFP4"
        for name, entry in entries
    )  # fmt: skip
    return "marlin" if weights and kind.marlin else "flashinfer_trtllm"


def _kimi_int4(block: Mapping[str, Any] | None) -> bool:
    """INT4 in groups of 32, Kimi K2 Thinking's form (arg_groups/overrides.py,
    _deepseek_moe_quant_resolution)."""
    groups = (block or {}).get("config_groups")
    group = groups.get("group_0") if isinstance(groups, Mapping) else None
    weights = group.get("weights") if isinstance(group, Mapping) else None
    wanted = {"num_bits": 4, "group_size": 32, "strategy": "group", "type": "int"}
    return isinstance(weights, Mapping) and all(weights.get(k) == v for k, v in wanted.items())


def no_shared(config: Config, quantization: Quantization, setting: Setting) -> int:
    return 0


def _disabled(setting: Setting) -> bool:
    runners = ("flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutedsl")
    return setting.disable_shared_experts_fusion or setting.moe_runner in runners


def qwen_shared(config: Config, quantization: Quantization, setting: Setting) -> int:
    """qwen2_moe.py, can_fuse_shared_expert."""
    size = config.number("shared_expert_intermediate_size", 0)
    a2a = setting.a2a in ("deepep", "deepep_v2", "mori")
    same = size > 0 and size == config.number("moe_intermediate_size")
    if _disabled(setting) or not same or a2a or quantization.blocks_shared:
        return 0
    per_rank = setting.a2a in (*_DEEPEP_CLASS, "megamoe") and setting.ep > 1
    return 0 if per_rank else 1


def glm_shared(config: Config, quantization: Quantization, setting: Setting) -> int:
    """glm4_moe.py, shared_experts_fusion_disable_reason."""
    off = _disabled(setting) or setting.capability < (8, 0) or setting.ep > 1
    return 0 if off or setting.a2a in ("deepep", "mori") else config.number("n_shared_experts", 0)


def deepseek_shared(config: Config, quantization: Quantization, setting: Setting) -> int:
    """deepseek_v2.py, shared_experts_fusion_disable_reason: 384 experts only under quark."""
    off = (
        _disabled(setting) or quantization.blocks_shared or setting.a2a in _DEEPEP_CLASS
        or setting.capability < (8, 0) or setting.ep > 1 or quantization.packed_int4
        or config.number("n_routed_experts") != 256 or config.number("n_shared_experts", 0) != 1
        or (quantization.name == "modelopt_fp4" and setting.capability[0] == 9
            and setting.moe_runner == "marlin")
    )  # fmt: skip
    return 0 if off else 1


def _ends(
    build: RankBuild, config: Config, *, embeds: bool, heads: bool, quantization: Quantization
) -> None:
    """Embeddings; the head and the last norm come after the layers."""
    vocabulary, hidden = config.number("vocab_size"), config.number("hidden_size")
    if embeds:
        build.vocabulary("model.embed_tokens", vocabulary, hidden)
    if heads:
        build.vocabulary("lm_head", vocabulary, hidden, quantization.head("lm_head"))
        if not build.setting.last:  # built on every stage by some classes, used on the last
            build.unused("lm_head")


def _layers(build: RankBuild, config: Config) -> range:
    """The layers of the stage (utils/common.py, make_layers)."""
    layers = config.number("num_hidden_layers")
    check_stages(build.setting, layers)
    return build.setting.layers(layers)


def check_stages(setting: Setting, layers: int) -> None:
    """Raise LoadRefused for more stages than layers and for a stated partition of another count."""
    if setting.pp > layers:
        raise LoadRefused(
            "AssertionError",
            "",
            "model.layers",
            f"{count(setting.pp, 'stage')} for {count(layers, 'layer')}",
        )
    if setting.partition is not None and sum(setting.partition) != layers:
        raise LoadRefused(
            "ValueError", "does not match num_hidden_layers", "model.layers",
            f"the partition {list(setting.partition)} is not of {layers} layers",
        )  # fmt: skip


def _check_experts(config: Config, count: int, setting: Setting, where: str, *, moe: bool) -> None:
    size = setting.moe_tp if moe else setting.tp
    if size > count:
        raise LoadRefused(
            "ValueError", f"Tensor parallel size {size} is greater than", where,
            f"{size} ranks are more than the {count} experts",
        )  # fmt: skip


def _qwen_moe(build: RankBuild, at: str, asked: str, config: Config, fused: int) -> None:
    """qwen2_moe.py, Qwen2MoeSparseMoeBlock."""
    hidden, count = config.number("hidden_size"), config.number("num_experts")
    shared = config.number("shared_expert_intermediate_size", 0)
    _check_experts(config, count, build.setting, f"{at}.mlp", moe=False)
    build.experts(
        f"{at}.mlp.experts", count, fused, hidden, config.number("moe_intermediate_size"),
        asked=f"{asked}.mlp.experts",
    )  # fmt: skip
    plain = Unquantized(build.dtype)
    build.linear(f"{at}.mlp.gate", "replicated", hidden, count, scheme=plain)
    if shared and not fused:
        build.mlp(f"{at}.mlp.shared_expert", hidden, shared, asked=f"{asked}.mlp.shared_expert")
    build.whole(f"{at}.mlp.shared_expert_gate.weight", 1, hidden)


def _gated_delta_net(build: RankBuild, at: str, asked: str, config: Config, own: Wrapped) -> None:
    hidden = config.number("hidden_size")
    keys, values = config.number("linear_num_key_heads"), config.number("linear_num_value_heads")
    key, value = config.number("linear_key_head_dim"), config.number("linear_value_head_dim")
    kernel = config.number("linear_conv_kernel_dim")
    sizes = keys * key, keys * key, values * value
    module = f"{at}.linear_attn"
    build.convolution(f"{module}.conv1d", sizes, kernel)
    for part, outputs in (
        ("in_proj_qkvz", (*sizes, values * value)), ("in_proj_ba", (values, values)),
    ):  # fmt: skip
        build.linear(
            f"{module}.{part}", "merged", hidden, *outputs, asked=f"{asked}.linear_attn.{part}",
            wrapped=own,
        )  # fmt: skip
    build.per_head(f"{module}.dt_bias", values)
    build.per_head(f"{module}.A_log", values, "F32")
    for name in ("A_log", "dt_bias"):
        build.aliases[f"{module}.attn.{name}"] = f"{module}.{name}"
    build.norm(f"{module}.norm", value)
    build.linear(
        f"{module}.out_proj", "row", values * value, hidden, asked=f"{asked}.linear_attn.out_proj"
    )


def _gated_attention(build: RankBuild, at: str, asked: str, config: Config, own: Wrapped) -> None:
    """Attention whose modules lie in the layer itself, though it is asked for under `self_attn`."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    size = config.number("head_dim", hidden // max(1, heads))
    gated = config.flag("attn_output_gate", default=True)
    # "qkv_proj is not quantized for fp4", says Qwen3-Next's class.
    unquantized = own == "qwen3_next" and build.quantization.name == "modelopt_fp4"
    build.qkv(
        f"{at}.qkv_proj", hidden, heads * (1 + gated), config.number("num_key_value_heads"), size,
        asked=f"{asked}.self_attn.qkv_proj",
        scheme=Unquantized(build.dtype) if unquantized else None,
    )  # fmt: skip
    build.linear(f"{at}.o_proj", "row", heads * size, hidden, asked=f"{asked}.self_attn.o_proj")
    build.cache_scales(f"{at}.attn")
    build.norm(f"{at}.q_norm", size)
    build.norm(f"{at}.k_norm", size)


def norms(build: RankBuild, at: str, config: Config) -> None:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        build.norm(f"{at}.{norm}", config.number("hidden_size"))


def gdn_layers(
    build: RankBuild, config: Config, fused: int, *, base: str, own: Wrapped, dense: bool
) -> None:
    check_states(config, full_attention_interval=4)
    every = config.number("full_attention_interval")
    for layer in _layers(build, config):
        at, asked = f"model.layers.{layer}", f"{base}.layers.{layer}"
        if (layer + 1) % every:
            _gated_delta_net(build, at, asked, config, own)
        else:
            _gated_attention(build, at, asked, config, own)
        if dense:
            hidden, inner = config.number("hidden_size"), config.number("intermediate_size")
            build.mlp(f"{at}.mlp", hidden, inner, asked=f"{asked}.mlp")
        else:
            _qwen_moe(build, at, asked, config, fused)
        norms(build, at, config)


def _qwen3_next(build: RankBuild, config: Config, fused: int) -> None:
    if build.setting.pp > 1:
        raise LoadRefused(
            "AssertionError", "", "model", "the class runs in one pipeline stage only"
        )
    _ends(build, config, embeds=True, heads=False, quantization=build.quantization)
    gdn_layers(build, config, fused, base="model", own="qwen3_next", dense=False)
    build.norm("model.norm", config.number("hidden_size"))
    _ends(build, config, embeds=False, heads=True, quantization=build.quantization)


def _qwen35(build: RankBuild, config: Config, fused: int, *, base: str, dense: bool) -> None:
    setting, quantization = build.setting, build.quantization
    _ends(build, config, embeds=setting.first, heads=False, quantization=quantization)
    gdn_layers(build, config, fused, base=base, own="qwen3_5", dense=dense)
    if not setting.last:
        return
    build.norm("model.norm", config.number("hidden_size"))
    _last_head(build, config)


def _tower(build: RankBuild, vision: Config) -> None:
    """qwen3_vl.py, Qwen3VLMoeVisionModel: never quantized."""
    size, plain = vision.number("hidden_size"), Unquantized(build.dtype)
    heads, merge = vision.number("num_heads"), vision.number("spatial_merge_size") ** 2
    patch, frames = vision.number("patch_size"), vision.number("temporal_patch_size")
    shape = size, vision.number("in_channels", 3), frames, patch, patch
    build.whole("visual.patch_embed.proj.weight", *shape)
    build.whole("visual.patch_embed.proj.bias", size)
    if build.setting.first:
        build.vocabulary("visual.pos_embed", vision.number("num_position_embeddings"), size)
    for block in range(vision.number("depth")):
        at = f"visual.blocks.{block}"
        build.norm(f"{at}.norm1", size, bias=True)
        build.norm(f"{at}.norm2", size, bias=True)
        build.qkv(f"{at}.attn.qkv_proj", size, heads, heads, size // heads, scheme=plain, bias=True)
        build.linear(f"{at}.attn.proj", "row", size, size, scheme=plain, bias=True)
        inner = vision.number("intermediate_size")
        build.linear(f"{at}.mlp.linear_fc1", "column", size, inner, scheme=plain, bias=True)
        build.linear(f"{at}.mlp.linear_fc2", "row", inner, size, scheme=plain, bias=True)
    # Three where the config states none: the default of the runtime's own class of it.
    stated = vision.get("deepstack_visual_indexes") is not None
    deep = len(vision.numbers("deepstack_visual_indexes")) if stated else 3
    for merger in ("merger", *(f"deepstack_merger_list.{i}" for i in range(deep))):
        at, whole = f"visual.{merger}", size * merge
        build.norm(f"{at}.norm", size if merger == "merger" else whole, bias=True)
        build.linear(f"{at}.linear_fc1", "column", whole, whole, scheme=plain, bias=True)
        out = vision.number("out_hidden_size")
        build.linear(f"{at}.linear_fc2", "row", whole, out, scheme=plain, bias=True)


def _qwen35_names(
    build: RankBuild, config: Config, fused: int, *, vision: bool, dense: bool
) -> NameResolver:
    known = {**build.parameters, **dict.fromkeys(build.aliases)}
    return Qwen35(
        known, 0 if dense else config.number("num_experts"), fused,
        build.setting.layers(config.number("num_hidden_layers")), moe=not dense, vision=vision,
        tied=config.flag("tie_word_embeddings"), last=build.setting.last,
    )  # fmt: skip


def _qwen35_class(*, vision: bool, dense: bool) -> ModelClass:
    base = "model.language_model" if vision else "model"

    def built(build: RankBuild, config: Config, fused: int) -> None:
        tower = config.get("vision_config")
        if vision and isinstance(tower, Mapping):
            _tower(build, Config(tower))
        _qwen35(build, config, fused, base=base, dense=dense)

    def names(build: RankBuild, config: Config, fused: int) -> NameResolver:
        return _qwen35_names(build, config, fused, vision=vision, dense=dense)

    blackwell = _ALL_FORMS if vision else ()
    return ModelClass(lambda config: QWEN35, no_shared, built, names, blackwell, lambda config: 1)


def _attention(
    build: RankBuild, at: str, config: Config, *, bias: bool, norms: bool, asked: str = ""
) -> None:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    size = config.number("head_dim", hidden // max(1, heads))
    kv_heads, asked = config.number("num_key_value_heads"), f"{asked or at}.self_attn"
    build.qkv(
        f"{at}.self_attn.qkv_proj", hidden, heads, kv_heads, size, bias=bias,
        asked=f"{asked}.qkv_proj",
    )  # fmt: skip
    build.linear(f"{at}.self_attn.o_proj", "row", heads * size, hidden, asked=f"{asked}.o_proj")
    if norms:
        build.norm(f"{at}.self_attn.q_norm", size)
        build.norm(f"{at}.self_attn.k_norm", size)


def _qwen3_moe_layers(build: RankBuild, config: Config, *, base: str) -> None:
    setting, hidden = build.setting, config.number("hidden_size")
    dense, step = config.numbers("mlp_only_layers"), config.number("decoder_sparse_step", 1)
    _ends(build, config, embeds=setting.first, heads=False, quantization=build.quantization)
    count = config.number("num_experts")
    for layer in _layers(build, config):
        at, asked = f"model.layers.{layer}", f"{base}.layers.{layer}"
        bias = config.flag("attention_bias")
        _attention(build, at, config, bias=bias, norms=True, asked=asked)
        if layer not in dense and count and (layer + 1) % step == 0:
            _check_experts(config, count, setting, f"{at}.mlp", moe=True)
            inner = config.number("moe_intermediate_size")
            build.experts(
                f"{at}.mlp.experts", count, 0, hidden, inner, asked=f"{asked}.mlp.experts"
            )
            plain = Unquantized(build.dtype)
            build.linear(f"{at}.mlp.gate", "replicated", hidden, count, scheme=plain)
        else:
            inner = config.number("intermediate_size")
            build.mlp(f"{at}.mlp", hidden, inner, asked=f"{asked}.mlp")
        norms(build, at, config)
    if setting.last:
        build.norm("model.norm", hidden)


def _qwen3_moe(build: RankBuild, config: Config, fused: int) -> None:
    _qwen3_moe_layers(build, config, base="model")
    _ends(build, config, embeds=False, heads=True, quantization=build.quantization)


def _qwen3_vl_moe(build: RankBuild, config: Config, fused: int) -> None:
    tower = config.get("vision_config")
    if isinstance(tower, Mapping):
        _tower(build, Config(tower))
    _qwen3_moe_layers(build, config, base="model.language_model")
    _last_head(build, config)


def _last_head(build: RankBuild, config: Config) -> None:
    """A head in the last stage, which is the embeddings in the only one if tied."""
    if not build.setting.last:
        return
    if build.setting.pp == 1 and config.flag("tie_word_embeddings"):
        build.aliases["lm_head.weight"] = "model.embed_tokens.weight"
    else:
        _ends(build, config, embeds=False, heads=True, quantization=build.quantization)


def _without_weight(build: RankBuild, module: str, kind: str, says: str, why: str) -> None:
    """Parts that the class reads of a projection before loading, and a packed one has not."""
    if f"{module}.weight" not in build.parameters:
        raise LoadRefused(kind, says, module, why)


def glm4_layer(build: RankBuild, at: str, config: Config, fused: int, *, dense: bool) -> None:
    setting, hidden = build.setting, config.number("hidden_size")
    count, inner = config.number("n_routed_experts"), config.number("moe_intermediate_size")
    shared = config.number("n_shared_experts", 0)
    _attention(
        build, at, config, bias=config.flag("attention_bias"), norms=config.flag("use_qk_norm")
    )
    if dense:
        build.mlp(f"{at}.mlp", hidden, config.number("intermediate_size"))
    else:
        _check_experts(config, count, setting, f"{at}.mlp", moe=False)
        build.whole(f"{at}.mlp.gate.weight", count, hidden, dtype="F32")
        build.whole(f"{at}.mlp.gate.e_score_correction_bias", count, dtype="F32")
        build.experts(f"{at}.mlp.experts", count, fused, hidden, inner)
        if shared and not fused:
            build.mlp(f"{at}.mlp.shared_experts", hidden, shared * inner)
            _without_weight(
                build, f"{at}.mlp.shared_experts.gate_up_proj", "AttributeError",
                "has no attribute 'weight'",
                "the class asks for the type of the shared experts' `weight`, which a packed "
                "projection has not",
            )  # fmt: skip
    norms(build, at, config)


def _glm4_moe(build: RankBuild, config: Config, fused: int) -> None:
    setting, dense = build.setting, config.number("first_k_dense_replace")
    _ends(build, config, embeds=setting.first, heads=False, quantization=build.quantization)
    for layer in _layers(build, config):
        glm4_layer(build, f"model.layers.{layer}", config, fused, dense=layer < dense)
    if setting.last:
        build.norm("model.norm", config.number("hidden_size"))
    _ends(build, config, embeds=False, heads=True, quantization=build.quantization)


def _latent_attention(build: RankBuild, at: str, config: Config) -> None:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    rank, first = config.number("kv_lora_rank"), config.get("q_lora_rank")
    plain, rope = config.number("qk_nope_head_dim"), config.number("qk_rope_head_dim")
    value = config.number("v_head_dim")
    at = f"{at}.self_attn"
    if first is not None:
        size = config.number("q_lora_rank")
        name = f"{at}.fused_qkv_a_proj_with_mqa"
        build.linear(name, "replicated", hidden, size + rank + rope)
        build.norm(f"{at}.q_a_layernorm", size)
        build.linear(f"{at}.q_b_proj", "column", size, heads * (plain + rope))
    else:
        build.linear(f"{at}.q_proj", "column", hidden, heads * (plain + rope))
        build.linear(f"{at}.kv_a_proj_with_mqa", "replicated", hidden, rank + rope)
    build.linear(f"{at}.kv_b_proj", "column", rank, heads * (plain + value))
    build.linear(f"{at}.o_proj", "row", heads * value, hidden)
    build.norm(f"{at}.kv_a_layernorm", rank)
    build.cache_scales(f"{at}.attn_mqa")
    build.cache_scales(f"{at}.attn_mha")


def _deepseek_mlp(build: RankBuild, module: str, hidden: int, inner: int) -> None:
    build.mlp(module, hidden, inner)
    for part in ("gate_up_proj", "down_proj"):
        name = f"{module}.{part}"
        if f"{name}.weight" not in build.parameters and f"{name}.weight_packed" in build.parameters:
            build.aliases[f"{name}.weight"] = f"{name}.weight_packed"


def deepseek_layer(build: RankBuild, at: str, config: Config, fused: int, *, dense: bool) -> None:
    setting, hidden = build.setting, config.number("hidden_size")
    count, inner = config.number("n_routed_experts"), config.number("moe_intermediate_size")
    shared = config.number("n_shared_experts", 0)
    _latent_attention(build, at, config)
    if dense:
        _deepseek_mlp(build, f"{at}.mlp", hidden, config.number("intermediate_size"))
    else:
        _check_experts(config, count, setting, f"{at}.mlp", moe=False)
        build.whole(f"{at}.mlp.gate.weight", count, hidden)
        if config.get("topk_method") == "noaux_tc":
            build.whole(f"{at}.mlp.gate.e_score_correction_bias", count, dtype="F32")
        build.experts(f"{at}.mlp.experts", count, fused, hidden, inner)
        if shared and not fused:
            _deepseek_mlp(build, f"{at}.mlp.shared_experts", hidden, shared * inner)
    norms(build, at, config)


def _deepseek_v3(build: RankBuild, config: Config, fused: int) -> None:
    check_states(config, moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid")
    setting, step = build.setting, config.number("moe_layer_freq")
    first = config.number("first_k_dense_replace")
    _ends(build, config, embeds=setting.first, heads=False, quantization=build.quantization)
    for layer in _layers(build, config):
        dense = layer < first or layer % step > 0
        deepseek_layer(build, f"model.layers.{layer}", config, fused, dense=dense)
    if not setting.last:
        return
    build.norm("model.norm", config.number("hidden_size"))
    _last_head(build, config)


def _deepseek_names(build: RankBuild, config: Config, fused: int) -> NameResolver:
    return DeepSeek(
        build.parameters, config.number("n_routed_experts"), fused,
        build.setting.layers(config.number("num_hidden_layers")),
        hidden=config.number("num_hidden_layers"), fuses_first=config.get("q_lora_rank") is not None,
        last=build.setting.last,
    )  # fmt: skip


def after_load(build: RankBuild, tensors: Mapping[str, TensorType]) -> None:
    """Last step of DeepSeek's class, once all is read: it takes kv_b_proj's `weight` apart. Raises
    LoadRefused where that projection is packed."""
    layers = {name.split(".")[2] for name in tensors if "kv_b_proj" in name and name.count(".") > 2}
    for layer in sorted(layers):
        whole_kv_b(build, f"model.layers.{layer}")


def whole_kv_b(build: RankBuild, at: str) -> None:
    """Raise LoadRefused where the layer's kv_b_proj is packed."""
    module = f"{at}.self_attn.kv_b_proj"
    if module in build.schemes and f"{module}.weight" not in build.parameters:
        raise LoadRefused(
            "AttributeError", "has no attribute 'weight'", module,
            "the class takes its `weight` apart after loading, and a packed projection has none: "
            "leave kv_b_proj unquantized",
        )  # fmt: skip


def fused_mla(config: Config) -> Fused:
    return _MLA if config.get("q_lora_rank") is not None else {}


CLASSES: dict[str, ModelClass] = {
    "Qwen3NextForCausalLM": ModelClass(
        lambda config: QWEN, qwen_shared, _qwen3_next,
        lambda build, config, fused: Qwen3Next(
            build.parameters, config.number("num_experts"), fused,
            range(config.number("num_hidden_layers")),
        ),
        _ALL_FORMS, lambda config: config.number("linear_num_key_heads"),
    ),
    "Qwen3_5ForConditionalGeneration": _qwen35_class(vision=True, dense=True),
    "Qwen3_5MoeForConditionalGeneration": _qwen35_class(vision=True, dense=False),
    "Qwen3_5ForCausalLM": _qwen35_class(vision=False, dense=True),
    "Qwen3_5MoeForCausalLM": _qwen35_class(vision=False, dense=False),
    "Qwen3MoeForCausalLM": ModelClass(
        lambda config: QWEN, no_shared, _qwen3_moe,
        lambda build, config, fused: Qwen3Moe(
            build.parameters, config.number("num_experts"), 0,
            build.setting.layers(config.number("num_hidden_layers")),
        ),
        _ALL_FORMS,
    ),
    # Its mapper takes names of other releases for those of the checkpoint.
    "Qwen3VLMoeForConditionalGeneration": ModelClass(
        lambda config: {}, no_shared, _qwen3_vl_moe,
        lambda build, config, fused: Qwen3VlMoe(
            {**build.parameters, **dict.fromkeys(build.aliases)}, config.number("num_experts"), 0,
            build.setting.layers(config.number("num_hidden_layers")),
        ),
        _ALL_FORMS,
        renames=Renames(
            parts=(("attn.qkv", "attn.qkv_proj"),),
            starts=(("model.language_model.", "language_model.model."), ("model.visual.", "visual."),
                    ("lm_head.", "language_model.lm_head."), ("model.", "language_model.model.")),
        ),
    ),
    "Glm4MoeForCausalLM": ModelClass(
        lambda config: {}, glm_shared, _glm4_moe,
        lambda build, config, fused: Qwen3Moe(
            build.parameters, config.number("n_routed_experts"), fused,
            build.setting.layers(config.number("num_hidden_layers")),
            first_unread=config.number("num_hidden_layers"),
        ),
        ("", "modelopt_fp4"),
    ),
    "DeepseekV3ForCausalLM": ModelClass(
        fused_mla, deepseek_shared, _deepseek_v3, _deepseek_names,
        _ALL_FORMS, after=after_load, marlin=False,
    ),
}  # fmt: skip
