"""Configs that sglang's own loader refuses or misreads: after `qconvert repair` it takes them whole,
with the parameters of the folder as it was converted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import edit_json, run_cli

from loaders.client import PYTHON, Loaded, Server
from loaders.published import published

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs sglang's loader: make loaders"),
]

RTN = ("w4a16", "--rtn", "--group-size", "32")
NVFP4 = ("nvfp4", "--dialect", "compressed-tensors")
MODELOPT = ("nvfp4", "--dialect", "modelopt")


def converted(folders: Path, family: str, words: tuple[str, ...], *, fp8: bool) -> Path:
    """A conversion, made once."""
    form = "fp8" if fp8 else "bf16"
    source, out = folders / f"{family} {form}", folders / " ".join((family, form, *words))
    if not source.is_dir():
        published(family, fp8=fp8).write(source)
    if not out.is_dir():
        done = run_cli(words[0], source, out, *words[1:], "--jobs", "1")
        assert done.code == 0, done.err
    return out


def _block(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    return lambda config: change(config["quantization_config"])


def _without(*ends: str) -> Callable[[dict[str, Any]], None]:
    """The ignore list without entries that end so."""

    def change(block: dict[str, Any]) -> None:
        kept = [entry for entry in block["ignore"] if not entry.rstrip("$").endswith(ends)]
        assert len(kept) < len(block["ignore"]), ends
        block["ignore"] = kept

    return _block(change)


def _with(entry: str) -> Callable[[dict[str, Any]], None]:
    return _block(lambda block: block["ignore"].append(entry))


def _empty(block: dict[str, Any]) -> None:
    block["ignore"] = []


def _old_hybrid(block: dict[str, Any]) -> None:
    """Block FP8 with a key for the experts, as earlier versions wrote it."""
    for key in ("quantized_layers", "kv_cache_quant_algo", "ignore"):
        block.pop(key)
    block.update(quant_method="fp8", moe_quant_algo="W4A16_NVFP4")


def _nested(config: dict[str, Any]) -> None:
    config["quantization_config"]["ignore"] = []
    config["compression_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


# Parameters that a kernel never reads, or that are made of others after the load, and the scales of
# activations, which folders without --stats do not have.
_UNREAD = ("_g_idx", "_g_idx_sort_indices", "_blockscale_swizzled", "_input_scale")
FUSED = (".qkv_proj", ".gate_up_proj", ".fused_qkv_a_proj_with_mqa")

# The family, the source's form, the conversion, and what is done to config.json.
BROKEN: dict[str, tuple[str, bool, tuple[str, ...], Callable[[dict[str, Any]], None]]] = {
    "glm w4a16 without fused names": ("glm4_moe", False, RTN, _without(*FUSED)),
    "deepseek w4a16 without fused names": ("deepseek_v3", False, RTN, _without(*FUSED)),
    "glm nvfp4 without fused names": ("glm4_moe", False, NVFP4, _without(*FUSED)),
    "deepseek nvfp4 without fused names": ("deepseek_v3", False, NVFP4, _without(*FUSED)),
    "qwen3 w4a16 without attention": ("qwen3_moe", False, RTN, _without(".q_proj", ".k_proj")),
    "qwen3 w4a16, an empty list": ("qwen3_moe", False, RTN, _block(_empty)),
    "qwen3 modelopt, an empty list": ("qwen3_moe", False, MODELOPT, _block(_empty)),
    "glm modelopt, an empty list": ("glm4_moe", False, MODELOPT, _block(_empty)),
    "experts are listed": ("qwen3_moe", False, RTN, _with("re:.*mlp.experts.*")),
    "an expression that cannot be read": ("qwen3_moe", False, RTN, _with("re:*.gate")),
    "the group of FP8 linears is gone": (
        "qwen3_moe", True, RTN, _block(lambda block: block["config_groups"].pop("group_1")),
    ),
    "modelopt beside FP8 as it was written": ("qwen3_moe", True, MODELOPT, _block(_old_hybrid)),
    "glm modelopt beside FP8 as it was": ("glm4_moe", True, MODELOPT, _block(_old_hybrid)),
    "two blocks": ("qwen3_moe", False, RTN, _nested),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_mended_config_loads(what: str, hopper: Server, folders: Path, tmp_path: Path) -> None:
    family, fp8, words, broken = BROKEN[what]
    origin = converted(folders, family, words, fp8=fp8)
    whole = hopper.load(origin)
    assert _is_whole(whole), (whole.error, whole.unwritten, whole.at)

    folder = Path(shutil.copytree(origin, tmp_path / "folder"))
    edit_json(folder / "config.json", broken)
    weights = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    wrong = hopper.load(folder)
    assert not _is_whole(wrong) or wrong.schemes != whole.schemes, "it is not broken"

    done = run_cli("repair", folder)
    assert done.code == 0, done.err
    mended = hopper.load(folder)
    assert _is_whole(mended), (mended.error, mended.unwritten, mended.at)
    assert mended.parameters == whole.parameters
    assert mended.schemes == whole.schemes
    assert {file.name: file.read_bytes() for file in folder.glob("*.safetensors")} == weights
    again = json.loads(run_cli("repair", folder, "--json").out)
    assert [one["changes"] for one in again] == [[]]


def _is_whole(loaded: Loaded) -> bool:
    """Loaded, and every parameter is written that a checkpoint has a tensor for."""
    needed = [name for name in loaded.unwritten if not name.endswith(_UNREAD)]
    return loaded.error is None and needed == [] and not loaded.empty
