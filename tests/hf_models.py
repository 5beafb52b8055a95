"""Small models as transformers saves them, for peer tests: two layers, four experts, each family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from qconvert.cli.demo_checkpoint import heavy_tailed

# Its config and auto classes are typed for humans, not for mypy.
hf: Any = transformers


HIDDEN, INTERMEDIATE, EXPERTS = 128, 256, 4


COMMON = {
    "vocab_size": 300,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def qwen3_moe() -> Any:
    return hf.Qwen3MoeConfig(
        **COMMON, num_hidden_layers=2, num_key_value_heads=2, head_dim=32, num_experts=EXPERTS,
        num_experts_per_tok=2,
    )  # fmt: skip


def _linear_attention() -> dict[str, Any]:
    """A layer of linear attention and one of full."""
    return {
        "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"], "num_experts": EXPERTS,
        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 96, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip


def qwen3_next() -> Any:
    return hf.Qwen3NextConfig(**COMMON, **_linear_attention())


def qwen3_5_moe() -> Any:
    return hf.Qwen3_5MoeTextConfig(**COMMON, **_linear_attention())


def deepseek_v3() -> Any:
    """A dense layer and one with experts."""
    return hf.DeepseekV3Config(
        **COMMON, num_hidden_layers=2, intermediate_size=320, num_key_value_heads=4,
        n_routed_experts=EXPERTS, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=40, kv_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=32, v_head_dim=32,
    )  # fmt: skip


def glm4_moe() -> Any:
    return hf.Glm4MoeConfig(
        **COMMON, num_hidden_layers=2, intermediate_size=320, num_key_value_heads=2, head_dim=32,
        n_routed_experts=EXPERTS, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1,
    )  # fmt: skip


FAMILIES: list[Callable[[], Any]] = [qwen3_moe, qwen3_next, qwen3_5_moe, deepseek_v3, glm4_moe]


def saved(config: Any, folder: Path) -> Path:
    """A model with heavy-tailed weights in bf16, as transformers saves it."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.copy_(heavy_tailed(tuple(parameter.shape), generator))
    model.save_pretrained(folder)
    return folder
