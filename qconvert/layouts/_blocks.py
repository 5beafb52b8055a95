"""Blocks that several families share: experts, the decoder layer that all Qwen models share, and the
layer of DeepSeek-V3, which other makers adopted with the names of its tensors.

Not a family itself: it has no `FAMILY`, so discovery skips it.
"""

from __future__ import annotations

from collections.abc import Mapping

from qconvert.core.family import (
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
from qconvert.core.roles import EXPERT_COUNTS, Kind

Kinds = Mapping[str, Kind]

# Modules of a block by their names in it.
NORMS = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), Kind.NORM)
ATTENTION = {
    "q_proj": Kind.QUERY, "k_proj": Kind.KEY, "v_proj": Kind.VALUE, "o_proj": Kind.OUTPUT,
}  # fmt: skip
QK_NORMS = dict.fromkeys(("q_norm", "k_norm"), Kind.NORM)
MLP = {"gate_proj": Kind.GATE, "up_proj": Kind.UP, "down_proj": Kind.DOWN}
SHARED_MLP = {
    "gate_proj": Kind.SHARED_GATE, "up_proj": Kind.SHARED_UP, "down_proj": Kind.SHARED_DOWN,
}  # fmt: skip
_EXPERT = {
    "gate_proj": Kind.EXPERT_GATE, "up_proj": Kind.EXPERT_UP, "down_proj": Kind.EXPERT_DOWN,
}  # fmt: skip
_STACK = {"gate_up_proj": Kind.STACKED_GATE_UP, "down_proj": Kind.STACKED_DOWN}


def parts(
    prefix: str, at: str, kinds: Kinds, layers: str = "", *, optional: bool = False
) -> tuple[Role, ...]:
    """A role `prefix + name` for the module `at.name`, for each of the names."""
    return tuple(
        Role(prefix + name, f"{at}.{name}", kind, layers, optional) for name, kind in kinds.items()
    )


def experts(prefix: str, at: str, layers: str) -> tuple[Role, ...]:
    """Routed experts in both published forms, each optional because the other may be used instead: a
    matrix per expert, and stacked 3-D parameters (gate rows first), which have no `.weight`."""
    each, stacked = f"{at}.mlp.experts.{{E}}", f"{at}.mlp.experts"
    return (
        *parts(f"{prefix}experts.", each, _EXPERT, layers, optional=True),
        *parts(f"{prefix}stacked_experts.", stacked, _STACK, layers, optional=True),
    )


def outer(at: str = "model.", head: str = "lm_head") -> tuple[Role, ...]:
    """The modules around the layers; `at` is the prefix of the language model's names."""
    return (
        Role("embed_tokens", f"{at}embed_tokens", Kind.EMBEDDING),
        Role("norm", f"{at}norm", Kind.NORM),
        Role("lm_head", head, Kind.HEAD),
    )


def deepseek_layer(
    prefix: str, at: str, every: str, dense: str, moe: str, shared: str, *, optional: bool = False
) -> tuple[Role, ...]:
    """A decoder layer without its attention; `every` to `shared` are layer groups."""
    router, bias = f"{at}.mlp.gate", "e_score_correction_bias"
    return (
        *parts(prefix, at, NORMS, every, optional=optional),
        *parts(f"{prefix}mlp.", f"{at}.mlp", MLP, dense, optional=optional),
        Role(f"{prefix}router", router, Kind.ROUTER, moe, optional),
        Role(f"{prefix}router.{bias}", f"{router}.{bias}", Kind.BUFFER, moe, optional),
        *parts(
            f"{prefix}shared_experts.",
            f"{at}.mlp.shared_experts",
            SHARED_MLP,
            shared,
            optional=optional,
        ),
        *experts(prefix, at, moe),
    )


def latent_attention(
    prefix: str, at: str, every: str, low_q: str, full_q: str, *, optional: bool = False
) -> tuple[Role, ...]:
    """Multi-head latent attention. Queries are projected in two steps (low rank) or one: two layer
    groups."""
    attn = f"{at}.self_attn"
    keys = {
        "kv_a_proj_with_mqa": Kind.KV_DOWN, "kv_a_layernorm": Kind.NORM, "kv_b_proj": Kind.KV_UP,
        "o_proj": Kind.OUTPUT,
    }  # fmt: skip
    low = {"q_a_proj": Kind.QUERY_DOWN, "q_a_layernorm": Kind.NORM, "q_b_proj": Kind.QUERY_UP}
    full = {"q_proj": Kind.QUERY}
    return (
        *parts(f"{prefix}attn.", attn, keys, every, optional=optional),
        *parts(f"{prefix}attn.", attn, low, low_q, optional=optional),
        *parts(f"{prefix}attn.", attn, full, full_q, optional=optional),
    )


def deepseek_draft(at: str) -> tuple[Role, ...]:
    """Return what a draft layer has in addition to a decoder layer. Optional, like all of a draft layer:
    transformers drops it on saving and leaves its count in the config."""
    kinds = {
        "embed_tokens": Kind.EMBEDDING, "enorm": Kind.NORM, "hnorm": Kind.NORM,
        "eh_proj": Kind.DRAFT_JOIN, "shared_head.norm": Kind.NORM, "shared_head.head": Kind.HEAD,
    }  # fmt: skip
    return parts("mtp.", at, kinds, "mtp", optional=True)


