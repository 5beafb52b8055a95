"""What every converting command makes, with its default options, of a small checkpoint of each class
that both runtimes have, as transformers saves it: where we say that a runtime loads the folder, its own
loader loads it whole, and where a card prints a launch line without a word of doubt, we said so.

`make check` runs every so-manieth cell, QCONVERT_ALL=1 all; QCONVERT_TABLE=FILE adds a line of JSON for
each: what we said, and what the loader did."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
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
# What published configs of a class have, and transformers' own lacks; sizes of latent attention that
# vLLM has a kernel for.
_LATENT = {
    "q_lora_rank": 256, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "num_key_value_heads": 4,
}  # fmt: skip
SIZES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {**_LATENT, "q_lora_rank": None}, "deepseek_v3": _LATENT, "glm4_moe_lite": _LATENT,
}  # fmt: skip
GDN = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {"score_func": "sigmoid"}, "deepseek_v2": {"moe_layer_freq": 1},
    "deepseek_v3": {"moe_layer_freq": 1}, "gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "glm4_moe": {"head_dim": 64}, "glm4_moe_lite": {"first_k_dense_replace": 1, "moe_layer_freq": 1},
    "gpt_oss": {"swiglu_limit": 7.0}, "hunyuan_v1_moe": {"moe_intermediate_size": 512},
    "minimax_m2": {"scoring_func": "sigmoid", "rotary_dim": 32, "use_routing_bias": True},
    "exaone4": {"sliding_window_pattern": "LLLG"},
    **{name: {"full_attention_interval": 2} for name in CLASSES if name in GDN},
}  # fmt: skip
COMMANDS = (
    "as saved", "text", "experts stack", "experts unstack", "fuse --for sglang", "unfuse", "fp8",
    "fp8 --channel", "int8", "mx", "mx --targets Linear", "nvfp4 --dialect compressed-tensors",
    "nvfp4 --dialect modelopt", "w4a16 --rtn", "w4a16 --rtn --targets Linear",
    "w4a16 --rtn --packing gptq", "split --pp 2 --for sglang", "split --pp 2 --for vllm",
)  # fmt: skip
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
        saved(model_type, folder, SETTINGS.get(model_type, {}), sizes)
        keys = PUBLISHED.get(model_type, {})
        edit_json(folder / "config.json", lambda c: c.get("text_config", c).update(keys))
    return folder


def made(folders: Path, model: str, command: str) -> list[Path]:
    """The folders that a command makes, none where it refuses."""
    source = origin(folders, model)
    if command == "as saved":
        return [source]
    words, out = command.split(), folders / f"{model} {command}"
    number = 2 if words[0] == "experts" else 1
    done = run_cli(*words[:number], source, out, *words[number:], "--jobs", "1")
    if done.code:
        return []
    assert "Traceback" not in done.err
    return parts(out)


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


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_said_to_load_loads(
    model: str, command: str, hopper: Server, vllm: Server, folders: Path
) -> None:
    found = made(folders, model, command)
    if not found:
        noted({"model": model, "command": command, "runtime": "", "said": "refused", "did": []})
        pytest.skip("refused by the command")
    lost = {}
    for folder in found:
        for runtime, cell in cells(folder, {"sglang": hopper, "vllm": vllm}):
            about = {"model": model, "command": command, "runtime": runtime}
            noted({**about, "folder": folder.name, "said": cell.said, "did": cell.did[:6]})
            if not cell.kept:
                lost[folder.name, runtime] = cell.did
    assert lost == {}
