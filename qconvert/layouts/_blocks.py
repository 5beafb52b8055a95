"""Blocks that several families are made of: experts, the decoder layer that all Qwen share, and the
layer of DeepSeek-V3, which other makers took over with the names of its tensors.

Not a family itself: it has no `FAMILY`, so discovery passes it by.
"""

from __future__ import annotations

from qconvert.checkpoint.family import (
    Config,
    Dims,
    Role,
    counted,
    first_int,
    is_tied,
    list_of,
    text_config,
    vision_config,
)


def parts(
    prefix: str, at: str, names: str, layers: str = "", *, optional: bool = False
) -> tuple[Role, ...]:
    """A role `prefix + name` for the module `at.name`, for each of the names (a string of words)."""
    return tuple(Role(prefix + name, f"{at}.{name}", layers, optional) for name in names.split())


def experts(prefix: str, at: str, layers: str) -> tuple[Role, ...]:
    """Routed experts in both published forms, each optional because the other may stand instead: a
    matrix an expert, and stacked 3-D parameters (gate rows first), which carry no `.weight`."""
    each, stacked = f"{at}.mlp.experts.{{E}}", f"{at}.mlp.experts"
    return (
        *parts(f"{prefix}experts.", each, "gate_proj up_proj down_proj", layers, optional=True),
        *parts(
            f"{prefix}stacked_experts.", stacked, "gate_up_proj down_proj", layers, optional=True
        ),
    )


def deepseek_layer(
    prefix: str, at: str, every: str, dense: str, moe: str, shared: str, *, optional: bool = False
) -> tuple[Role, ...]:
    """A decoder layer without its attention; `every` to `shared` are layer groups."""
    norms, names = "input_layernorm post_attention_layernorm", "gate_proj up_proj down_proj"
    router, bias = f"{at}.mlp.gate", "e_score_correction_bias"
    return (
        *parts(prefix, at, norms, every, optional=optional),
        *parts(f"{prefix}mlp.", f"{at}.mlp", names, dense, optional=optional),
        Role(f"{prefix}router", router, moe, optional),
        Role(f"{prefix}router.{bias}", f"{router}.{bias}", moe, optional),
        *parts(
            f"{prefix}shared_experts.", f"{at}.mlp.shared_experts", names, shared, optional=optional
        ),
        *experts(prefix, at, moe),
    )


def latent_attention(
    prefix: str, at: str, every: str, low_q: str, full_q: str, *, optional: bool = False
) -> tuple[Role, ...]:
    """Multi-head latent attention. Queries come through a low rank or straight: two layer groups."""
    attn = f"{at}.self_attn"
    names = "kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj"
    return (
        *parts(f"{prefix}attn.", attn, names, every, optional=optional),
        *parts(f"{prefix}attn.", attn, "q_a_proj q_a_layernorm q_b_proj", low_q, optional=optional),
        *parts(f"{prefix}attn.", attn, "q_proj", full_q, optional=optional),
    )


def deepseek_draft(at: str) -> tuple[Role, ...]:
    """What a draft layer has beside a decoder layer. Optional, as all of a draft layer: transformers
    drops it on saving and leaves its count in the config."""
    names = "embed_tokens enorm hnorm eh_proj shared_head.norm shared_head.head"
    return parts("mtp.", at, names, "mtp", optional=True)


def deepseek_dims(config: Config) -> Dims:
    """Dims of a DeepSeek-like config. `moe` follows `first_k_dense_replace` and `moe_layer_freq`, or
    transformers 5's `mlp_layer_types`; the draft layer, numbered on from the model's own, follows the
    same rule."""
    text = text_config(config)
    num_layers = counted(text, "num_hidden_layers")
    mtp_layers = counted(text, "num_nextn_predict_layers", "num_mtp_layers")
    num_experts = first_int(text, "n_routed_experts", "num_local_experts", "num_experts")
    first, step = first_int(text, "first_k_dense_replace"), first_int(text, "moe_layer_freq")
    types = list(text.get("mlp_layer_types") or ())

    def is_moe(layer: int) -> bool:
        if layer < len(types):
            return bool(types[layer] == "sparse")
        return num_experts > 0 and layer >= first and layer % (step or 1) == 0

    layers = tuple(range(num_layers))
    mtp = tuple(range(num_layers, num_layers + mtp_layers))
    moe = tuple(filter(is_moe, layers))
    return Dims(
        hidden_size=first_int(text, "hidden_size"),
        num_layers=num_layers,
        num_experts=num_experts,
        mtp_layers=mtp_layers,
        groups={
            "all": layers,
            "low_rank_q": layers if text.get("q_lora_rank") else (),
            "full_rank_q": () if text.get("q_lora_rank") else layers,
            "moe": moe,
            "dense": tuple(layer for layer in layers if not is_moe(layer)),
            "shared_experts": moe if text.get("n_shared_experts") else (),
            "mtp": mtp,
            "mtp_moe": tuple(filter(is_moe, mtp)),
            "mtp_dense": tuple(layer for layer in mtp if not is_moe(layer)),
        },
        tied=is_tied(config),
        moe_intermediate_size=first_int(text, "moe_intermediate_size"),
    )


