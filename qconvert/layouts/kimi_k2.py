"""Kimi-K2 (Base, Instruct, Thinking), and the multi-modal Kimi-K2.5 and K2.6 around the same model.

Names: those of DeepSeek-V3 without its draft layer (`DeepseekV3ForCausalLM` in transformers,
models/deepseek_v3/), which Kimi's own modeling_deepseek.py shares. K2.5 puts `language_model.` before
them, and has a vision tower and a projector. The names are those that transformers reads
(conversion_mapping.py, "kimi_k25"), not those of its class. A K2.5 that transformers saved is
not supported here: it renames the language model's layers to `blocks`, as it does the tower's.

Instruct is block FP8 and stores `rotary_emb.inv_freq`, which loaders compute. From Thinking on, the
routed experts are compressed-tensors INT4 (`weight_packed`, `weight_scale` in groups of 32,
`weight_shape`), and all else is bf16.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.family import Config, Dims, Family, Role, first_int, vision_config
from qconvert.core.roles import Kind
from qconvert.layouts._blocks import deepseek_dims, deepseek_layer, latent_attention, outer, parts

_AT = "@model.layers.{L}"
_BLOCK = {
    "norm0": Kind.NORM, "norm1": Kind.NORM, "wqkv": Kind.VISION, "wo": Kind.VISION,
    "mlp.fc0": Kind.VISION, "mlp.fc1": Kind.VISION,
}  # fmt: skip
_TOWER = {
    "patch_embed.proj": Kind.CONV, "patch_embed.pos_emb": Kind.POSITION,
    "encoder.final_layernorm": Kind.NORM,
}  # fmt: skip
_INV_FREQ = f"{_AT}.self_attn.rotary_emb.inv_freq"


def dims(config: Config) -> Dims:
    """DeepSeek's, with the blocks of the vision tower (published configs put `vt_` before their
    count) and the projector's two linear layers, numbered 0 and 2 around an activation."""
    vision = vision_config(config)
    blocks = range(first_int(vision, "vt_num_hidden_layers", "num_hidden_layers"))
    groups = {"vision": tuple(blocks), "vision_projector": (0, 2) if vision else ()}
    found = deepseek_dims(config)
    return replace(found, groups={**found.groups, **groups})


FAMILY = Family(
    name="kimi_k2",
    model_types=("kimi_k2", "kimi_k25"),
    dims=dims,
    prefixes=("", "language_model."),
    roles=(
        *outer("@model.", "@lm_head"),
        *latent_attention("", _AT, "all", "low_rank_q", "full_rank_q"),
        Role("attn.inv_freq", _INV_FREQ, Kind.BUFFER, "all", optional=True),
        *deepseek_layer("", _AT, "all", "dense", "moe", "shared_experts"),
        *parts("vision.", "vision_tower", _TOWER, optional=True),
        *parts(
            "vision.blocks.", "vision_tower.encoder.blocks.{L}", _BLOCK, "vision", optional=True
        ),
        Role("vision.projector.norm", "mm_projector.pre_norm", Kind.NORM, optional=True),
        Role(
            "vision.projector",
            "mm_projector.proj.{L}",
            Kind.VISION,
            "vision_projector",
            optional=True,
        ),
    ),
    tied=("lm_head", "embed_tokens"),
)
