"""The demo's checkpoint and all it makes of it load in the runtimes' own loaders."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import run_cli

from loaders.client import PYTHON, Server
from loaders.folders import assert_whole

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the runtimes' loaders: make loaders"),
]

_FAMILY = "qwen3_5_moe_text"
_MADE = ("sample-fp8", "sample-fp8-w4a16", "sample-bf16")
# What a draft takes from the model it drafts for.
_BORROWED = ("lm_head.weight",)


@pytest.fixture(scope="module")
def demo(folders: Path) -> Path:
    done = run_cli("demo", folders / "demo")
    assert done.code == 0, done.err
    assert {path.name for path in (folders / "demo").iterdir() if path.is_dir()} == set(_MADE)
    return folders / "demo"


@pytest.mark.parametrize("name", ["sample-fp8", "sample-bf16"])  # INT4: test_simulator_sglang.py
def test_sglang_loads_what_the_demo_makes(name: str, demo: Path, hopper: Server) -> None:
    assert_whole(hopper.load(demo / name), _FAMILY)
    draft = hopper.load(demo / name, draft=True)
    assert_whole(draft, _FAMILY, draft=True, unwritten=_BORROWED)


@pytest.mark.parametrize("name", _MADE)
def test_vllm_loads_what_the_demo_makes(name: str, demo: Path, vllm: Server) -> None:
    assert_whole(vllm.load(demo / name), _FAMILY)
    assert_whole(vllm.load(demo / name, draft=True), _FAMILY, draft=True)
