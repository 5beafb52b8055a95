"""What every converting command makes, with its default options, of a small checkpoint of each class
that both runtimes have, as transformers saves it: where we say that a runtime loads the folder, its own
loader loads it whole, and where a card prints a launch line without a word of doubt, we said so.

`make check` runs every so-manieth cell, QCONVERT_ALL=1 all; QCONVERT_TABLE=FILE adds a line of JSON for
each: what we said, and what the loader did."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, run_cli
from families.classes import SETTINGS
from families.tiny import saved

from loaders.agreement import config_of, headers
from loaders.client import PYTHON, Rank, Server
from loaders.folders import parts, wrong
from qconvert.runtimes.serving import loads

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(
        not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs the loaders: make loaders"
    ),
]

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
    (_W4A16, ("llama of odd heads", "qwen3_moe of odd heads"), "columns in whole groups of 128"),
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
# Classes whose folder does not load as saved, and why: transformers 5 saves their tensors under other
# names or in another order than published (gemma3, kimi_linear, qwen3_vl_moe), or rotary's parameters of
# two kinds of layers, which published configs do not have (mimo_v2_flash); sglang has nothing for
# experts of Llama 4's text model, and looks for its tower in an index, which one file has not; vLLM's
# class of Mistral 3 needs a package for images.
UNLOADED: Mapping[str, Collection[str]] = {
    "sglang": ("gemma3", "kimi_linear", "llama4", "llama4_text", "mimo_v2_flash", "qwen3_vl_moe"),
    "vllm": ("gemma3", "kimi_linear", "mistral3", "qwen3_vl_moe"),
}
LEAST_LOADED = 40
STARTS = {"sglang": "sglang.launch_server", "vllm": "vllm serve"}
FUSION = {"disable_shared_experts_fusion": True}


@dataclass(frozen=True)
class Cell:
    """A folder in a runtime: what we said of it, and what the loader did."""

    said: str
    did: tuple[str, ...]

    @property
    def kept(self) -> bool:
        """Whether nothing loads incompletely that is said to load."""
        return self.said != "loads" or not self.did


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
    number = 2 if words[0] == "experts" else 1
    done = run_cli(*words[:number], source, out, *words[number:], "--jobs", "1")
    says = refusal(model, command)
    assert bool(done.code) == bool(says), done.err or f"no longer says {says!r}"
    assert says in done.err
    assert "Traceback" not in done.err
    return [] if done.code else parts(out)


def cells(folder: Path, servers: Mapping[str, Server]) -> Iterator[tuple[str, Cell]]:
    """What we say of a folder for each runtime, and what its loader does with it, at one rank."""
    manifest = folder / "qconvert.json"
    facts = json.loads(manifest.read_bytes()) if manifest.exists() else {}
    said = loads(config_of(folder), headers(folder), facts)
    stage = facts.get("stage") or {}
    for runtime, server in servers.items():
        at = stage.get("number", 0)
        rank = Rank(1, 0, stage.get("of", 1), at)
        one = said[runtime]
        flags = FUSION if one.at(1) == "loads" and 1 not in one.sizes.get("", {}) else {}
        loaded = server.load(folder, rank, flags=flags, environment=stage.get("environment"))
        did = wrong(loaded, "", last=at == rank.pp - 1)
        if not (config_of(folder).get("quantization_config") or {}).get("desc_act"):
            did = [name for name in did if not name.endswith(".g_idx")]  # columns in order
        if at and rank.pp > 1:
            did = [name for name in did if not name.startswith(_first_stages(folder))]
        assert one.verdict == "loads" or is_doubted(folder, STARTS[runtime])
        yield runtime, Cell(one.at(1), tuple(did))


def _first_stages(folder: Path) -> tuple[str, ...]:
    """Modules that some classes build in every stage and compute with in the first one's: the embedding,
    where no later one takes it for a head, and a tower."""
    config = config_of(folder)
    tied = config.get(
        "tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings")
    )
    towers = ("visual.", "model.visual.")
    embeds = (
        "model.embed_tokens.",
        "model.language_model.embed_tokens.",
        "language_model.model.embed_tokens.",
    )
    return towers if tied else (*towers, *embeds)


def is_doubted(folder: Path, line: str) -> bool:
    """Whether a folder's card has no such launch line, or has it behind a word of doubt."""
    card = folder / "README.md"
    text = card.read_text() if card.exists() else ""
    return line not in text or -1 < text.find("Not known for ") < text.find(line)


def noted(line: Mapping[str, Any]) -> None:
    where = os.environ.get("QCONVERT_TABLE")
    if where:
        with Path(where).open("a") as table:
            table.write(json.dumps(line) + "\n")


def test_most_classes_load_as_saved() -> None:
    for runtime, names in UNLOADED.items():
        assert set(names) <= set(CLASSES)
        assert len(CLASSES) - len(names) >= LEAST_LOADED, runtime


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_said_to_load_loads(
    model: str, command: str, hopper: Server, vllm: Server, folders: Path
) -> None:
    found = made(folders, model, command)
    if not found:
        noted({"model": model, "command": command, "runtime": "", "said": "refused", "did": []})
    lost = {}
    for folder in found:
        for runtime, cell in cells(folder, {"sglang": hopper, "vllm": vllm}):
            about = {"model": model, "command": command, "runtime": runtime}
            noted({**about, "folder": folder.name, "said": cell.said, "did": cell.did[:6]})
            unloaded = MODELS[model][0] in UNLOADED[runtime]
            if not cell.kept or (command == "as saved" and bool(cell.did) != unloaded):
                lost[folder.name, runtime] = cell.did
    assert lost == {}
