"""Small checkpoints of the classes that both runtimes have, as transformers saves them, with what
published configs state beside; and what every converting command makes of them with its default
options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoints import Result, edit_json, read_tensors, run_cli, write_shard
from draft_tables import dflash, eagle3, write_draft
from families.classes import SETTINGS
from families.headers_only import as_published, published_name, write_index
from families.tiny import saved

from loaders.folders import in_mxfp4, parts
from loaders.published import published

# Sizes that no class has by default: heads whose rows are no whole blocks of 128.
ODD = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 576}
CLASSES = (
    "afmoe", "apertus", "arcee", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "ernie4_5_moe", "exaone4", "exaone_moe", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4",
    "glm4", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "gpt_oss", "granite",
    "granite_swa", "granitemoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "kimi_k25",
    "kimi_linear", "lfm2", "lfm2_moe", "llama", "llama4", "llama4_text", "mimo_v2_flash",
    "minimax_m2", "ministral3", "mistral", "mistral3", "mixtral", "nemotron_h", "olmo2", "olmoe",
    "opt", "phi3", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe",
    "stablelm", "starcoder2",
)  # fmt: skip
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{name: (name, {}) for name in CLASSES},
    "llama of odd heads": ("llama", ODD),
    "qwen3_moe of odd heads": ("qwen3_moe", ODD),
}
# Sizes of latent attention that vLLM has a kernel for.
_LATENT = {
    "q_lora_rank": 256, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "num_key_value_heads": 4,
}  # fmt: skip
_TOWER_HEADS: Mapping[str, Any] = {"vision_config": {"num_heads": 4}}
# Sizes of models that are not among `MODELS`, and of their towers.
_OTHERS: Mapping[str, Mapping[str, Any]] = {
    "cohere2_moe": {"num_shared_experts": 1}, "gemma4_text": {"vocab_size_per_layer_input": 512},
    "axk1": {**_LATENT, "num_key_value_heads": 2},
    "mamba2": {"num_heads": 8, "head_dim": 64, "intermediate_size": 512, "state_size": 64},
    "glm4v": _TOWER_HEADS, "glm_ocr": _TOWER_HEADS,
}  # fmt: skip


def _sections(share: float, *of_sets: Sequence[int]) -> Mapping[str, Any]:
    """Rotary embeddings of a multi-modal model: sections of half of what is rotated, at each set."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": share}
    return {"rope_parameters": tuple({**rope, "mrope_section": [*one]} for one in of_sets)}


