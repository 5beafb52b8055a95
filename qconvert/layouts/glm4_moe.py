"""GLM-4.5, GLM-4.5-Air and their successors of the same class (GLM-4.6, GLM-4.7).

Names: `Glm4MoeForCausalLM` in transformers (models/glm4_moe/modeling_glm4_moe.py): DeepSeek-V3's
layer with grouped-query attention in it, saved a matrix an expert (conversion_mapping.py,
"qwen2_moe"). The draft layer, which transformers ignores, is numbered on from the model's own (layer
46 of GLM-4.5-Air's 46, 92 of GLM-4.5's 92) and is DeepSeek's too: vLLM's glm4_moe_mtp.py. The FP8
releases are compressed-tensors with a scale a row.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.family import Config, Dims, Family, Role
from qconvert.layouts._blocks import (
    ATTENTION,
    QK_NORMS,
    deepseek_dims,
    deepseek_draft,
    deepseek_layer,
    outer,
    parts,
)

_AT = "model.layers.{L}"


def dims(config: Config) -> Dims:
    """DeepSeek's, with the layers that norm queries and keys: all (GLM-4.5) or none (Air)."""
    found = deepseek_dims(config)
    every, mtp = (
        found.groups[name] if config.get("use_qk_norm") else () for name in ("all", "mtp")
    )
    return replace(found, groups={**found.groups, "qk_norm": every, "mtp_qk_norm": mtp})


def _attention(
    prefix: str, every: str, qk_norm: str, *, optional: bool = False
) -> tuple[Role, ...]:
    at = f"{_AT}.self_attn"
    return (
        *parts(f"{prefix}attn.", at, ATTENTION, every, optional=optional),
        *parts(f"{prefix}attn.", at, QK_NORMS, qk_norm, optional=optional),
    )


FAMILY = Family(
    name="glm4_moe",
    model_types=("glm4_moe",),
    dims=dims,
    roles=(
        *outer(),
        *_attention("", "all", "qk_norm"),
        *deepseek_layer("", _AT, "all", "dense", "moe", "shared_experts"),
        *_attention("mtp.", "mtp", "mtp_qk_norm", optional=True),
        *deepseek_layer("mtp.", _AT, "mtp", "mtp_dense", "mtp_moe", "mtp_moe", optional=True),
        *deepseek_draft(_AT),
    ),
    tied=("lm_head", "embed_tokens"),
)
