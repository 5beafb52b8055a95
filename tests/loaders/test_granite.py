"""GraniteMoE's experts are published in stacks called input_linear and output_linear; quantized they
stand apart below `experts`, where sglang's and vLLM's own loaders look for them. Skips itself without
them."""

from __future__ import annotations

from pathlib import Path

import pytest
from families.classes import config
from families.tiny import saved

from loaders.client import PYTHON, Rank, Server
from loaders.folders import assert_whole, converted

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs sglang's loader: make loaders"),
]

FAMILY = "granitemoe"
# What no kernel reads, or is made of others after the load (test_sglang_quantized.py, test_vllm.py).
UNWRITTEN = (
    "_g_idx", "_g_idx_sort_indices", "_blockscale_swizzled", "_input_global_scale", "input_scale",
)  # fmt: skip
FORMS = {
    "w4a16": ("--rtn",),
    "fp8": ("--channel",),
    "nvfp4": ("--dialect", "compressed-tensors"),
    "nvfp4 ": ("--dialect", "modelopt"),
}


def _source(folders: Path) -> Path:
    folder = folders / FAMILY
    given = {key: value for key, value in config(FAMILY).items() if key != "model_type"}
    return folder if folder.is_dir() else saved(FAMILY, folder, given)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("runtime", ["sglang", "vllm"])
def test_it_loads_whole(
    runtime: str, form: str, folders: Path, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue("blackwell" if runtime == "sglang" else "vllm")
    folder = converted(folders, form.strip(), _source(folders), *FORMS[form])
    for rank in (Rank(), Rank(2, 1)):
        loaded = server.load(folder, rank)
        assert_whole(loaded, FAMILY, unwritten=UNWRITTEN)
        assert any(".block_sparse_moe.experts." in name for name in loaded.parameters)
