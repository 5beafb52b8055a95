"""Text models that transformers has a class for under another name than the one in a multi-modal model.

Read in transformers: for text, all three positions of a multi-modal rope are the same, so that
Qwen2-VL's and Qwen2.5-VL's text model (models/qwen2_vl/, models/qwen2_5_vl/) computes what Qwen2 does,
and Qwen3-VL's (models/qwen3_vl/, models/qwen3_vl_moe/) what Qwen3 does:
tests/families/test_text_only.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# By the model_type of a text_config.
SAME_MODEL: Mapping[str, str] = {
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}  # fmt: skip
# What one class states and the other always does.
ALWAYS: Mapping[str, Mapping[str, Any]] = {"qwen3_moe": {"norm_topk_prob": True}}


def text_model_type(config: Mapping[str, Any]) -> str | None:
    """The model_type of a multi-modal config's text model by itself, None for another config."""
    nested = config.get("text_config")
    kind = nested.get("model_type") if isinstance(nested, Mapping) else None
    return SAME_MODEL.get(kind, kind) if isinstance(kind, str) else None
