"""Qwen3-Next: Qwen3-Next-80B-A3B Instruct and Thinking and their FP8 releases.

Names: `Qwen3NextForCausalLM` in transformers (models/qwen3_next/modeling_qwen3_next.py), and
`model.safetensors.index.json` of Qwen/Qwen3-Next-80B-A3B-Instruct for `mtp.*`, which transformers
ignores. The published config does not say that there is a draft layer; runtimes assume one, as we
do.
"""

from __future__ import annotations

from qconvert.core.family import Config, Dims, Family
from qconvert.layouts._blocks import (
    gated_delta_net,
    outer,
    qwen_dims,
    qwen_layer,
    qwen_mtp,
    qwen_shared_expert,
)


def dims(config: Config) -> Dims:
    """One draft layer and full attention in every fourth layer if the config does not state them."""
    return qwen_dims(config, mtp_layers=1, full_attention_interval=4)


FAMILY = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    dims=dims,
    roles=(
        *outer(),
        *qwen_layer("", "model.layers.{L}", "all", "full_attention", "dense", "moe"),
        *qwen_shared_expert("", "model.layers.{L}", "moe"),
        *gated_delta_net("model.layers.{L}.linear_attn"),
        *qwen_mtp(),
    ),
    tied=("lm_head", "embed_tokens"),
    mtp=("mtp.",),
)