_ATTENTIONS = (
    "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention",
)  # fmt: skip
_FIRST_DENSE = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
_MHA: Mapping[str, Any] = {"num_key_value_heads": None}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {**_LATENT, "q_lora_rank": None}, "deepseek_v3": _LATENT,
    "deepseek_v32": _FIRST_DENSE, "exaone_moe": _FIRST_DENSE, "hy_v3": _FIRST_DENSE,
    "glm4_moe_lite": {**_LATENT, **_FIRST_DENSE},
    "glm_moe_dsa": _FIRST_DENSE, "kimi_k25": _LATENT,
    # Classes that have as many heads of keys as of queries, whatever a config says.
    "glm5_next": {"num_key_value_heads": (8, 6, 10), "qk_rope_head_dim": (0, 0, 0)},
    "olmo": _MHA, "olmoe": _MHA,
    "phi": {**_MHA, "intermediate_size": (512, 768, 960)}, "kimi_linear": _FIRST_DENSE,
    "zamba2": {
        "attention_hidden_size": (256, 384, 480), "attention_head_dim": (32, 64, 48),
        "kv_channels": (16, 32, 24), "mamba_headdim": (32, 48, 60), "n_mamba_heads": (8, 8, 8),
        **_MHA,
    },
    "falcon_h1": {"mamba_d_ssm": (256, 384, 480)}, "gptj": {"rotary_dim": 16},
    "hy_v4": {"hc_mult": (4, 2, 3)},
    # Every kind of attention with each kind of router, the hashed first; sizes that kernels take.
    "deepseek_v4": {
        "num_hidden_layers": 6,
        "layer_types": [*_ATTENTIONS, *reversed(_ATTENTIONS)],
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 3,
        "head_dim": 512, "partial_rotary_factor": (0.25, 0.125, 0.5), "index_head_dim": 128,
        "num_attention_heads": 8, "num_key_value_heads": (1, 1, 1), "moe_intermediate_size": 1024,
        "hc_mult": (4, 2, 3), "o_groups": (4, 2, 2), "o_lora_rank": (40, 88, 72),
        "num_experts_per_tok": (2, 5, 4),
    },
    # Other heads in other layers, as published.
    "laguna": {"num_attention_heads_per_layer": ([8, 6] * 2, [6, 9] * 2, [10, 5] * 2)},
    "mamba2": {
        "num_heads": (8, 8, 6), "intermediate_size": (256, 384, 480), "state_size": (24, 40, 56),
    },
    # sglang takes 8 groups whatever a config says.
    "nemotron_h": {"n_groups": (8, 8, 8), "mamba_num_heads": (8, 16, 24)},
    "glm4v_moe": _sections(0.5, (2, 3, 3), (3, 4, 5), (5, 7, 8)),
    "cosmos3_edge": _sections(1.0, (4, 6, 6), (6, 9, 9), (10, 15, 15)),
    "qwen2_5_vl": _sections(1.0, (2, 3, 3), (4, 6, 6), (3, 4, 5)),
    # Drafts that stand alone: what they state beside the keys of their layers' class.
    "LlamaForCausalLMEagle3": {
        "draft_vocab_size": 304, "target_hidden_size": (160, 256, 336),
        "num_aux_hidden_states": (5, 7, 6), "fc_norm": True, "norm_before_fc": True,
        "norm_output": False,
        "eagle_config": tuple(
            {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
            for ids in ([1, 2], [1], [1, 2, 3, 4])
        ),
    },
    "DFlashDraftModel": {
        "block_size": 8, "num_target_layers": 9, "target_layer_ids": ([1], [1, 2, 3, 4], [2, 3]),
        "dflash_config": tuple(
            {"target_layer_ids": [*range(count)], "mask_token_id": 7} for count in (3, 2, 7)
        ),
    },
}  # fmt: skip
_NO_HEAD: Mapping[str, Any] = {"vision_config": {"vision_use_head": False}}
_NO_DEEPSTACK: Mapping[str, Any] = {"vision_config": {"deepstack_visual_indexes": []}}
GIVEN: Mapping[str, Mapping[str, Any]] = {
    **SETTINGS,
    "gemma3": _NO_HEAD, "lfm2_vl": _NO_HEAD,
    "gemma4_unified": {"vision_config": {}},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "gemma4": {
        "text_config": {
            "enable_moe_block": True, "num_experts": 8, "moe_intermediate_size": 256,
            "top_k_experts": 2, "attention_k_eq_v": True, "global_head_dim": 128,
            "num_global_key_value_heads": 1, "num_key_value_heads": 2, "head_dim": 64,
            "hidden_size_per_layer_input": 0, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "vision_config": {"hidden_size": 256, "intermediate_size": 512, "standardize": True},
    },
    "glm4v_moe": {"vision_config": {"num_heads": 4}},
    "kimi_k25": {"tie_word_embeddings": False, "projection_hidden_size": 256},
    "llama4": {"text_config": {"interleave_moe_layer_step": 2}},
    "mistral3": {"tie_word_embeddings": False},
    "qwen3_5": _NO_DEEPSTACK, "qwen3_5_moe": _NO_DEEPSTACK,
}  # fmt: skip
# What published configs of a class state, and transformers 5 does not save.
GDN = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
_DEEPSEEK_V3 = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {
        "score_func": "sigmoid", "route_norm": True, "route_scale": 2.826, "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v2": {
        "moe_layer_freq": 1, "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v3": _DEEPSEEK_V3, "deepseek_v32": _DEEPSEEK_V3,
    "deepseek_v4": {
        "topk_method": "noaux_tc", "expert_dtype": "fp4",
        "rope_scaling": {
            "type": "yarn", "rope_type": "yarn", "factor": 16, "rope_theta": 10000, "beta_fast": 32,
            "beta_slow": 1, "original_max_position_embeddings": 4096,
        },
    },
    "glm_moe_dsa": {**_DEEPSEEK_V3, "num_nextn_predict_layers": 0},
    "gemma2": {"hidden_act": "gelu_pytorch_tanh"}, "glm4_moe": {"head_dim": 64},
    "glm4_moe_lite": {
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "noaux_tc",
    },
    "glm4v_moe": {"head_dim": 64, "use_qk_norm": False},
    "gpt_oss": {"swiglu_limit": 7.0}, "exaone4": {"sliding_window_pattern": "LLLG"},
    "hunyuan_v1_dense": {"use_qk_norm": True},
    "hunyuan_v1_moe": {
        "moe_intermediate_size": [512] * 4, "num_shared_expert": [1] * 4, "moe_topk": [2] * 4,
        "use_mixed_mlp_moe": True, "use_qk_norm": True, "norm_topk_prob": True,
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1], "moe_layer_freq": [0, 1, 0, 1],
        "layernorm_epsilon": 1e-5, "sliding_window_size": 64, "swa_head_dim": 64,
        "swa_v_head_dim": 64, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "partial_rotary_factor": 0.334,
        "rope_theta": 5e6, "swa_rope_theta": 1e4, "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    },
    "kimi_k25": {**_DEEPSEEK_V3, "num_nextn_predict_layers": 0},
    "minimax_m2": {
        "scoring_func": "sigmoid", "rotary_dim": 32, "use_routing_bias": True, "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "mtp_layers_block_type": ["attention", "moe"], "num_hidden_layers": 4,
    },
    "qwen3_vl_moe": {"norm_topk_prob": True},
    "exaone_moe": {
        "is_moe_layer": [False, True, True, True], "scoring_func": "sigmoid",
        "first_last_k_dense_replace": 1,
    },
    "hy_v3": {
        "qk_norm": True, "route_norm": True, "first_k_dense_replace": 1,
        "expert_hidden_dim": "=moe_intermediate_size",
    },
    "kimi_linear": {
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "linear_attn_config": {
            "kda_layers": [1, 3], "full_attn_layers": [2, 4], "short_conv_kernel_size": 4,
            "head_dim": "=linear_head_dim", "num_heads": "=linear_num_heads",
        },
        "linear_head_dim": None, "linear_num_heads": None, "linear_conv_kernel_dim": None,
        "layer_types": None,
    },
    "lfm2": {"block_dim": "=hidden_size", "block_ff_dim": "=intermediate_size"},
    "lfm2_vl": {"block_dim": "=hidden_size", "block_ff_dim": "=intermediate_size"},
    "longcat_flash": {
        "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity",
    },
    "phi": {"intermediate_size": None},
    "minicpmv4_6": {"full_attention_interval": 2},
    "qwen2_vl": {"vision_config.in_chans": 3},
    "step3p7": {
        "moe_layers_enum": "1,2,3", "rope_theta": [1e4] * 4, "partial_rotary_factors": [1.0] * 4,
        "use_head_wise_attn_gate": True, "need_fp32_gate": True,
    },
    "SolarForCausalLM": {
        "bskcn_1": [1], "bskcn_2": [2], "bskcn_3": [3], "bskcn_4": [3], "bskcn_tv": [0.9, 0.8],
    },
    "MiniCPMForCausalLM": {
        "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4, "num_experts": 0,
    },
    "TeleFLMForCausalLM": {
        "use_mup": True, "input_mult": 1.0, "output_mult": 1.0, "mup_scale_factor": 1.0,
    },
    "NanbeigeForCausalLM": {"rope_theta": 7e6},
    "XverseMoeForCausalLM": {"moe_top_k": 2, "num_shared_experts": 1},
    "minimax_m3_vl_text": {"rope_theta": 5e6, "scoring_func": "sigmoid"},
    "mamba2": {"rms_norm": True}, "Param2MoEForCausalLM": {"rope_theta": 1e4},
    "DeepseekForCausalLM": {
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "scoring_func": "softmax",
    },
    **{name: {"full_attention_interval": 2} for name in GDN},
}  # fmt: skip
# Other words that published configs of a class state for keys of `PUBLISHED`, which it looks at.
CHOICES: Mapping[str, Mapping[str, Sequence[str]]] = {"deepseek_v4": {"expert_dtype": ("fp8",)}}
# What published configs of classes with a draft model state of it.
DRAFTS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"num_nextn_predict_layers": 1} for name in ("deepseek_v3", "glm4_moe")},
    **{name: {"mtp_num_hidden_layers": 1} for name in GDN if name != "qwen3_next"}, "qwen3_next": {},
}  # fmt: skip
# Names that published checkpoints have otherwise than transformers 5 saves them, as patterns.
_TOWER_NAMES = {r"^(.*vision_tower)\.(?!vision_model)": r"\1.vision_model."}
NAMES: Mapping[str, Mapping[str, str | None]] = {
    **dict.fromkeys((
        "cohere2_vision", "gemma3", "lfm2_vl", "llava", "llava_next", "llava_next_video",
        "llava_onevision", "paligemma",
    ), _TOWER_NAMES),
    "DeepseekForCausalLM": {r"\.e_score_correction_bias$": None},
    "deepseek_v4": {
        r"^model\.": "", r"^embed_tokens\.": "embed.", r"^hc_head\.hc_": "hc_head_",
        r"\.attn\.norm\.": ".attn.kv_norm.",
    },
    "kimi_k25": {
        r"^language_model\.model\.blocks\.": "language_model.model.layers.",
        r"^lm_head\.": "language_model.lm_head.", r"^model\.mm_projector\.": "mm_projector.",
        r"^vision_tower\.encoder\.patch_embed\.": "vision_tower.patch_embed.",
    },
    "kimi_linear": {r"(layers\.0)\.block_sparse_moe\.(\w+_proj)": r"\1.mlp.\2"},
}  # fmt: skip
# Classes of a runtime that read configs and names of a model_type, whose published configs state
# another one that transformers does not know.
LIKE: Mapping[str, str] = {
    **{
        f"{name}ForCausalLM": "llama"
        for name in (
            "IQuestCoder", "InternLM3", "LLaMA", "MiniCPM", "Nanbeige", "PanguEmbedded", "Solar",
            "Step1", "TeleChat3", "TeleFLM", "Xverse",
        )
    },
    "MiMoForCausalLM": "qwen2", "SDARForCausalLM": "qwen3", "SDARMoeForCausalLM": "qwen3_moe",
    "IQuestQ1ForCausalLM": "qwen3_moe", "Rnj1ForCausalLM": "gemma3_text",
    "DeepseekForCausalLM": "glm4_moe", "Ernie4_5_ForCausalLM": "ernie4_5",
    "ExaoneMoEForCausalLM": "exaone_moe",
    "MiniMaxM3SparseForCausalLM": "minimax_m3_vl_text",
    "NemotronHPuzzleForCausalLM": "nemotron_h", "PhiMoEForCausalLM": "phimoe",
    "XverseMoeForCausalLM": "qwen2_moe", "Param2MoEForCausalLM": "glm4_moe",
    "LlamaForCausalLMEagle3": "llama", "DFlashDraftModel": "qwen3",
}  # fmt: skip