def deepseek_dims(config: Config) -> Dims:
    """Dims of a DeepSeek-like config. `moe` follows `first_k_dense_replace` and `moe_layer_freq`, or
    transformers 5's `mlp_layer_types`; the draft layer, numbered on from the model's own, follows the
    same rule."""
    text = text_config(config)
    num_layers = counted(text, "num_hidden_layers")
    mtp_layers = counted(text, "num_nextn_predict_layers", "num_mtp_layers")
    num_experts = first_int(text, *EXPERT_COUNTS)
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
    return (
        *parts(prefix, at, NORMS, every, optional=optional),
        *parts(
            f"{prefix}attn.",
            f"{at}.self_attn",
            ATTENTION | QK_NORMS,
            attention,
            optional=optional,
        ),
        *parts(f"{prefix}mlp.", f"{at}.mlp", MLP, dense, optional=optional),
        Role(f"{prefix}router", f"{at}.mlp.gate", Kind.ROUTER, moe, optional),
        *experts(prefix, at, moe),
    )


def qwen_shared_expert(
    prefix: str, at: str, moe: str, *, optional: bool = False
) -> tuple[Role, ...]:
    """The expert that every token passes through, and its gate."""
    shared, gate = f"{at}.mlp.shared_expert", f"{at}.mlp.shared_expert_gate"
    return (
        *parts(f"{prefix}shared_expert.", shared, SHARED_MLP, moe, optional=optional),
        Role(f"{prefix}shared_expert_gate", gate, Kind.SHARED_WEIGHT, moe, optional),
    )


def gated_delta_net(at: str) -> tuple[Role, ...]:
    """Linear attention. Its input projections are fused (Qwen3-Next, and what we fuse) or split
    (Qwen3.5), so all of them are optional."""
    kinds = {
        "conv1d": Kind.CONV, "A_log": Kind.BUFFER, "dt_bias": Kind.BUFFER, "norm": Kind.NORM,
        "out_proj": Kind.GDN_OUTPUT,
    }  # fmt: skip
    inputs = {
        "in_proj_qkvz": Kind.GDN_QKVZ, "in_proj_ba": Kind.GDN_BA, "in_proj_qkv": Kind.GDN_QKV,
        "in_proj_z": Kind.GDN_Z, "in_proj_b": Kind.GDN_B, "in_proj_a": Kind.GDN_A,
    }  # fmt: skip
    return (
        *parts("gdn.", at, kinds, "linear_attention"),
        *parts("gdn.", at, inputs, "linear_attention", optional=True),
    )


def qwen_mtp() -> tuple[Role, ...]:
    """The draft layers: full attention whatever the model's own layers are. Optional, because
    transformers drops them on saving and leaves their count in the config."""
    around = {
        "fc": Kind.DRAFT_JOIN, "norm": Kind.NORM, "pre_fc_norm_embedding": Kind.NORM,
        "pre_fc_norm_hidden": Kind.NORM,
    }  # fmt: skip
    at = "mtp.layers.{L}"
    return (
        *parts("mtp.", "mtp", around, optional=True),
        *qwen_layer("mtp.", at, "mtp", "mtp", "mtp_dense", "mtp_moe", optional=True),
        *qwen_shared_expert("mtp.", at, "mtp_moe", optional=True),
    )


def qwen_vision() -> tuple[Role, ...]:
    """The vision tower from Qwen3-VL on, without deepstack mergers. Optional: text-only copies leave
    it out."""
    around = {
        "patch_embed.proj": Kind.CONV, "pos_embed": Kind.POSITION, "merger.norm": Kind.NORM,
        "merger.linear_fc1": Kind.VISION, "merger.linear_fc2": Kind.VISION,
    }  # fmt: skip
    block = {
        "norm1": Kind.NORM, "norm2": Kind.NORM, "attn.qkv": Kind.VISION, "attn.proj": Kind.VISION,
        "mlp.linear_fc1": Kind.VISION, "mlp.linear_fc2": Kind.VISION,
    }  # fmt: skip
    return (
        *parts("vision.", "model.visual", around, optional=True),
        *parts("vision.blocks.", "model.visual.blocks.{L}", block, "vision", optional=True),
    )


def qwen_dims(config: Config, mtp_layers: int = 0, full_attention_interval: int = 1) -> Dims:
    """Dims of a Qwen config; `mtp_layers` and the interval apply if the config does not state them.

    transformers 4 writes `full_attention_interval`, transformers 5 `layer_types` instead.
    """
    text = text_config(config)
    vision = vision_config(config)
    layers = range(counted(text, "num_hidden_layers"))
    num_experts = first_int(text, *EXPERT_COUNTS)
    counts = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    if any(text.get(key) is not None for key in counts):
        mtp_layers = counted(text, *counts)
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
