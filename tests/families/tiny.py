"""Tiny checkpoints of any class of transformers, with real weights, as save_pretrained writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

LAYERS = 4
# Keys of configs and the small sizes that go together: heads of 64, blocks of 128 columns.
SIZES: Mapping[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8,
    "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "moe_intermediate_size": 256,
    "expert_ffn_hidden_size": 256,
    "shared_expert_intermediate_size": 256, "q_lora_rank": 128, "kv_lora_rank": 64,
    "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "index_n_heads": 4, "index_head_dim": 64, "index_topk": 16, "mamba_num_heads": 8,
    "mamba_head_dim": 32, "max_position_embeddings": 512, "sliding_window": 64, "depth": 2,
    "out_hidden_size": 256, "num_position_embeddings": 64, "decoder_sparse_step": 1,
    "n_shared_experts": 1, "ffn_hidden_size": 512, "rotary_dim": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "n_embd": 256, "n_layer": LAYERS, "n_head": 4,
    "d_model": 256, "num_layers": LAYERS, "text_hidden_size": 256, "adapter_in_dim": 256,
    "adapter_out_dim": 256, "adapter_input_size": 256, "codebook_dim": 256,
}  # fmt: skip

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# Lists that name the kind of each layer.
LAYER_LISTS = ("layer_types", "mlp_layer_types", "indexer_types")


def _rope(sections: list[int]) -> dict[str, Any]:
    """Of a multi-modal model: the sections add up to half of what is rotated."""
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}


# No layer of another size.
_NO_LAYER: Mapping[str, Any] = {"per_layer_config": {}}
# What single families need beside them, in their text_config where there is one.
OWN: Mapping[str, Mapping[str, Any]] = {
    "axk1": {"head_dim": 32},
    "bailing_hybrid": {"num_expert_group": 1},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1},
    "cosmos3_edge": {"rope_parameters": _rope([8, 12, 12])},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v3": {"head_dim": 32},
    "deepseek_v32": {"head_dim": 32, "num_key_value_heads": 4},
    "deepseek_v4": {"num_key_value_heads": 1},
    # Its config counts attention and MLP of a layer apart.
    "dory": {
        "num_hidden_layers": 8, "n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2,
        "layer_types": [*["sliding_attention", "mlp"] * 3, "full_attention", "mlp"],
    },
    "dots3_note": {**_NO_LAYER, "num_key_value_heads": 4},
    "dots3_note_text": {**_NO_LAYER, "num_key_value_heads": 4},
    "dots1": {"intermediate_size": 512, "num_experts_per_tok": 2},
    "gemma4_text": _NO_LAYER, "gemma4_unified": _NO_LAYER, "gemma4_unified_text": _NO_LAYER,
    "falcon_h1": {
        "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_ssm": 256, "mamba_n_groups": 1,
    },
    "glm4v_moe": {"rope_parameters": _rope([4, 6, 6]) | {"partial_rotary_factor": 0.5}},
    "glm5_next": {"num_key_value_heads": 4, "qk_rope_head_dim": 0},
    "glm_moe_dsa": {"num_key_value_heads": 4},
    "gpt_oss": {"intermediate_size": 256},
    "granitemoe": {"intermediate_size": 256},
    "granitemoehybrid": {
        "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "intermediate_size": 256,
    },
    "hy_v4_vl": {"rope_parameters": _rope([4, 6, 6])},
    "inkling2": {"unpadded_vocab_size": 512}, "inkling2_text": {"unpadded_vocab_size": 512},
    "inkling2_loop_text": {
        "unpadded_vocab_size": 512,
        "loop_layer_index_start": 2, "loop_layer_index_end": 4, "n_layers_per_attn_res_block": 2,
    },
    "inkling2_loop": {
        "unpadded_vocab_size": 512,
        "loop_layer_index_start": 2, "loop_layer_index_end": 4, "n_layers_per_attn_res_block": 2,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 16,
        "use_mamba_kernels": False, "intermediate_size": 256,
    },
    "kimi_k25": {"head_dim": 32},
    "laguna": {"num_attention_heads_per_layer": [4] * LAYERS},
    "llama4": {"intermediate_size_mlp": 1024},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1,
    },
    # transformers saves rows for its zero experts, which compute nothing and are not published.
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 0, "qk_head_dim": 64, "head_dim": 32},
    "mamba2": {"num_heads": 8},
    "minimax_m2": {"intermediate_size": 256},
    "mistral_large4": {"kv_source_layers": [*range(LAYERS)], "num_key_value_heads": 4},
    "mixtral": {"intermediate_size": 256},
    "nemotron_h": {"moe_shared_expert_intermediate_size": 256, "moe_latent_size": 128},
    "nemotron_h_omni": {"moe_shared_expert_intermediate_size": 256, "moe_latent_size": 128},
    "olmoe": {"intermediate_size": 256, "num_key_value_heads": 4},
    "phimoe": {"intermediate_size": 256},
    "qwen2_5_vl": {"rope_parameters": _rope([8, 12, 12])},
    "step3p7": {"sliding_window": 64},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8, "mamba_ngroups": 1,
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def config_of(
    model_type: str,
    given: Mapping[str, Any],
    sizes: Mapping[str, Any] = MappingProxyType({}),
    *,
    experts: int = 8,
) -> Any:
    """The config of a model_type, made small. `given` are settings that its defaults lack, `sizes` those
    that are to be other than `SIZES`; `experts`: how many, where there are any."""
    import transformers

    hf: Any = transformers
    values = hf.AutoConfig.for_model(model_type, **given).to_dict()
    own = dict(OWN.get(model_type, {}))
    small = _small(values, own, {**SIZES, **dict.fromkeys(EXPERTS, experts)})
    small.get("text_config", small).update({**own, **sizes})
    small.pop("model_type")
    return hf.AutoConfig.for_model(model_type, **small)


def _small(
    values: Mapping[str, Any], own: Mapping[str, Any], sizes: Mapping[str, Any]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key == "per_layer_config" and isinstance(value, dict):
            # Some classes take {} for defaults, whose layers are not among so few; kinds alternate.
            kept = {layer: one for layer, one in value.items() if int(layer) < LAYERS}
            first = next(iter(value.values()), None)
            found[key] = kept or {str(n): first for n in range(1, LAYERS, 2) if first}
        elif isinstance(value, dict) and key.endswith("_config"):
            found[key] = _small(value, own if key == "text_config" else {}, sizes)
        elif key in LAYER_LISTS and isinstance(value, list):
            kinds = list(dict.fromkeys(value))  # every kind of layer that there is
            found[key] = [kinds[i % len(kinds)] for i in range(LAYERS)]
        elif key == "vision_feature_layer" and isinstance(value, list):
            found[key] = [min(layer, LAYERS - 1) for layer in value]
        elif key in ("moe_layers", "no_rope_layers", "transformers_version"):
            continue
        elif key in sizes and value is not None and not isinstance(value, (bool, list)):
            found[key] = sizes[key]
        else:
            found[key] = value
    return found


def saved(
    model_type: str,
    folder: Path,
    given: Mapping[str, Any],
    sizes: Mapping[str, Any] = MappingProxyType({}),
    *,
    experts: int = 8,
) -> Path:
    """A checkpoint in `folder`, its weights heavy-tailed."""
    import torch
    import transformers

    from qconvert.layouts.derived.transformers_class import class_of

    config, hf = config_of(model_type, given, sizes, experts=experts), _any(transformers)
    torch.manual_seed(0)
    model = class_of(hf, config)._from_config(config, dtype=torch.bfloat16)
    tails = torch.distributions.StudentT(4.0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(tails.sample(parameter.shape) * 0.04)
            elif not torch.isfinite(parameter).all():
                parameter.fill_(0.1)
    model.save_pretrained(folder)
    return folder


def _any(value: Any) -> Any:
    return value