def _gemma4(config: dict[str, Any]) -> None:
    """Sizes of layers of full attention under keys of their own."""
    text = config["text_config"]
    (layer, *_) = text.pop("per_layer_config").values()
    text["global_head_dim"] = layer["head_dim"]
    text["num_global_key_value_heads"] = layer["num_key_value_heads"]


_RATIOS = dict(zip(_ATTENTIONS, (0, 128, 4), strict=True))


def _deepseek_v4(config: dict[str, Any]) -> None:
    """Kinds of layers as a ratio each and a number of hashed routers; the size that is rotated."""
    config["compress_ratios"] = [_RATIOS[kind] for kind in config.pop("layer_types")]
    config["num_hash_layers"] = config.pop("mlp_layer_types").count("hash_moe")
    for key in ("compress_rates", "rope_parameters", "partial_rotary_factor"):
        del config[key]


def _kimi_k25(config: dict[str, Any]) -> None:
    """Names of the model's own code. Its published tower has other keys, and the sizes that the runtimes
    take by default."""
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    config.pop("projection_hidden_size")
    config["text_config"] |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    tower, text = config["vision_config"], config["text_config"]
    config["vision_config"] = {
        "merge_kernel_size": tower["merge_kernel_size"], "merge_type": "sd2_tpool",
        "mm_hidden_size": tower["hidden_size"], "mm_projector_type": "patchmerger",
        "patch_size": tower["patch_size"], "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5,
        "text_hidden_size": text["hidden_size"], "video_attn_type": "spatial_temporal",
        **{f"init_pos_emb_{one}": tower[f"pos_emb_{one}"] for one in ("height", "width", "time")},
        **{f"{prefix}{one}": tower[one] for prefix in ("", "vt_") for one in (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers",
        )},
    }  # fmt: skip


