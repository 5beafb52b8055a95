"""Serving lines of the pages are ones that the runtime's own argument parser takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from loaders.client import PYTHON, Server

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(
        not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs the loaders: make loaders"
    ),
]

_ROOT = Path(__file__).parent.parent.parent
_STARTS = {"sglang": "python -m sglang.launch_server ", "vllm": "vllm serve "}
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]


def lines(runtime: str) -> list[str]:
    """Of shell blocks, from the program on: variables before it are the shell's."""
    found = []
    for page in _PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.splitlines():
                _, start, rest = line.partition(_STARTS[runtime])
                found += [start + rest] if start else []
    return found


def arguments(runtime: str, line: str) -> list[str]:
    # `vllm serve` has --headless, for all machines but the first (`entrypoints/cli/serve.py`,
    # run_headless), beside the engine's options, whose parser is asked.
    words = shlex.split(line.removeprefix(_STARTS[runtime]).removesuffix(" --headless"))
    return ["--model", *words] if runtime == "vllm" else words


@pytest.mark.parametrize(("runtime", "fewest"), [("sglang", 9), ("vllm", 6)])
def test_the_parser_takes_every_line(
    runtime: str, fewest: int, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue({"sglang": "hopper"}.get(runtime, runtime))
    found = lines(runtime)
    assert len(found) >= fewest
    asked = [arguments(runtime, line) for line in found]
    wrong = {"sglang": ["--model-path", "x", "--tensor-size", "4"], "vllm": ["--no-such-option"]}
    *made, last = server.parsed([*asked, wrong[runtime]])
    assert "error" in last, "the parser refuses nothing"
    assert {
        line: said["error"] for line, said in zip(found, made, strict=True) if "error" in said
    } == {}
    for line, said in zip(found, made, strict=True):
        size = re.search(r"--(?:tp-size|tensor-parallel-size) (\d+)", line)
        held = said.get("tp_size", said.get("tensor_parallel_size"))
        assert size is None or held == int(size[1]), line
