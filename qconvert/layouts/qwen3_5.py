"""Qwen3.5 and Qwen3.6, dense and MoE, multi-modal and text-only.

Names: `Qwen3_5ForConditionalGeneration`, `Qwen3_5ForCausalLM` and their MoE twins in transformers
(models/qwen3_5/, models/qwen3_5_moe/), and `model.safetensors.index.json` of
Qwen/Qwen3.5-35B-A3B and Qwen/Qwen3.6-27B for `mtp.*`, which transformers ignores.

The bf16 MoE releases stack the experts of the model and keep the draft layer's unstacked (3.5) or stack
them too (3.6); the FP8 releases keep all unstacked. Vision towers are those of Qwen3-VL without its
deepstack mergers (`deepstack_visual_indexes` is empty), and text-only copies leave them out.
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
    qwen_vision,
)


def dims(config: Config) -> Dims:
    """Full attention in every fourth layer if the config does not state it."""
    return qwen_dims(config, full_attention_interval=4)


FAMILY = Family(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    dims=dims,
    prefixes=("model.language_model.", "model."),
    roles=(
        *outer("@"),
        *qwen_layer("", "@layers.{L}", "all", "full_attention", "dense", "moe"),
        *qwen_shared_expert("", "@layers.{L}", "moe"),
        *gated_delta_net("@layers.{L}.linear_attn"),
        *qwen_mtp(),
        *qwen_vision(),
    ),
    tied=("lm_head", "embed_tokens"),
    mtp=("mtp.",),
)
