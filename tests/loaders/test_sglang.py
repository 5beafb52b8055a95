"""sglang's own loader over what qconvert makes. Skips itself without its environment
(`make loaders`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import unjudged

from loaders.client import PYTHON, Rank, Server
from loaders.folders import assert_whole, converted, source
from loaders.published import FAMILIES

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs sglang's loader: make loaders"),
]

RANKS = (Rank(), Rank(2, 1), Rank(4, 3))
SPLIT = (
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
)  # their projections are split


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_published_checkpoints_load(family: str, fp8: bool, hopper: Server, folders: Path) -> None:
    """The harness itself: what the runtime serves must load, or no answer of it counts."""
    folder = source(folders, family, fp8=fp8)
    assert_whole(hopper.load(folder), family)
    at_four = hopper.load(folder, Rank(4, 3))
    if family == "deepseek_v3" and fp8:
        # Heads of 192 rows; its real size is 128 heads, which four ranks share in whole blocks.
        assert "192 is not divisible by weight quantization block_n = 128" in str(at_four.error)
    else:
        assert_whole(at_four, family)


@pytest.mark.parametrize("rank", RANKS, ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", SPLIT)
def test_fused_is_split_in_memory(
    family: str, fp8: bool, rank: Rank, hopper: Server, folders: Path
) -> None:
    origin = source(folders, family, fp8=fp8)
    fused = hopper.load(converted(folders, "fuse", origin, "--for", "sglang"), rank)
    split = hopper.load(origin, rank)
    assert_whole(fused, family)
    assert fused.parameters == split.parameters
    assert fused.schemes == split.schemes


def test_rows_in_another_order_are_seen(hopper: Server, folders: Path) -> None:
    """The negative control: interleaved rows load into Qwen3.5's class in silence, as other weights."""
    origin = source(folders, "qwen3_5_moe_text")
    right = hopper.load(converted(folders, "fuse", origin, "--for", "sglang"))
    out = folders / "interleaved"
    unjudged("passes: [fuse: {groups: 4}]", origin, out)
    wrong = hopper.load(out)
    assert_whole(wrong, "qwen3_5_moe_text")
    differ = {name for name in right.parameters if right.parameters[name] != wrong.parameters[name]}
    projections = ("in_proj_qkvz.weight", "in_proj_ba.weight")
    assert len(differ) == 6
    assert all(name.endswith(projections) for name in differ)


@pytest.mark.parametrize("rank", RANKS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_dequantized_checkpoints_load(
    family: str, rank: Rank, hopper: Server, folders: Path
) -> None:
    origin = source(folders, family, fp8=True)
    assert_whole(hopper.load(converted(folders, "dequant", origin), rank), family)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5_moe_text"])
def test_experts_unstacked_are_experts_stacked(family: str, hopper: Server, folders: Path) -> None:
    origin = source(folders, family, stacked=True)
    stacked, apart = hopper.load(origin), hopper.load(converted(folders, "experts unstack", origin))
    assert_whole(apart, family)
    assert apart.parameters == stacked.parameters
