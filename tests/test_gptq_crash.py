"""A calibration killed at any kind of moment goes on at its layer, and the folder is, byte for byte,
what an undisturbed run makes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faults import Counting, Killing, differing, in_child, tree

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Pass, Plan, run_passes
from qconvert.run.executor import execute
from qconvert.run.work.files import Files
from qconvert.run.work.options import RunOptions
from qconvert.samples.request import Calibration

pytestmark = pytest.mark.crash

SAMPLES, LENGTH = 4, 48
# The first four stand for the others, which `QCONVERT_ALL=1 make check` kills too.
_KINDS = [
    "experts corrected", "nvfp4", "dense", "all linears", "experts", "experts by llmcompressor"
]  # fmt: skip
KINDS = _KINDS if os.environ.get("QCONVERT_ALL") else _KINDS[:4]


def make_model(folder: Path, kind: str) -> None:
    """In a process of its own, as all that needs torch here: with its threads one must not fork."""
    import torch
    from calibrate_models import llama, qwen3_moe, samples, saved
    from safetensors.torch import save_file

    tokens = torch.from_numpy(np.stack(samples(SAMPLES, LENGTH)))
    small = {"num_experts": 4, "hidden_size": 64, "moe_intermediate_size": 64}
    config = llama() if kind == "dense" else qwen3_moe(num_hidden_layers=2, **small)
    saved(config, folder / "model")
    (folder / "kind").write_text(kind)
    save_file({"input_ids": tokens}, folder / "tokens.safetensors")


def convert(folder: Path, out: Path, files: Files | None = None) -> None:
    """As the folder says: by which solver, in which format, and whether the unquantized model's states
    are kept too."""
    import torch

    from qconvert.calibrate.backend import backend_for

    torch.set_num_threads(1)
    kind = (folder / "kind").read_text()
    request = Calibration(
        data=str(folder / "tokens.safetensors"), samples=SAMPLES, length=LENGTH, min_tokens=8,
        propagated_error="correct" if kind == "experts corrected" else "ignore",
    )  # fmt: skip
    if kind.endswith("llmcompressor"):
        request = replace(request, solver="llmcompressor", propagated_error="correct")
    targets = ExpertsToW4A16().targets if kind.startswith("experts") else ("Linear",)
    step: Pass = ExpertsToW4A16(group_size=64, targets=targets, calibrate=request)
    if kind == "nvfp4":
        step = ToNvfp4("modelopt", calibrate=request)
    plan = run_passes(Plan.identity(Checkpoint.open(folder / "model")), (step,))
    execute(plan, out, RunOptions(jobs=1), files=files, backend=backend_for([plan]))


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gptq-crash")
    assert in_child(lambda: make_model(made, request.param)) == 0

    def count() -> None:
        counting = Counting()
        convert(made, made / "out", counting)
        (made / "steps.json").write_text(json.dumps(counting.steps))

    assert in_child(count) == 0
    return made


def steps(folder: Path) -> Sequence[str]:
    found: list[str] = json.loads((folder / "steps.json").read_text())
    return found


def moments(folder: Path) -> list[int]:
    """In the first layer; around the step that replaces the state of a layer, before which its results
    and the next layer's states are safe, and after which its own states are removed, those of the
    unquantized model last; at the end."""
    renames = [at for at, what in enumerate(steps(folder)) if what == "rename"]
    # The first is that of the embedded tokens, then one a layer; what follows is publishing.
    begun, first, second = renames[:3]
    return [(begun + first) // 2, first, first + 2, first + 3, second - 4, second + 1]


def test_killed_it_goes_on(folder: Path, tmp_path: Path) -> None:
    """Every other moment of a kind, and those between of the next kind; QCONVERT_ALL=1: every one."""
    wanted = tree(folder / "out")
    every, kind = moments(folder), (folder / "kind").read_text()
    for at in every if os.environ.get("QCONVERT_ALL") else every[KINDS.index(kind) % 2 :: 2]:
        out = tmp_path / "out"
        assert in_child(lambda at=at, out=out: convert(folder, out, Killing(at))) == -signal.SIGKILL  # type: ignore[misc]
        assert not (out / "config.json").exists()
        assert in_child(lambda out=out: convert(folder, out)) == 0  # type: ignore[misc]
        assert differing(tree(out), wanted) == [], f"killed at {at}, {steps(folder)[at]}"
        shutil.rmtree(out)


def test_killed_twice(folder: Path, tmp_path: Path) -> None:
    first, *_, last = moments(folder)
    out = tmp_path / "out"
    assert in_child(lambda: convert(folder, out, Killing(last))) == -signal.SIGKILL
    # What is left takes fewer steps than an undisturbed run has before its first layer ends.
    assert in_child(lambda: convert(folder, out, Killing(first // 2))) == -signal.SIGKILL
    assert in_child(lambda: convert(folder, out)) == 0
    assert differing(tree(out), tree(folder / "out")) == []
