"""The simulator of sglang's loader against that loader, beside test_simulator_sglang.py: drafts, which
have classes of their own; NVFP4 beside FP8; Qwen3-VL. Skips itself without the loader's environment
(`make loaders`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from loaders.client import PYTHON, Rank, Server
from loaders.published import FAMILIES, published
from loaders.test_simulator_sglang import (
    NO_FUSION,
    QUANTIZED,
    RANKS,
    SPARSE,
    STACKED,
    STAGES,
    agree,
    converted,
    source,
)
from qconvert.runtimes.loading.setting import BLACKWELL

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs sglang's loader: make loaders"),
]

DRAFTED = tuple(name for name in FAMILIES if name != "qwen3_moe")


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", DRAFTED)
def test_draft(family: str, fp8: bool, hopper: Server, folders: Path) -> None:
    """The class of the draft, which reads the layer behind the model's from the same folder."""
    folder = source(folders, family, fp8=fp8)
    first, *_ = agree(folder, hopper, draft=True)
    assert first.whole
    agree(folder, hopper, (Rank(),), flags=NO_FUSION, draft=True)
    if family in SPARSE:
        agree(folder, hopper, (Rank(4, 2),), flags={"ep_size": 2}, draft=True)


@pytest.mark.parametrize("made", QUANTIZED)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", DRAFTED)
def test_draft_quantized(family: str, fp8: bool, made: str, hopper: Server, folders: Path) -> None:
    folder = converted(folders, source(folders, family, fp8=fp8), *QUANTIZED[made])
    agree(folder, hopper, (Rank(), Rank(4, 3)), draft=True)
    agree(folder, hopper, (Rank(),), flags=NO_FUSION, draft=True)


@pytest.mark.parametrize("made", ["", "groups of 32", "nvfp4", "modelopt"])
@pytest.mark.parametrize("family", DRAFTED)
def test_draft_on_blackwell(family: str, made: str, blackwell: Server, folders: Path) -> None:
    folder = source(folders, family)
    if made:
        folder = converted(folders, folder, *QUANTIZED[made])
    agree(folder, blackwell, (Rank(2, 1),), capability=BLACKWELL, draft=True)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe_text"])
def test_draft_with_a_tied_head(family: str, hopper: Server, tmp_path: Path) -> None:
    model = published(family)
    model.config["tie_word_embeddings"] = True
    model.config.get("text_config", {})["tie_word_embeddings"] = True
    agree(model.write(tmp_path / "tied"), hopper, (Rank(2, 1),), draft=True)


@pytest.mark.parametrize("family", STACKED)
def test_draft_of_stacked_experts(family: str, hopper: Server, folders: Path) -> None:
    agree(source(folders, family, stacked=True), hopper, (Rank(2, 1),), draft=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_nvfp4_beside_fp8_on_blackwell(family: str, blackwell: Server, folders: Path) -> None:
    """An entry for each module (MIXED_PRECISION), and another runner than for one form alone."""
    folder = converted(folders, source(folders, family, fp8=True), *QUANTIZED["modelopt"])
    agree(folder, blackwell, (Rank(), Rank(2, 1)), capability=BLACKWELL)
    if family in DRAFTED:
        agree(folder, blackwell, (Rank(),), capability=BLACKWELL, draft=True)


# --- Qwen3-VL: Qwen3-MoE behind a tower, under other names -----------------------------------------


VL = "qwen3_vl_moe"


@pytest.mark.parametrize("form", ["bf16", "fp8", "stacked"])
def test_vision_language(form: str, hopper: Server, folders: Path) -> None:
    """Published with experts in one tensor, each matrix transposed."""
    folder = source(folders, VL, fp8=form == "fp8", stacked=form == "stacked")
    first, *_ = agree(folder, hopper, (*RANKS, *STAGES[:3]))
    assert first.whole
    agree(folder, hopper, (Rank(4, 2),), flags={"ep_size": 2})


@pytest.mark.parametrize("form", ["bf16", "fp8"])
@pytest.mark.parametrize("made", QUANTIZED)
def test_vision_language_quantized(made: str, form: str, hopper: Server, folders: Path) -> None:
    folder = converted(folders, source(folders, VL, fp8=form == "fp8"), *QUANTIZED[made])
    agree(folder, hopper, (Rank(), Rank(2, 1)))


@pytest.mark.parametrize("made", ["", "groups of 32", "modelopt"])
def test_vision_language_on_blackwell(made: str, blackwell: Server, folders: Path) -> None:
    folder = source(folders, VL)
    if made:
        folder = converted(folders, folder, *QUANTIZED[made])
    agree(folder, blackwell, (Rank(2, 1),), capability=BLACKWELL)
