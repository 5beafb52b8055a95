"""Small checkpoints of the classes that both runtimes have, as transformers saves them, with what
published configs state beside; and what every converting command makes of them with its default
options."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from checkpoints import edit_json, run_cli
from families.classes import SETTINGS
from families.tiny import saved

from loaders.folders import parts

# Sizes that no class has by default: heads whose rows are no whole blocks of 128.
ODD = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 576}
CLASSES = (
    "afmoe", "apertus", "arcee", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "ernie4_5_moe", "exaone4", "gemma2", "gemma3", "gemma3_text", "gemma4", "glm4", "glm4_moe",
    "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "gpt_oss", "granite", "granitemoe",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "kimi_linear", "lfm2_moe", "llama", "llama4",
    "llama4_text", "mimo_v2_flash", "minimax_m2", "ministral3", "mistral", "mistral3", "mixtral",
    "nemotron_h", "olmo2", "olmoe", "phi3", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen3", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl",
    "qwen3_vl_moe", "starcoder2",
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
_FIRST_DENSE = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {**_LATENT, "q_lora_rank": None}, "deepseek_v3": _LATENT,
    "deepseek_v32": _FIRST_DENSE, "glm4_moe_lite": {**_LATENT, **_FIRST_DENSE},
    "glm_moe_dsa": _FIRST_DENSE,
}  # fmt: skip
_NO_DEEPSTACK: Mapping[str, Any] = {"vision_config": {"deepstack_visual_indexes": []}}
GIVEN: Mapping[str, Mapping[str, Any]] = {
    **SETTINGS,
    "gemma4": {"vision_config": {"hidden_size": 256, "intermediate_size": 512}},
    "glm4v_moe": {"vision_config": {"num_heads": 4}},
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
    "deepseek_v3": _DEEPSEEK_V3, "deepseek_v32": _DEEPSEEK_V3, "glm_moe_dsa": _DEEPSEEK_V3,
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
    "minimax_m2": {
        "scoring_func": "sigmoid", "rotary_dim": 32, "use_routing_bias": True, "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "mtp_layers_block_type": ["attention", "moe"],
    },
    "qwen3_vl_moe": {"norm_topk_prob": True},
    **{name: {"full_attention_interval": 2} for name in GDN},
}  # fmt: skip
COMMANDS = (
    "as saved", "text", "experts stack", "experts unstack", "fuse --for sglang", "unfuse", "fp8",
    "fp8 --channel", "int8", "mx", "mx --targets Linear", "nvfp4 --dialect compressed-tensors",
    "nvfp4 --dialect modelopt", "w4a16 --rtn", "w4a16 --rtn --targets Linear",
    "w4a16 --rtn --packing gptq", "split --pp 2 --for sglang", "split --pp 2 --for vllm",
)  # fmt: skip
# Commands that refuse a class, each with a part of what it says; any other refusal is an error, and so
# is one of these that is no more. The first that names a class and a command counts.
DENSE = (
    "apertus", "arcee", "cohere2", "exaone4", "gemma2", "gemma3", "gemma3_text", "gemma4", "glm4",
    "granite", "hunyuan_v1_dense", "llama", "ministral3", "mistral", "mistral3", "olmo2", "phi3",
    "qwen2", "qwen2_5_vl", "qwen3", "qwen3_5", "qwen3_5_text", "qwen3_vl", "starcoder2",
)  # fmt: skip
TOWERS = (
    "gemma3", "gemma4", "glm4v_moe", "llama4", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe",
    "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip
ONE_STAGE = (
    "afmoe", "cohere2", "ernie4_5_moe", "gemma2", "gemma3", "gemma3_text", "granite", "granitemoe",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2_moe", "llama4", "olmo2", "olmoe", "qwen3_next",
    "starcoder2",
)  # fmt: skip
STACKED = ("gpt_oss", "granitemoe", "llama4", "llama4_text", "nemotron_h", "qwen3_vl_moe")
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
    (("text",), ("glm4v_moe",), "transformers has no class for a text model"),
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
    (("experts stack",), ("granitemoe",), "the experts are already stacked"),
    (("experts unstack",), ("granitemoe",), "does not read its experts as a matrix an expert"),
    (("split --pp 2 --for sglang",), ONE_STAGE, "runs in one pipeline stage only in sglang"),
    (
        ("split --pp 2 --for sglang", "split --pp 2 --for vllm"), ("gemma4",),
        "no stage is known for its role 'model.language_model.embed_tokens_per_layer'",
    ),
)  # fmt: skip


def origin(folders: Path, model: str) -> Path:
    """A small checkpoint, saved once."""
    folder = folders / model
    if not folder.is_dir():
        model_type, own = MODELS[model]
        sizes = {**SIZES.get(model_type, {}), **own}
        saved(model_type, folder, GIVEN.get(model_type, {}), sizes)
        keys = PUBLISHED.get(model_type, {})
        edit_json(folder / "config.json", lambda c: c.get("text_config", c).update(keys))
    return folder


def refusal(model: str, command: str) -> str:
    """What a command is known to say where it refuses a model, "" where it takes it."""
    named = {model, MODELS[model][0]}
    return next((says for words, of, says in REFUSED if command in words and named & {*of}), "")


def made(folders: Path, model: str, command: str) -> list[Path]:
    """The folders that a command makes; none where it refuses, as it is known to."""
    source = origin(folders, model)
    if command == "as saved":
        return [source]
    words, out = command.split(), folders / f"{model} {command}"
    if out.is_dir():
        return parts(out)
    number = 2 if words[0] == "experts" else 1
    done = run_cli(*words[:number], source, out, *words[number:], "--jobs", "1")
    says = refusal(model, command)
    assert bool(done.code) == bool(says), done.err or f"no longer says {says!r}"
    assert says in done.err
    assert "Traceback" not in done.err
    return [] if done.code else parts(out)
