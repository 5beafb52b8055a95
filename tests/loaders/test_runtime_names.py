"""Runtimes' own loaders take what is written of classes whose modules they call otherwise than published
(models/unquantized.py, with_runtime_names). Skips itself without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json
from families.classes import config
from families.tiny import saved

from loaders.client import PYTHON, Server
from loaders.folders import converted

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs sglang's loader: make loaders"),
]

# What releases state and transformers does not save.
PUBLISHED: dict[str, dict[str, Any]] = {
    "minimax_m2": {
        "scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer", "rotary_dim": 32,
        "use_routing_bias": True,
    },
    "hunyuan_v1_moe": {
        "moe_intermediate_size": [512] * 4, "num_shared_expert": [1] * 4, "moe_topk": [2] * 4,
        "use_mixed_mlp_moe": True, "use_qk_norm": True, "norm_topk_prob": True,
    },
}  # fmt: skip
FORMS = {
    "w4a16": ("--rtn", "--group-size", "32"),
    "fp8": ("--channel",),
    "nvfp4": ("--dialect", "compressed-tensors"),
    "nvfp4 ": ("--dialect", "modelopt"),
}
# What no kernel reads, or is made of others after the load (test_sglang_quantized.py, test_vllm.py).
_UNWRITTEN = (
    "_g_idx", "_g_idx_sort_indices", "_blockscale_swizzled", "_input_global_scale", "input_scale",
)  # fmt: skip
CELLS = [
    *(("sglang", family, form) for family in ("mixtral", "hunyuan_v1_moe") for form in FORMS),
    *(("vllm", family, form) for family in ("minimax_m2", "phimoe") for form in FORMS),
    *((runtime, "ernie4_5_moe", "nvfp4 ") for runtime in ("sglang", "vllm")),
]


def _source(folders: Path, family: str) -> Path:
    folder = folders / family
    if not folder.is_dir():
        given = {key: value for key, value in config(family).items() if key != "model_type"}
        saved(family, folder, given)
        edit_json(folder / "config.json", lambda stated: stated.update(PUBLISHED.get(family, {})))
    return folder


@pytest.mark.parametrize(("runtime", "family", "form"), CELLS)
def test_it_loads_whole(
    runtime: str, family: str, form: str, folders: Path, request: pytest.FixtureRequest
) -> None:
    if (family, form) == ("hunyuan_v1_moe", "nvfp4 "):
        pytest.skip("said not to load: runtimes/misreadings.py")
    server: Server = request.getfixturevalue("hopper" if runtime == "sglang" else "vllm")
    loaded = server.load(converted(folders, form.strip(), _source(folders, family), *FORMS[form]))
    assert loaded.error is None, (loaded.step, loaded.error)
    assert not [name for name in loaded.unwritten if not name.endswith(_UNWRITTEN)]
    assert loaded.unused == ()