# What a config of transformers 5 becomes in the published form, where it has other keys.
AS_PUBLISHED: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "exaone4_5": lambda c: c["text_config"].update(sliding_window_pattern="LLLG"),
    "deepseek_v4": _deepseek_v4, "gemma4": _gemma4, "kimi_k25": _kimi_k25,
}  # fmt: skip
COMMANDS = (
    "as saved", "text", "experts stack", "experts unstack", "fuse --for sglang", "unfuse", "fp8",
    "fp8 --channel", "int8", "mx", "mx --targets Linear", "nvfp4 --dialect compressed-tensors",
    "nvfp4 --dialect modelopt", "w4a16 --rtn", "w4a16 --rtn --targets Linear",
    "w4a16 --rtn --packing gptq", "split --pp 2 --for sglang", "split --pp 2 --for vllm",
)  # fmt: skip
# What they make of a checkpoint in FP8, with options of some more forms, and of linears in several.
FURTHER = (
    "in MXFP4", "fp8 then w4a16 --rtn", "fp8 then nvfp4 --dialect compressed-tensors",
    "nvfp4 --dialect compressed-tensors --targets Linear", "fp8 --channel --kv-scale 1",
    "w4a16 --rtn --kv-scale 1", "w4a16 --rtn --asymmetric", "w4a16 --rtn --bits 8",
    "w4a16 --rtn --targets Linear --asymmetric", "w4a16 --rtn --targets Linear --bits 8",
    "mx --bits 8", "mx --bits 8 --targets Linear",
    "w4a16 --rtn --targets o_proj then fp8 --channel --targets down_proj",
)  # fmt: skip
# What users do first with a published checkpoint, in BF16 or in FP8.
OF_PUBLISHED = (
    "as saved", "fp8 --targets experts", "fp8 --kv-scale 1", "fp8 --dialect compressed-tensors",
    "fp8 --dialect compressed-tensors --targets experts", "w4a16 --rtn",
    "w4a16 --rtn --group-size channel", "w4a16 --rtn --asymmetric", "w4a16 --rtn --kv-scale 1",
    "w4a16 --rtn --bits 8", "w4a16 --rtn --bits 8 --group-size channel",
    "w4a16 --rtn --bits 8 --group-size channel --targets Linear", "w4a16 --rtn --targets Linear",
    "w4a16 --rtn --packing gptq", "w4a16 --rtn --packing gptq --targets Linear",
    "nvfp4 --dialect compressed-tensors --targets Linear", "nvfp4 --dialect modelopt",
    "nvfp4 --dialect modelopt --targets Linear", "nvfp4 --dialect modelopt --kv-scale 1",
)  # fmt: skip
# What users do with DeepSeek-V4, FP8 beside MXFP4.
OF_MIXED = (
    "as saved", "relabel --to fp8", "relabel --to nvfp4 --dialect modelopt --input-scale 0.5",
    "dequant", "dequant then w4a16 --rtn", "dequant then fp8",
    "dequant then nvfp4 --dialect modelopt",
)  # fmt: skip
# Commands that refuse a class, each with a part of what it says; any other refusal is an error, and so
# is one of these that is no more. The first that names a class and a command counts.
DENSE = (
    "apertus", "arcee", "cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3", "gemma3_text",
    "glm4", "granite", "granite_swa", "hunyuan_v1_dense", "lfm2", "llama", "ministral3",
    "mistral", "mistral3", "olmo2", "opt", "phi3", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_5",
    "qwen3_5_text", "qwen3_vl", "stablelm", "starcoder2",
)  # fmt: skip
TOWERS = (
    "gemma3", "gemma4", "glm4v_moe", "kimi_k25", "llama4", "mistral3", "qwen2_5_vl", "qwen3_5",
    "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip
ONE_STAGE = (
    "afmoe", "cohere", "cohere2", "ernie4_5_moe", "gemma", "gemma2", "gemma3", "gemma3_text",
    "granite", "granite_swa", "granitemoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "lfm2",
    "lfm2_moe", "llama4", "llama4_text", "olmo2", "olmoe", "qwen3_next", "stablelm", "starcoder2",
)  # fmt: skip
STACKED = (
    "gemma4", "gpt_oss", "granitemoe", "llama4", "llama4_text", "nemotron_h", "qwen3_vl_moe",
)  # fmt: skip
_STACKS = ("experts stack", "experts unstack")
_W4A16 = ("w4a16 --rtn", "w4a16 --rtn --packing gptq", "w4a16 --rtn --targets Linear")
_OF_EXPERTS = (
    "mx", "nvfp4 --dialect compressed-tensors", "nvfp4 --dialect modelopt", *_W4A16[:2],
)  # fmt: skip
_OF_ALL = ("fp8", "fp8 --channel", "int8", "mx --targets Linear", "w4a16 --rtn --targets Linear")


def _but(left: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in CLASSES if name not in left)


REFUSED: tuple[tuple[Collection[str], Collection[str], str], ...] = (
    (("text",), _but(TOWERS), "config.json has no text_config with a model_type"),
    (("text",), ("glm4v_moe", "kimi_k25"), "transformers has no class for a text model"),
    (("fuse --for sglang", "unfuse"), _but(GDN), "this model has no linear-attention layers"),
    (("fuse --for sglang",), ("qwen3_next",), "are interleaved (2 groups) already"),
    (("unfuse",), ("qwen3_next",), "QC052: model.layers.0.linear_attn.in_proj_qkv.weight: is split"),
    (("unfuse",), GDN, "the projections are split already"),
    ((*_STACKS, *_OF_EXPERTS), DENSE, "this model has no experts"),
    (_W4A16, ("llama of odd heads", "qwen3_moe of odd heads"), "group 32 is supported"),
    (("experts unstack",), _but((*DENSE, *STACKED)), "the experts are already matrices"),
    ((*_STACKS, *_OF_EXPERTS, *_OF_ALL), ("gpt_oss",), "interleave the rows of gate and up"),
    (_STACKS, ("llama4", "llama4_text", "qwen3_vl_moe"), "rows of a matrix are columns of the stack"),
    (_STACKS, ("nemotron_h",), "its experts have no gate projection"),
    (("experts stack",), ("gemma4", "granitemoe"), "the experts are already stacked"),
    (("experts unstack",), ("gemma4", "granitemoe"), "does not read its experts as a matrix an expert"),
    (("split --pp 2 --for sglang",), ONE_STAGE, "runs in one pipeline stage only in sglang"),
    (("split --pp 2 --for vllm",), ("ernie4_5_moe",), "stage only in sglang and vllm"),
)  # fmt: skip


# Drafts that stand alone, by the class that reads them.
DRAFTS_ALONE: Mapping[str, Callable[..., Any]] = {
    "LlamaForCausalLMEagle3": eagle3,
    "DFlashDraftModel": dflash,
}
# The draft of a published checkpoint, by its model_type; and the checkpoint, in its types.
DRAFT = ".draft"
PUBLISHED_IN = (".bf16", ".fp8")


def is_draft(model: str) -> bool:
    """Tell whether a model is the draft that a checkpoint holds."""
    return model.endswith(DRAFT)


def origin(folders: Path, model: str) -> Path:
    """A small checkpoint, saved once: of `MODELS`, of a class that reads a model_type (`LIKE`), of any
    other model_type, or as one with a draft, or in some types, is published."""
    folder = folders / model
    if folder.is_dir():
        return folder
    family, form, _ = model.partition(".")
    if family in DRAFTS_ALONE:
        tensors, config = DRAFTS_ALONE[family](hidden=256)
        return write_draft(folder, tensors, {**config, "dtype": "bfloat16"})
    if form:
        return published(family, fp8=model.endswith(".fp8")).write(folder)
    model_type, own = MODELS.get(model, (LIKE.get(model, model), _OTHERS.get(model, {})))
    sizes = {**SIZES.get(model_type, {}), **own}
    given = {
        **GIVEN.get(model_type, {}),
        **{k: v for k, v in sizes.items() if isinstance(v, Mapping)},
    }
    sizes = {k: v for k, v in sizes.items() if k not in given and not isinstance(v, tuple)}
    saved(model_type, folder, given, sizes)
    keys = {**PUBLISHED.get(model_type, {}), **PUBLISHED.get(model, {})}
    edit_json(folder / "config.json", lambda c: as_published(c, keys))
    if model_type in AS_PUBLISHED:
        edit_json(folder / "config.json", AS_PUBLISHED[model_type])
    if model in LIKE:
        edit_json(folder / "config.json", lambda c: c.update(architectures=[model]))
    if names := {**NAMES.get(model_type, {}), **NAMES.get(model, {})}:
        tensors = read_tensors(folder)
        renamed = {published_name(name, names): one for name, one in tensors.items()}
        renamed.pop("", None)  # of what is not published
        write_shard(folder / "model.safetensors", renamed)
    write_index(folder)
    return folder


def commands_of(model: str) -> tuple[str, ...]:
    """The commands whose results are compared with the loaders."""
    if model.removesuffix(DRAFT) in DRAFTS_ALONE:
        return tuple(dict.fromkeys((*COMMANDS, *FURTHER, *OF_PUBLISHED)))
    if model == "deepseek_v4.fp8":
        return OF_MIXED
    return OF_PUBLISHED if model.endswith(PUBLISHED_IN) else (*COMMANDS, *FURTHER)


def refusal(model: str, command: str) -> str:
    """What a command is known to say where it refuses a model, "" where it takes it."""
    named = {model, MODELS[model][0]}
    return next((says for words, of, says in REFUSED if command in words and named & {*of}), "")


def checked(model: str, command: str, done: Result) -> None:
    """A command that ends as it is known to: one of `COMMANDS` for one of `MODELS`; or as any may."""
    assert "Traceback" not in done.err, done.err
    if model not in MODELS or command not in COMMANDS:
        assert done.code in (0, 1), done.err
        return
    says = refusal(model, command)
    assert bool(done.code) == bool(says), done.err or f"no longer says {says!r}"
    assert says in done.err


def made(folders: Path, model: str, command: str) -> list[Path]:
    """The folders that a command makes; none where it refuses, as it is known to."""
    if command == "in MXFP4":
        return [in_mxfp4(origin(folders, model))] if model == "gpt_oss" else []
    first, _, last = command.rpartition(" then ")
    sources = made(folders, model, first) if first else [origin(folders, model)]
    return [out for source in sources for out in _converted(source, model, last)]


def _converted(source: Path, model: str, command: str) -> list[Path]:
    """Folders that one command makes of a model."""
    if command == "as saved":
        return [source]
    words, out = command.split(), source.with_name(f"{source.name} {command}")
    if out.is_dir():
        return parts(out)
    number = 2 if words[0] == "experts" else 1
    done = run_cli(*words[:number], source, out, *words[number:], "--jobs", "1")
    checked(model, command, done)
    found = [] if done.code else parts(out)
    for folder in found:
        if (folder / "model.safetensors").exists():
            write_index(folder)
    return found