def qwen_layer(
    prefix: str,
    at: str,
    every: str,
    attention: str,
    dense: str,
    moe: str,
    *,
    optional: bool = False,
) -> tuple[Role, ...]:
    """A decoder layer without its linear attention; `every` to `moe` are layer groups."""
    norms, attn = "input_layernorm post_attention_layernorm", "q_proj k_proj v_proj o_proj"
    return (
        *parts(prefix, at, norms, every, optional=optional),
        *parts(
            f"{prefix}attn.",
            f"{at}.self_attn",
            f"{attn} q_norm k_norm",
            attention,
            optional=optional,
        ),
        *parts(
            f"{prefix}mlp.", f"{at}.mlp", "gate_proj up_proj down_proj", dense, optional=optional
        ),
        Role(f"{prefix}router", f"{at}.mlp.gate", moe, optional),
        *experts(prefix, at, moe),
    )


def qwen_shared_expert(
    prefix: str, at: str, moe: str, *, optional: bool = False
) -> tuple[Role, ...]:
    """The expert every token passes, and the gate it is weighed with."""
    shared, names = f"{at}.mlp.shared_expert", "gate_proj up_proj down_proj"
    return (
        *parts(f"{prefix}shared_expert.", shared, names, moe, optional=optional),
        Role(f"{prefix}shared_expert_gate", f"{at}.mlp.shared_expert_gate", moe, optional),
    )


def gated_delta_net(at: str) -> tuple[Role, ...]:
    """Linear attention. Its input projections come fused (Qwen3-Next, and what we fuse) or split
    (Qwen3.5), so every one of them is optional."""
    inputs = "in_proj_qkvz in_proj_ba in_proj_qkv in_proj_z in_proj_b in_proj_a"
    return (
        *parts("gdn.", at, "conv1d A_log dt_bias norm out_proj", "linear_attention"),
        *parts("gdn.", at, inputs, "linear_attention", optional=True),
    )


def qwen_mtp() -> tuple[Role, ...]:
    """The draft layers: full attention whatever the model's own layers are. Optional, because
    transformers drops them on saving and leaves their count in the config."""
    outer, at = "fc norm pre_fc_norm_embedding pre_fc_norm_hidden", "mtp.layers.{L}"
    return (
        *parts("mtp.", "mtp", outer, optional=True),
        *qwen_layer("mtp.", at, "mtp", "mtp", "mtp_dense", "mtp_moe", optional=True),
        *qwen_shared_expert("mtp.", at, "mtp_moe", optional=True),
    )


def qwen_vision() -> tuple[Role, ...]:
    """The vision tower from Qwen3-VL on, without deepstack mergers. Optional: text-only copies leave
    it out."""
    outer = "patch_embed.proj pos_embed merger.norm merger.linear_fc1 merger.linear_fc2"
    block = "norm1 norm2 attn.qkv attn.proj mlp.linear_fc1 mlp.linear_fc2"
    return (
        *parts("vision.", "model.visual", outer, optional=True),
        *parts("vision.blocks.", "model.visual.blocks.{L}", block, "vision", optional=True),
    )


def qwen_dims(config: Config, mtp_layers: int = 0, full_attention_interval: int = 1) -> Dims:
    """Dims of a Qwen config; `mtp_layers` and the interval hold where the config is silent.

    transformers 4 writes `full_attention_interval`, transformers 5 `layer_types` instead.
    """
    text = text_config(config)
    vision = vision_config(config)
    layers = range(counted(text, "num_hidden_layers"))
    num_experts = first_int(text, "num_experts", "num_local_experts")
    mtp_layers = counted(text, "mtp_num_hidden_layers", "num_nextn_predict_layers") or mtp_layers
    interval = first_int(text, "full_attention_interval") or full_attention_interval
    types = list_of(text, "layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in layers
    ]
    step = first_int(text, "decoder_sparse_step") or 1
    dense_only = list_of(text, "mlp_only_layers")
    moe = tuple(
        layer
        for layer in layers
        if num_experts and layer not in dense_only and (layer + 1) % step == 0
    )
    mtp = tuple(range(mtp_layers))
    gdn = (
        first_int(text, "linear_num_key_heads"),
        first_int(text, "linear_num_value_heads"),
        first_int(text, "linear_key_head_dim"),
        first_int(text, "linear_value_head_dim"),
    )
    return Dims(
        hidden_size=first_int(text, "hidden_size"),
        num_layers=len(layers),
        num_experts=num_experts,
        mtp_layers=mtp_layers,
        groups={
            "all": tuple(layers),
            "full_attention": tuple(i for i, kind in enumerate(types) if kind == "full_attention"),
            "linear_attention": tuple(
                i for i, kind in enumerate(types) if kind == "linear_attention"
            ),
            "moe": moe,
            "dense": tuple(layer for layer in layers if layer not in moe),
            "mtp": mtp,
            "mtp_moe": mtp if num_experts else (),
            "mtp_dense": () if num_experts else mtp,
            "vision": tuple(range(first_int(vision, "depth"))),
        },
        tied=is_tied(config),
        moe_intermediate_size=first_int(text, "moe_intermediate_size"),
        gdn=gdn if all(gdn) else None,
    )
