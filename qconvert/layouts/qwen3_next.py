"""Qwen3-Next: Qwen3-Next-80B-A3B Instruct and Thinking and their FP8 releases.

Names: `Qwen3NextForCausalLM` in transformers 5.17 (models/qwen3_next/modeling_qwen3_next.py), and
`model.safetensors.index.json` of Qwen/Qwen3-Next-80B-A3B-Instruct for `mtp.*`, which transformers
ignores. The published config does not say that there is a draft layer; runtimes assume one, as we
do.
"""

from __future__ import annotations

from qconvert.checkpoint.family import Config, Dims, Family, Role
from qconvert.layouts._blocks import (
    gated_delta_net,
    qwen_dims,
    qwen_layer,
    qwen_mtp,
    qwen_shared_expert,
)


def dims(config: Config) -> Dims:
    """One draft layer and full attention in every fourth layer where the config is silent."""
    return qwen_dims(config, mtp_layers=1, full_attention_interval=4)


FAMILY = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    dims=dims,
    roles=(
        Role("embed_tokens", "model.embed_tokens"),
        Role("norm", "model.norm"),
        Role("lm_head", "lm_head"),
        *qwen_layer("", "model.layers.{L}", "all", "full_attention", "dense", "moe"),
        *qwen_shared_expert("", "model.layers.{L}", "moe"),
        *gated_delta_net("model.layers.{L}.linear_attn"),
        *qwen_mtp(),
    ),
    shared_scale=(
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
        ("in_proj_qkv", "in_proj_z"),
        ("in_proj_b", "in_proj_a"),
    ),
    tied=("lm_head", "embed_tokens"),
    mtp=("mtp.",),
)
