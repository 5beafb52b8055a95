"""Qwen3-MoE: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder and their FP8 releases.

Names: `Qwen3MoeForCausalLM` in transformers (models/qwen3_moe/modeling_qwen3_moe.py), saved a
matrix an expert (conversion_mapping.py, "qwen2_moe"), as Qwen/Qwen3-30B-A3B and its FP8 release
publish them. No shared expert, no draft layers.
"""

from __future__ import annotations

from qconvert.core.family import Family
from qconvert.layouts._blocks import outer, qwen_dims, qwen_layer

FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    dims=qwen_dims,
    roles=(
        *outer(),
        *qwen_layer("", "model.layers.{L}", "all", "full_attention", "dense", "moe"),
    ),
    tied=("lm_head", "embed_tokens"),
)
