"""What every converting command makes, with its default options, of a small checkpoint of each class
that both runtimes have, as transformers saves it: where we say that a runtime loads the folder, its own
loader loads it whole, and where a card prints a launch line without a word of doubt, we said so. Of
every class that has a table, drafts too: simulator and loader agree where the table says that they do.

`make check` runs every so-manieth cell, QCONVERT_ALL=1 all; QCONVERT_TABLE=FILE adds a line of JSON for
each: what we said, and what the loader did."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from loaders.agree_classes import compared, tables
from loaders.agreement import config_of, headers
from loaders.client import PYTHON, Rank, Server
from loaders.folders import wrong
from loaders.small_models import CLASSES, COMMANDS, MODELS, is_draft, made
from qconvert.runtimes.classes.record import architecture_of, recorded
from qconvert.runtimes.serving import loads

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(
        not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs the loaders: make loaders"
    ),
]

# Classes whose folder does not load as saved, and why: transformers 5 saves their tensors under other
# names or in another order than published (qwen3_vl_moe), or rotary's parameters of two kinds of layers,
# which published configs do not have (mimo_v2_flash); sglang has nothing for experts of Llama 4's text
# model; vLLM has no prefill of latent attention for kimi_linear's small sizes.
UNLOADED: Mapping[str, Collection[str]] = {
    "sglang": ("llama4_text", "mimo_v2_flash", "qwen3_vl_moe"),
    "vllm": ("kimi_linear", "qwen3_vl_moe"),
}
# What a folder has or lacks to no harm, after the folder's name: biases that a class makes in vLLM for
# experts that have none, with GPTQ's packing; towers and what joins them to the model, which vLLM reads
# in the first stage alone; ends of a model, where the other runtime's stages, or a class that builds
# them in all, need them; in sglang Llama 4's tower, which it looks for in an index: without one it
# serves text.
UNUSED: Mapping[tuple[str, str], str] = {
    ("gemma3", "vllm"): r"^stage-01-\S* (vision_tower|multi_modal_projector)\.",
    ("gemma4", "vllm"): r"packing gptq\S* .*\.experts\.routed_experts\.w\d+_bias$",
    ("kimi_k25", "vllm"): r"^stage-01-\S* (vision_tower|mm_projector)\.",
    ("mistral3", "sglang"): r"^stage-00-\S* language_model\.lm_head\.",
    ("mistral3", "vllm"): r"^stage-01-\S* (vision_tower|multi_modal_projector)\.",
    ("nemotron_h", "sglang"): r"^stage-\S* backbone\.(norm_f|embeddings)\.",
    ("llama4", "vllm"): r"^stage-01-\S* (vision_model|multi_modal_projector)\.",
    ("llama4", "sglang"): r"^.* (vision_model|multi_modal_projector)\.",
}
LEAST_LOADED = 40
# Models whose classes have tables.
RECORDED = sorted(
    {name for runtime in UNLOADED for models in tables(runtime).values() for name in models}
)
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
            unused = UNUSED.get((model, runtime), "$^")
            left = [one for one in cell.did if not re.search(unused, f"{folder.name} {one}")]
            cell = replace(cell, did=tuple(left))
            about = {"model": model, "command": command, "runtime": runtime}
            noted({**about, "folder": folder.name, "said": cell.said, "did": cell.did[:6]})
            unloaded = MODELS[model][0] in UNLOADED[runtime]
            if not cell.kept or (command == "as saved" and bool(cell.did) != unloaded):
                lost[folder.name, runtime] = cell.did
    assert lost == {}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("model", RECORDED)
def test_tables_say_what_loaders_do(
    model: str, command: str, hopper: Server, vllm: Server, folders: Path
) -> None:
    """Simulator and loader say the same in every form that a class's table lists, at its sizes."""
    wrong, draft = [], is_draft(model)
    for folder in made(folders, model, command):
        for runtime, server in {"sglang": hopper, "vllm": vllm}.items():
            table = recorded(runtime, architecture_of(config_of(folder)), draft=draft)
            if table is None:
                continue
            wrong += [
                (runtime, folder.name, one)
                for one in compared(folder, command, runtime, server, draft=draft)
                if one.differences
                and one.tp in table.agrees.get(one.form, ())
                # Where a name or size was not seen, the answer is "not known", whatever the form.
                and not one.differences[0].startswith("not simulated: ")
            ]
    assert wrong == []
