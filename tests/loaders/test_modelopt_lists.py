"""Lists of modules that modelopt's blocks leave out, of which releases read different ones: the
simulator says of each what the loader of that release does. Skips itself without the loaders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json

from loaders.agreement import disagreements, once, setting, simulated
from loaders.client import PYTHON, Rank, Server
from loaders.folders import converted, source

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(
        not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs the loaders: make loaders"
    ),
]


@pytest.mark.parametrize("key", ["ignore", "exclude_modules", "modules_to_not_convert"])
@pytest.mark.parametrize("runtime", ["sglang", "vllm"])
def test_a_list_under_each_name(
    runtime: str, key: str, folders: Path, hopper: Server, vllm: Server
) -> None:
    made = converted(folders, "nvfp4", source(folders, "qwen3_moe"), "--dialect", "modelopt")
    folder = folders / f"{made.name} {key}"
    if not folder.is_dir():
        shutil.copytree(made, folder)
        (folder / "hf_quant_config.json").unlink(missing_ok=True)

        def renamed(config: dict[str, Any]) -> None:
            block = config["quantization_config"]
            block[key] = block.pop("ignore")

        edit_json(folder / "config.json", renamed)
    server = {"sglang": hopper, "vllm": vllm}[runtime]
    for rank in (Rank(), Rank(2, 1)):
        real = server.load(folder, rank)
        simulation = simulated(folder, setting(rank), runtime=runtime)
        differ = disagreements(simulation, once(real) if runtime == "vllm" else real)
        # Which parameter ends a load is not stated.
        assert [one for one in differ if not one.startswith("reason:")] == []
