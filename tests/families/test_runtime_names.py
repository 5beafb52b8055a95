"""Lists of unquantized modules, and targets, have the names that runtimes ask for where those are not
the published ones. That their loaders take them: tests/loaders/test_runtime_names.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from families.classes import config
from families.tiny import saved
from qconvert.checkpoint.open import open_source
from qconvert.passes.fp8 import ToFp8
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.quantize import ToMx
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Pass, Plan, run_passes

# Of a layer's router and attention: published, and as vLLM, the Transformers backends and sglang call
# them.
NAMES = {
    "mixtral": {
        "model.layers.1.block_sparse_moe.gate", "model.layers.1.mlp.gate",
        "layers.1.block_sparse_moe.gate", "layers.1.self_attn.qkv_proj",
    },
    "phimoe": {"model.layers.1.block_sparse_moe.gate", "model.layers.1.mlp.router"},
    "minimax_m2": {"model.layers.1.block_sparse_moe.gate", "model.layers.1.mlp.gate"},
    "hunyuan_v1_moe": {
        ".self_attn.qkv_proj", "layers.1.self_attn.qkv_proj", ".mlp.shared_mlp.gate_up_proj",
        ".gate_up_proj",
    },
    "ernie4_5_moe": {"layers.1.self_attn.qkv_proj"},
}  # fmt: skip
# What answers to the experts of a layer.
EXPERTS = {
    "mixtral": ("model.layers.1.block_sparse_moe.experts.0.w1", "model.layers.1.mlp.experts.0.up_proj"),
    "phimoe": ("model.layers.1.mlp.experts.0.gate_proj",),
    "minimax_m2": ("model.layers.1.mlp.experts.0.gate_proj",),
    "hunyuan_v1_moe": (".0.gate_proj",),
    "ernie4_5_moe": ("model.layers.1.mlp.experts.0.gate_proj",),
}  # fmt: skip
PACKED: dict[str, Pass] = {
    "w4a16": ExpertsToW4A16(group_size=32), "mx": ToMx(), "nvfp4": ToNvfp4("compressed-tensors"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def _plan(folders: Path, family: str, step: Pass, **given: Any) -> tuple[Plan, dict[str, Any]]:
    """A step's plan of a tiny model of a family, and its quantization block."""
    folder = folders / family
    if not folder.is_dir():
        own = {key: value for key, value in config(family).items() if key != "model_type"}
        saved(family, folder, {**own, **given})
    plan = run_passes(Plan.identity(open_source(folder)), (step,))
    return plan, plan.config["quantization_config"]


@pytest.mark.parametrize("step", PACKED)
@pytest.mark.parametrize("family", NAMES)
def test_names_beside_packed_experts(family: str, step: str, folders: Path) -> None:
    _, block = _plan(folders, family, PACKED[step])
    assert set(block["ignore"]) >= NAMES[family]
    targets = [one for group in block["config_groups"].values() for one in group["targets"]]
    for expert in EXPERTS[family]:
        assert any(re.match(target.removeprefix("re:"), expert) for target in targets)
        assert expert not in block["ignore"]


@pytest.mark.parametrize("family", ["mixtral", "phimoe"])
def test_names_of_routers_beside_fp8(family: str, folders: Path) -> None:
    _, block = _plan(folders, family, ToFp8())
    listed = set(block["modules_to_not_convert"])
    assert listed >= {name for name in NAMES[family] if "gate" in name or "router" in name}
    assert not [name for name in listed if "self_attn" in name]


def test_no_name_answers_to_a_quantized_module(folders: Path) -> None:
    """Attention of a tower has the names of the text model's from `layers` on."""
    _, block = _plan(folders, "mistral3", ToFp8(dialect="compressed-tensors"))
    assert "layers.0.self_attn.q_proj" not in block["ignore"]
    assert r"re:.*vision_tower\..*" in block["ignore"]
    _, block = _plan(folders, "mistral3", ToFp8())
    assert "vision_tower" in block["modules_to_not_convert"]
    assert "layers.0.self_attn.q_proj" not in block["modules_to_not_convert"]
    _, block = _plan(folders, "mistral3", ToNvfp4("modelopt", targets=("Linear",)))
    assert "vision_tower*" in block["ignore"]
    assert not [name for name in block["ignore"] if name.startswith("*layers")]


@pytest.mark.parametrize("family", ["ernie4_5_moe", "qwen2_moe"])
def test_a_tied_head_is_listed(family: str, folders: Path) -> None:
    """vLLM and sglang build one in modelopt's form, though the folder has no tensor of it."""
    plan, block = _plan(folders / "tied", family, ToNvfp4("modelopt"), tie_word_embeddings=True)
    assert "lm_head.weight" not in plan.tensors
    assert "lm_head" in block["ignore"]
