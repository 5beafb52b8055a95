"""Quantized linear attention, fused: sglang holds in memory what it holds of the split projections."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import run_cli

from loaders.client import PYTHON, Loaded, Rank, Server
from loaders.folders import assert_whole, converted, source

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs sglang's loader: make loaders"),
]

QUANTIZED = {
    "w4a16 g32": ("w4a16", "--rtn", "--targets", "Linear", "--group-size", "32"),
    "w4a16 asymmetric": ("w4a16", "--rtn", "--targets", "Linear", "--asymmetric"),
    "w8a16": ("w4a16", "--rtn", "--targets", "Linear", "--bits", "8"),
    "nvfp4": ("nvfp4", "--dialect", "compressed-tensors", "--targets", "Linear"),
    "nvfp4 inputs": (
        "nvfp4",
        "--dialect",
        "modelopt",
        "--targets",
        "Linear",
        "--input-scale",
        ".5",
    ),
    "int8": ("int8", "--targets", "Linear"),
    "fp8 rows": ("fp8", "--channel"),
    "fp8 tensor": ("fp8", "--tensor", "--input-scale", ".5"),
}


@pytest.mark.parametrize("rank", [Rank(), Rank(2, 1)], ids=str)
@pytest.mark.parametrize(
    ("family", "form"),
    [*(("qwen3_5_text", form) for form in QUANTIZED), ("qwen3_5_moe_text", "nvfp4")],
)
def test_fused_is_split_in_memory(
    family: str, form: str, rank: Rank, blackwell: Server, folders: Path
) -> None:
    command, *options = QUANTIZED[form]
    origin = converted(folders, command, source(folders, family, fp8=False), *options)
    out = folders / f"{origin.name}-fused"
    if not out.exists():
        done = run_cli("fuse", origin, out, "--for", "sglang", "--jobs", "1")
        assert done.code == 0, done.err
    fused, split = blackwell.load(out, rank), blackwell.load(origin, rank)
    assert_whole(fused, family)
    assert _computed_with(fused) == _computed_with(split)
    assert fused.schemes == split.schemes


def _computed_with(loaded: Loaded) -> dict[str, object]:
    """Of split projections sglang keeps the size of the part it read last, and never looks at it."""
    return {name: p for name, p in loaded.parameters.items() if not name.endswith(".weight_shape")}
