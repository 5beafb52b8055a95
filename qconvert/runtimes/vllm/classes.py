"""The model classes of vLLM that this simulator knows: what each builds on a rank, and how it finds the
parameter of a tensor.

Read in vLLM: `models/qwen3_next.py`, `qwen3_5.py`, `qwen3_moe.py`, `qwen3_vl.py`, `glm4_moe.py`,
`deepseek_v2.py`, `layers/mamba/gdn/qwen_gdn_linear_attn.py`, `config/model.py`. Shared experts are never
loaded as routed ones: that is for ROCm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qconvert.core.dtypes import TensorType
from qconvert.runtimes.loading.building import Config, RankBuild, check_states
from qconvert.runtimes.loading.load_weights import NameResolver
from qconvert.runtimes.loading.schemes import Unquantized
from qconvert.runtimes.loading.setting import LoadRefused
from qconvert.runtimes.vllm.building import Rank
from qconvert.runtimes.vllm.ignore_matching import Fused
from qconvert.runtimes.vllm.weight_mapping import (
    GATE_UP,
    GDN,
    QKV,
    DeepSeek,
    Stacked,
    Walk,
    gate_up_of,
)

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
QWEN: Fused = {"qkv_proj": _QKV, "gate_up_proj": _GATE_UP}
_NEXT: Fused = {**QWEN, "in_proj_qkvz": ("in_proj_qkvz",), "in_proj_ba": ("in_proj_ba",)}
_QWEN35: Fused = {
    **QWEN, "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a"),
}  # fmt: skip
_VISION: Fused = {**_QWEN35, "qkv": ("qkv",)}
_IN_VISION = (
    ("model.visual.", "visual."), ("lm_head.", "language_model.lm_head."),
    ("model.language_model.", "language_model.model."),
)  # fmt: skip


@dataclass(frozen=True)
class ModelClass:
    """A class: the names that it fuses and the prefixes that it rewrites, as its quantization asks for
    them; what it builds; how it finds names. `groups`: in how many groups the rows of its fused
    linear-attention projections must be, 0 where the class takes them in parts; `after`: what it
    does once all is read."""

    fused: Callable[[Config], Fused]
    build: Callable[[Rank, Config], None]
    names: Callable[[Rank, Config, bool], NameResolver]
    renames: tuple[tuple[str, str], ...] = ()
    groups: Callable[[Config], int] | None = None
    after: Callable[[RankBuild, Mapping[str, TensorType]], None] | None = None


def _own_layers(rank: Rank, config: Config, base: str = "model") -> range:
    """The layers of the stage; the others are absent."""
    layers = config.number("num_hidden_layers")
    return rank.setting.layers(layers)


def check_heads(rank: Rank, heads: int) -> None:
    """Raise LoadRefused where ranks cannot share heads; a config without any has 0."""
    if heads % rank.setting.tp:
        raise LoadRefused(
            "ValidationError", "must be divisible by tensor parallel size", "config.json",
            f"{heads} heads cannot be divided among {rank.setting.tp} ranks",
        )  # fmt: skip


def _embeds(rank: Rank, config: Config, base: str, *, here: bool) -> None:
    if here:
        sizes = config.number("vocab_size"), config.number("hidden_size")
        rank.vocabulary(f"{base}.embed_tokens", *sizes)
        tied = rank.setting.last and config.flag("tie_word_embeddings")
        _spare(rank, f"{base}.embed_tokens", used=rank.setting.first or tied)
    else:
        rank.absent.append(f"{base}.embed_tokens")


def _norm(rank: Rank, config: Config, base: str, *, here: bool) -> None:
    if here:
        rank.norm(f"{base}.norm", config.number("hidden_size"))
        _spare(rank, f"{base}.norm", used=rank.setting.last)
    else:
        rank.absent.append(f"{base}.norm")


def head(
    rank: Rank,
    config: Config,
    outer: str,
    base: str,
    *,
    here: bool,
    ties: bool,
    plain: bool = False,
) -> None:
    module = f"{outer}lm_head"
    if not here:
        rank.absent.append(module)
    elif ties and config.flag("tie_word_embeddings"):
        rank.aliases[f"{module}.weight"] = f"{base}.embed_tokens.weight"
    else:
        sizes = config.number("vocab_size"), config.number("hidden_size")
        rank.vocabulary(module, *sizes, None if plain else rank.quantization.head(module))
        _spare(rank, module, used=rank.setting.last)


def _spare(rank: Rank, module: str, *, used: bool) -> None:
    """Mark a module that a class builds in every stage as needed where it computes with it."""
    for name, parameter in rank.parameters.items():
        if name.startswith(f"{module}."):
            parameter.needed = parameter.needed and used


def _check_experts(rank: Rank, experts: int, where: str) -> None:
    if rank.setting.tp > experts:
        raise LoadRefused(
            "ValueError", f"Tensor parallel size {rank.setting.tp} is greater than", where,
            f"{rank.setting.tp} ranks are more than the {experts} experts",
        )  # fmt: skip


def _experts(rank: Rank, at: str, experts: int, config: Config) -> None:
    rank.experts(
        f"{at}.experts.routed_experts", experts, 0, config.number("hidden_size"),
        config.number("moe_intermediate_size"), asked=f"{at}.experts",
    )  # fmt: skip


def _gate(rank: Rank, module: str, rows: int, config: Config) -> None:
    plain = Unquantized(rank.dtype)
    rank.linear(module, "replicated", config.number("hidden_size"), rows, scheme=plain)


def _norms(rank: Rank, at: str, config: Config) -> None:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        rank.norm(f"{at}.{norm}", config.number("hidden_size"))


def _linear_attention(rank: Rank, at: str, config: Config, *, interleaved: bool) -> None:
    hidden = config.number("hidden_size")
    keys, values = config.number("linear_num_key_heads"), config.number("linear_num_value_heads")
    key, value = config.number("linear_key_head_dim"), config.number("linear_value_head_dim")
    sizes = keys * key, keys * key, values * value
    rank.convolution(f"{at}.conv1d", sizes, config.number("linear_conv_kernel_dim"))
    qkvz: tuple[int, ...] = (*sizes, values * value)
    ba: tuple[int, ...] = (values, values)
    if interleaved:
        qkvz, ba = (sum(qkvz),), (sum(ba),)
    rank.linear(f"{at}.in_proj_qkvz", "merged", hidden, *qkvz)
    # Marlin's kernels need 64 rows, so GPTQ's is not divided.
    whole = not interleaved and rank.quantization.name == "auto_gptq"
    rank.linear(f"{at}.in_proj_ba", "merged", hidden, *ba, whole=whole)
    rank.per_head(f"{at}.dt_bias", values)
    rank.per_head(f"{at}.A_log", values, "F32")
    rank.norm(f"{at}.norm", value)
    rank.linear(f"{at}.out_proj", "row", values * value, hidden)


def _attention(
    rank: Rank,
    at: str,
    config: Config,
    *,
    gated: bool = False,
    bias: bool = False,
    norms: bool = True,
) -> None:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    size = config.number("head_dim", hidden // max(1, heads))
    kv_heads = config.number("num_key_value_heads")
    rank.qkv(f"{at}.qkv_proj", hidden, heads * (1 + gated), kv_heads, size, bias=bias)
    rank.linear(f"{at}.o_proj", "row", heads * size, hidden)
    rank.cache_scales(f"{at}.attn")
    if norms:
        rank.norm(f"{at}.q_norm", size)
        rank.norm(f"{at}.k_norm", size)


def gdn_model(rank: Rank, config: Config, base: str, *, interleaved: bool, dense: bool) -> None:
    every = config.number("full_attention_interval", 4)
    kinds = config.get("layer_types")
    _embeds(rank, config, base, here=True)
    own = _own_layers(rank, config)
    for layer in own:
        at = f"{base}.layers.{layer}"
        full = not (layer + 1) % every
        if isinstance(kinds, list) and layer < len(kinds):
            full = kinds[layer] == "full_attention"
        if full:
            gated = config.flag("attn_output_gate", default=True)
            _attention(rank, f"{at}.self_attn", config, gated=gated, bias=config.flag("qkv_bias"))
        else:
            _linear_attention(rank, f"{at}.linear_attn", config, interleaved=interleaved)
        if dense:
            hidden, inner = config.number("hidden_size"), config.number("intermediate_size")
            rank.mlp(f"{at}.mlp", hidden, inner)
        else:
            experts, shared = (
                config.number("num_experts"), config.number("shared_expert_intermediate_size", 0)
            )  # fmt: skip
            _check_experts(rank, experts, f"{at}.mlp")
            _gate(rank, f"{at}.mlp.gate", experts, config)
            _gate(rank, f"{at}.mlp.shared_expert_gate", 1, config)
            if shared:
                rank.mlp(f"{at}.mlp.shared_expert", config.number("hidden_size"), shared)
            _experts(rank, f"{at}.mlp", experts, config)
        _norms(rank, at, config)
    _norm(rank, config, base, here=rank.setting.last)
    _some_experts(own, dense=dense, of="Qwen3Next" if interleaved else "Qwen3_5")


def _some_experts(own: range, *, dense: bool, of: str) -> None:
    """Classes of experts refuse a stage without any."""
    if not own and not dense:
        raise LoadRefused(
            "RuntimeError", f"No {of}", "model.layers",
            "a stage of this class must have a layer with experts",
        )  # fmt: skip


def _qwen3_next(rank: Rank, config: Config) -> None:
    check_heads(rank, config.number("num_attention_heads"))
    gdn_model(rank, config, "model", interleaved=True, dense=False)
    head(rank, config, "", "model", here=True, ties=False, plain=True)


def _tower(rank: Rank, vision: Config) -> None:
    """qwen3_vl.py, Qwen3_VisionTransformer; in each stage but used in the first."""
    size, heads = vision.number("hidden_size"), vision.number("num_heads")
    merge, patch = vision.number("spatial_merge_size") ** 2, vision.number("patch_size")
    frames = vision.number("temporal_patch_size")
    shape = size, vision.number("in_channels", 3), frames, patch, patch
    rank.whole("visual.patch_embed.proj.weight", *shape)
    rank.whole("visual.patch_embed.proj.bias", size)
    rank.whole("visual.pos_embed.weight", vision.number("num_position_embeddings"), size)
    inner = vision.number("intermediate_size")
    for block in range(vision.number("depth")):
        at = f"visual.blocks.{block}"
        rank.norm(f"{at}.norm1", size, bias=True)
        rank.norm(f"{at}.norm2", size, bias=True)
        rank.qkv(f"{at}.attn.qkv", size, heads, heads, size // heads, bias=True)
        rank.linear(f"{at}.attn.proj", "row", size, size, bias=True)
        rank.linear(f"{at}.mlp.linear_fc1", "column", size, inner, bias=True)
        rank.linear(f"{at}.mlp.linear_fc2", "row", inner, size, bias=True)
    deep = vision.numbers("deepstack_visual_indexes")
    for merger in ("merger", *(f"deepstack_merger_list.{i}" for i in range(len(deep)))):
        at, whole = f"visual.{merger}", size * merge
        rank.norm(f"{at}.norm", size if merger == "merger" else whole, bias=True)
        rank.linear(f"{at}.linear_fc1", "column", whole, whole, bias=True)
        rank.linear(f"{at}.linear_fc2", "row", whole, vision.number("out_hidden_size"), bias=True)


def walk(
    rank: Rank,
    config: Config,
    quantized: bool,
    *,
    experts: int,
    stacks: Stacked,
    root: str = "model.",
    prefixes: tuple[tuple[str, str | None], ...] = (),
    spare: tuple[str, ...] = (),
    drafts: range = range(0),
    kind: type[Walk] = Walk,
) -> Walk:
    layers = config.number("num_hidden_layers")
    modules = {
        name[:at]
        for name in (*rank.parameters, *rank.aliases)
        for at, letter in enumerate(name)
        if letter == "."
    }
    known = {**rank.parameters, **dict.fromkeys(rank.aliases)}
    return kind(
        known, experts, rank.fused, modules, rank.setting.layers(layers), range(layers), prefixes,
        stacks, root, tuple(rank.absent), frozenset(rank.aliases), spare, quantized, drafts,
    )  # fmt: skip


def _qwen35_class(*, vision: bool, dense: bool) -> ModelClass:
    outer = "language_model." if vision else ""
    base = f"{outer}model"

    def built(rank: Rank, config: Config) -> None:
        check_heads(rank, config.number("num_attention_heads"))
        tower = config.get("vision_config")
        if vision and isinstance(tower, Mapping):
            if rank.setting.first:
                _tower(rank, Config(tower))
            else:
                rank.absent.append("visual")
        gdn_model(rank, config, base, interleaved=False, dense=dense)
        head(rank, config, outer, base, here=rank.setting.last, ties=True)

    def names(rank: Rank, config: Config, quantized: bool) -> NameResolver:
        stacks = (*QKV, *GATE_UP, *gate_up_of("shared_expert"), *GDN)
        inside = (("model.language_model.", "model."),)
        return walk(
            rank, config, quantized, experts=0 if dense else config.number("num_experts"),
            stacks=stacks, root=f"{base}.",
            prefixes=(*(_IN_VISION if vision else inside), ("mtp.", None)),
        )  # fmt: skip

    renames = _IN_VISION if vision else (("model.language_model.", "model."),)
    return ModelClass(
        lambda config: _VISION if vision else _QWEN35, built, names, renames, lambda config: 0
    )


def _qwen3_moe(rank: Rank, config: Config) -> None:
    check_heads(rank, config.number("num_attention_heads"))
    hidden, experts = config.number("hidden_size"), config.number("num_experts")
    dense, step = config.numbers("mlp_only_layers"), config.number("decoder_sparse_step", 1)
    _embeds(rank, config, "model", here=True)
    sparse = 0
    for layer in _own_layers(rank, config):
        at = f"model.layers.{layer}"
        _attention(rank, f"{at}.self_attn", config, bias=config.flag("attention_bias"))
        if layer not in dense and experts and (layer + 1) % step == 0:
            _check_experts(rank, experts, f"{at}.mlp")
            rank.linear(f"{at}.mlp.gate", "replicated", hidden, experts)  # quantized if not listed
            _experts(rank, f"{at}.mlp", experts, config)
            sparse += 1
        else:
            rank.mlp(f"{at}.mlp", hidden, config.number("intermediate_size"))
        _norms(rank, at, config)
    _norm(rank, config, "model", here=True)
    head(rank, config, "", "model", here=True, ties=True)
    _some_experts(range(sparse), dense=False, of="Qwen3MoE")


def _glm4_moe(rank: Rank, config: Config) -> None:
    check_heads(rank, config.number("num_attention_heads"))
    check_states(config, head_dim=128)
    _embeds(rank, config, "model", here=rank.setting.first)
    own = _own_layers(rank, config)
    for layer in own:
        glm4_layer(rank, layer, config)
    _norm(rank, config, "model", here=rank.setting.last)
    head(rank, config, "", "model", here=rank.setting.last, ties=False)
    sparse = range(max(own.start, config.number("first_k_dense_replace")), own.stop)
    _some_experts(sparse, dense=False, of="Glm4MoE")


def glm4_layer(rank: Rank, layer: int, config: Config) -> None:
    at, hidden = f"model.layers.{layer}", config.number("hidden_size")
    inner, shared = config.number("moe_intermediate_size"), config.number("n_shared_experts", 0)
    experts = config.number("n_routed_experts")
    bias, norms = config.flag("attention_bias"), config.flag("use_qk_norm")
    _attention(rank, f"{at}.self_attn", config, bias=bias, norms=norms)
    if layer < config.number("first_k_dense_replace"):
        rank.mlp(f"{at}.mlp", hidden, config.number("intermediate_size"))
    else:
        plain = Unquantized("F32")
        rank.linear(f"{at}.mlp.gate", "replicated", hidden, experts, scheme=plain)
        rank.whole(f"{at}.mlp.gate.e_score_correction_bias", experts, dtype="F32")
        if shared:
            rank.mlp(f"{at}.mlp.shared_experts", hidden, shared * inner)
        _experts(rank, f"{at}.mlp", experts, config)
    _norms(rank, at, config)


def _latent_attention(rank: Rank, at: str, config: Config) -> None:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    latent = config.number("kv_lora_rank")
    plain, rope = config.number("qk_nope_head_dim"), config.number("qk_rope_head_dim")
    value = config.number("v_head_dim")
    if config.get("q_lora_rank") is not None:
        size = config.number("q_lora_rank")
        rank.linear(
            f"{at}.fused_qkv_a_proj", "merged", hidden, size, latent + rope, whole=True
        )  # fmt: skip
        rank.norm(f"{at}.q_a_layernorm", size)
        rank.linear(f"{at}.q_b_proj", "column", size, heads * (plain + rope))
    else:
        rank.linear(f"{at}.kv_a_proj_with_mqa", "replicated", hidden, latent + rope)
        rank.linear(f"{at}.q_proj", "column", hidden, heads * (plain + rope))
    rank.norm(f"{at}.kv_a_layernorm", latent)
    rank.linear(f"{at}.kv_b_proj", "column", latent, heads * (plain + value))
    rank.linear(f"{at}.o_proj", "row", heads * value, hidden)


def _deepseek_v3(rank: Rank, config: Config) -> None:
    check_heads(rank, config.number("num_attention_heads"))
    _embeds(rank, config, "model", here=rank.setting.first)
    for layer in _own_layers(rank, config):
        deepseek_layer(rank, layer, config)
    _norm(rank, config, "model", here=rank.setting.last)
    head(rank, config, "", "model", here=rank.setting.last, ties=False)


def deepseek_layer(rank: Rank, layer: int, config: Config) -> None:
    at, hidden = f"model.layers.{layer}", config.number("hidden_size")
    inner, shared = config.number("moe_intermediate_size"), config.number("n_shared_experts", 0)
    dense, step = config.number("first_k_dense_replace"), config.number("moe_layer_freq", 1)
    experts = config.number("n_routed_experts")
    _latent_attention(rank, f"{at}.self_attn", config)
    if layer < dense or layer % step:
        rank.mlp(f"{at}.mlp", hidden, config.number("intermediate_size"))
    else:
        _gate(rank, f"{at}.mlp.gate", experts, config)
        if config.get("topk_method") == "noaux_tc":
            rank.whole(f"{at}.mlp.gate.e_score_correction_bias", experts, dtype="F32")
        if shared:
            rank.mlp(f"{at}.mlp.shared_experts", hidden, shared * inner)
        _experts(rank, f"{at}.mlp", experts, config)
    _norms(rank, at, config)


def drafts(config: Config) -> range:
    layers = config.number("num_hidden_layers")
    drafts = config.get("num_nextn_predict_layers")
    return range(layers, layers + (drafts if type(drafts) is int and 0 < drafts < 100 else 0))


def _deepseek_names(rank: Rank, config: Config, quantized: bool) -> NameResolver:
    layers = config.number("num_hidden_layers")
    return DeepSeek(
        rank.parameters, config.number("n_routed_experts"), rank.setting.layers(layers),
        range(layers), tuple(rank.absent), drafts(config), quantized,
    )  # fmt: skip


def _mla(config: Config) -> Fused:
    first = {"fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}
    both: Fused = {"gate_up_proj": _GATE_UP}
    return {**both, **first} if config.get("q_lora_rank") is not None else both


def _moe(config: Config) -> Fused:
    dense = bool(config.numbers("mlp_only_layers"))
    return QWEN if dense else {"qkv_proj": _QKV}


CLASSES: dict[str, ModelClass] = {
    "Qwen3NextForCausalLM": ModelClass(
        lambda config: _NEXT, _qwen3_next,
        lambda rank, config, quantized: walk(
            rank, config, quantized, experts=config.number("num_experts"),
            stacks=(*QKV, *GATE_UP, *gate_up_of("shared_expert")), prefixes=(("mtp.", None),),
        ),
        groups=lambda config: config.number("linear_num_key_heads"),
    ),
    "Qwen3_5ForConditionalGeneration": _qwen35_class(vision=True, dense=True),
    "Qwen3_5MoeForConditionalGeneration": _qwen35_class(vision=True, dense=False),
    "Qwen3_5ForCausalLM": _qwen35_class(vision=False, dense=True),
    "Qwen3_5MoeForCausalLM": _qwen35_class(vision=False, dense=False),
    "Qwen3MoeForCausalLM": ModelClass(
        _moe, _qwen3_moe,
        lambda rank, config, quantized: walk(
            rank, config, quantized, experts=config.number("num_experts"),
            stacks=(*QKV, *GATE_UP, *gate_up_of("shared_expert")),
            spare=(
                ".bias", "_bias", ".weight_scale", "_weight_scale", ".input_scale", "_input_scale",
            ),
        ),
    ),
    "Glm4MoeForCausalLM": ModelClass(
        lambda config: QWEN, _glm4_moe,
        lambda rank, config, quantized: walk(
            rank, config, quantized, experts=config.number("n_routed_experts"),
            stacks=(*QKV, *GATE_UP, *gate_up_of("shared_experts")), drafts=drafts(config),
        ),
    ),
    "DeepseekV3ForCausalLM": ModelClass(_mla, _deepseek_v3, _deepseek_names),
}  # fmt: skip
