"""Serving lines of the pages are ones that the runtime's own argument parser takes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from loaders.client import PYTHON

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
    words = shlex.split(line.removeprefix(_STARTS[runtime]))
    return ["--model", *words] if runtime == "vllm" else words


def parsed(runtime: str, asked: list[list[str]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [PYTHON, "-m", "loaders.parse_lines", runtime], cwd=_ROOT / "tests",
        input=json.dumps(asked), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("runtime", "fewest"), [("sglang", 9), ("vllm", 6)])
def test_the_parser_takes_every_line(runtime: str, fewest: int) -> None:
    found = lines(runtime)
    assert len(found) >= fewest
    asked = [arguments(runtime, line) for line in found]
    wrong = {"sglang": ["--model-path", "x", "--tensor-size", "4"], "vllm": ["--no-such-option"]}
    *made, last = parsed(runtime, [*asked, wrong[runtime]])
    assert "error" in last, "the parser refuses nothing"
    assert {
        line: said["error"] for line, said in zip(found, made, strict=True) if "error" in said
    } == {}
    for line, said in zip(found, made, strict=True):
        size = re.search(r"--(?:tp-size|tensor-parallel-size) (\d+)", line)
        held = said.get("tp_size", said.get("tensor_parallel_size"))
        assert size is None or held == int(size[1]), line
