"""What every converting command makes with its default options, on each small published checkpoint, is
started with the launch lines that its card prints: it loads whole in the runtime's own loader. `kt` is
in test_sglang_quantized.py; cards of `amx` and `prepare` name none of these runtimes,
`w4a16 --gptq`, `nvfp4 --stats` and `nvfp4 --gptq` write the forms of `w4a16 --rtn` and `nvfp4`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run_cli

from loaders.client import PYTHON, Rank, Server
from loaders.folders import parts, source, wrong
from loaders.published import FAMILIES

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(
        not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs the loaders: make loaders"
    ),
]

COMMANDS = (
    "dequant", "fuse --for sglang", "unfuse", "experts unstack", "experts stack", "w4a16 --rtn",
    "nvfp4", "fp8", "int8", "mx", "split --pp 2 --for sglang", "split --pp 2 --for vllm",
)  # fmt: skip
_STARTS = {"sglang": "python -m sglang.launch_server --model-path REPO", "vllm": "vllm serve REPO"}
_TP, _PP = ("--tp-size", "--tensor-parallel-size"), ("--pp-size", "--pipeline-parallel-size")
# Words of a launch line without a value, as the loaders take them. Another word fails the test.
_FLAGS = {"--disable-shared-experts-fusion": {"disable_shared_experts_fusion": True}}


@dataclass(frozen=True)
class Line:
    """A launch line of a card."""

    runtime: str
    tp: int
    pp: int
    flags: dict[str, Any]


def lines_of(card: str) -> Iterator[Line]:
    """Every launch line of a card for a runtime whose loader is here, but those that are to be tried."""
    for text in re.findall(r"^ {4}(\S.*)$", card.partition("Not known for ")[0], re.MULTILINE):
        for runtime, start in _STARTS.items():
            if not text.startswith(start):
                continue
            sizes, flags = {"tp": 1, "pp": 1}, dict[str, Any]()
            words = iter(shlex.split(text.removeprefix(start)))
            for word in words:
                if word in (*_TP, *_PP):
                    sizes["tp" if word in _TP else "pp"] = int(next(words))
                else:
                    flags |= _FLAGS[word]
            yield Line(runtime, sizes["tp"], sizes["pp"], flags)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("form", ["bf16", "fp8", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_lines_of_a_card_load_its_folder(
    family: str, form: str, command: str, hopper: Server, vllm: Server, folders: Path
) -> None:
    if form == "stacked" and family not in ("qwen3_5_moe", "qwen3_5_moe_text"):
        pytest.skip("published with an expert in three matrices")
    origin = source(folders, family, fp8=form == "fp8", stacked=form == "stacked")
    words, out = command.split(), folders / f"{family} {form} {command}"
    number = 2 if words[0] == "experts" else 1
    done = run_cli(*words[:number], origin, out, *words[number:], "--jobs", "1")
    if done.code:
        pytest.skip(f"refused: {done.err[-200:]}")
    faults = {}
    for folder in parts(out):
        stage = json.loads((folder / "qconvert.json").read_text()).get("stage") or {}
        for line in lines_of((folder / "README.md").read_text()):
            assert line.pp == stage.get("of", 1)
            server = {"sglang": hopper, "vllm": vllm}[line.runtime]
            at = stage.get("number", 0)
            for rank in dict.fromkeys((0, line.tp - 1)):
                loaded = server.load(
                    folder, Rank(line.tp, rank, line.pp, at), flags=line.flags,
                    environment=stage.get("environment"),
                )  # fmt: skip
                last = at == line.pp - 1
                # The last stage holds embeddings for the draft; a tower is read in the first.
                said = wrong(loaded, family, last=last)
                if line.pp > 1:
                    said = [n for n in said if "visual." not in n and "embed_tokens" not in n]
                if said:
                    faults[folder.name, line.runtime, rank] = said
    assert faults == {}
