"""Every class of the installed transformers that generates text, and the config that builds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
# What the defaults of a config lack so that its class can be built, and has every kind of layer.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "hunyuan_v1_dense": {"head_dim": 128, "rope_parameters": _ROPE},
    "hunyuan_v1_moe": {"head_dim": 128, "rope_parameters": _ROPE, "num_experts": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}  # fmt: skip


def model_types() -> list[str]:
    from transformers.models.auto import modeling_auto as auto

    mappings: Any = auto
    names = {
        *mappings.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *mappings.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    return sorted(names)


def config(model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, **SETTINGS.get(model_type, {})}
