"""Small models as transformers saves them, of every class that layouts are of, with vision towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import calibrate_models as models
import torch
from calibrate_models import hf as hf

from qconvert.cli.demo import heavy_tailed


def text_settings(r: int) -> dict[str, Any]:
    """A period of linear and full attention; r value heads a key head."""
    return {
        "vocab_size": 300, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2 * r, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "max_position_embeddings": 128,
    }  # fmt: skip


MOE = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip


def make(kind: str, r: int) -> Any:
    """A transformers config: Qwen3.5 dense or MoE, text-only or multi-modal, or Qwen3-Next."""
    text = text_settings(r)
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": 128, "num_position_embeddings": 16,
    }  # fmt: skip
    if kind == "dense":
        return hf.Qwen3_5TextConfig(**text, intermediate_size=160)
    if kind == "moe":
        return hf.Qwen3_5MoeTextConfig(**text, **MOE)
    if kind == "moe-vl":
        return hf.Qwen3_5MoeConfig(text_config={**text, **MOE}, vision_config=vision)
    return hf.Qwen3NextConfig(**text, **MOE, intermediate_size=160)


def saved(config: Any, folder: Path) -> Path:
    """A model of a config with heavy-tailed weights, saved as transformers saves it."""
    torch.manual_seed(0)
    kind = (
        hf.AutoModelForImageTextToText
        if hasattr(config, "vision_config")
        else hf.AutoModelForCausalLM
    )
    model = kind.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.copy_(heavy_tailed(tuple(parameter.shape), generator))
        else:
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def families() -> dict[str, Any]:
    """A small model of every family transformers has a class for."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "moe_intermediate_size": 32}
    deepseek = models.deepseek_v3(**sizes, n_routed_experts=4)
    qwen3_moe = models.qwen3_moe(**sizes, num_experts=4)
    tied = hf.Qwen3_5TextConfig(**text_settings(2), intermediate_size=96, tie_word_embeddings=True)
    return {
        "deepseek_v3": deepseek, "qwen3_moe": qwen3_moe, "qwen3_5 dense": make("dense", 2),
        "qwen3_5 moe": make("moe", 2), "qwen3_5 vl": make("moe-vl", 2), "qwen3_5 tied": tied,
        "qwen3_next": make("next", 2),
    }  # fmt: skip
