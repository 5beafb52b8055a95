"""Quantized and fused in one recipe. Each form by itself: test_fuse_coded.py."""

from __future__ import annotations

from pathlib import Path

from checkpoints import run_cli
from loaders.folders import converted, source

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.diff import compare


def test_quantized_and_fused_in_one_recipe(tmp_path: Path) -> None:
    """The scales that parts share are computed, and hf_quant_config.json would have the old names."""
    origin = source(tmp_path, "qwen3_5_text", fp8=False)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "passes:\n  - nvfp4: {dialect: modelopt, targets: [Linear]}\n  - fuse: {consumer: sglang}\n"
    )
    out = tmp_path / "out"
    done = run_cli("run", recipe, origin, out, "--jobs", "1")
    assert done.code == 0, done.err
    assert not (out / "hf_quant_config.json").exists()
    apart = converted(tmp_path, "nvfp4", origin, "--dialect", "modelopt", "--targets", "Linear")
    fused = converted(tmp_path, "fuse", apart, "--for", "sglang")
    assert compare(Checkpoint.open(out), Checkpoint.open(fused)) == []
