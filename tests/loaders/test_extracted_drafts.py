"""What `mtp extract` makes in sglang's own draft classes: every parameter is written, but those that the
class takes from its model, and as the draft in the model's folder writes it. Skips itself without the
loader's environment (`make loaders`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import run_cli

from loaders.client import PYTHON, Loaded, Rank, Server
from loaders.published import published
from loaders.test_simulator_sglang import QUANTIZED
from loaders.test_simulator_sglang_drafts import DRAFTED

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs sglang's loader: make loaders"),
]


# What a draft's class takes from its model.
BORROWED = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


def made(*words: str | Path) -> Path:
    done = run_cli(*words, "--jobs", "1")
    assert done.code == 0, done.err
    return Path(words[-1])


def alike(draft: Loaded, inside: Loaded) -> None:
    """Whether two loads wrote the same, but what the class takes from its model."""
    assert draft.error is None, draft.error
    # Kernels of packed experts have parameters that no checkpoint fills, in the model's folder neither.
    left = set(draft.unwritten) - BORROWED
    assert left == set(inside.unwritten) - BORROWED
    assert draft.quantization not in (None, "fp8") or not left
    if draft.quantization == inside.quantization:  # a plain draft's folder states none
        assert draft.schemes == inside.schemes
    assert draft.architecture == inside.architecture
    own = draft.parameters.keys() - BORROWED
    assert own == inside.parameters.keys() - BORROWED
    for name in own:
        assert draft.parameters[name] == inside.parameters[name], name


@pytest.mark.parametrize("form", ["bf16", "fp8", "groups of 32", "modelopt"])
@pytest.mark.parametrize("family", DRAFTED)
def test_extracted(family: str, form: str, hopper: Server, tmp_path: Path) -> None:
    folder = published(family, fp8=form == "fp8").write(tmp_path / "source")
    if form in QUANTIZED:
        command, *options = QUANTIZED[form]
        done = run_cli(command, *options, folder, tmp_path / "made", "--jobs", "1")
        if done.code:
            pytest.skip(done.err[-300:])
        folder = tmp_path / "made"
    draft = made("mtp", "extract", folder, tmp_path / "draft")
    for rank in (Rank(), Rank(2, 1)):
        inside = hopper.load(folder, rank, draft=True)
        if inside.error is not None:  # then neither is its draft taken, for the same reason
            assert hopper.load(draft, rank, draft=True).error is not None
            continue
        alike(hopper.load(draft, rank, draft=True), inside)


@pytest.mark.parametrize("form", ["groups of 32", "modelopt", "nvfp4 linears"])
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_5_moe"])
def test_grafted_in_bf16(family: str, form: str, hopper: Server, tmp_path: Path) -> None:
    """A plain draft beside quantized weights, which the config's list names."""
    source = published(family).write(tmp_path / "source")
    bare = made("mtp", "drop", source, tmp_path / "bare")
    command, *options = QUANTIZED[form]
    packed = made(command, *options, bare, tmp_path / "packed")
    back = made("mtp", "graft", packed, source, tmp_path / "back")
    model, draft = hopper.load(back, Rank()), hopper.load(back, Rank(), draft=True)
    whole = hopper.load(packed, Rank())
    assert (model.error, model.unwritten) == (whole.error, whole.unwritten)
    assert model.parameters == whole.parameters
    assert draft.error is None, draft.error
    assert set(draft.unwritten) <= BORROWED, draft.unwritten
    plain = hopper.load(source, Rank(), draft=True)
    own = {name: value for name, value in draft.parameters.items() if name not in BORROWED}
    assert own == {name: value for name, value in plain.parameters.items() if name not in BORROWED}
