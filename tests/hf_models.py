"""The models of calibrate_models.py with two layers and four experts, for peer tests."""

from __future__ import annotations

from typing import Any

import calibrate_models as models
from calibrate_models import Make as Make
from calibrate_models import hf as hf
from calibrate_models import saved as saved

_SMALL = {"num_hidden_layers": 2, "moe_intermediate_size": 256, "max_position_embeddings": 128}
_LINEAR = {"num_experts": 4, "layer_types": ["linear_attention", "full_attention"]}


def qwen3_moe() -> Any:
    return models.qwen3_moe(**_SMALL, num_experts=4)


def qwen3_next() -> Any:
    return models.qwen3_next(**_SMALL, **_LINEAR)


def qwen3_5_moe() -> Any:
    return models.qwen3_5_moe(**_SMALL, **_LINEAR)


def deepseek_v3() -> Any:
    """A dense layer and one with experts."""
    return models.deepseek_v3(**_SMALL, n_routed_experts=4)


def glm4_moe() -> Any:
    return models.glm4_moe(**_SMALL, n_routed_experts=4)


FAMILIES: list[Make] = [qwen3_moe, qwen3_next, qwen3_5_moe, deepseek_v3, glm4_moe]
