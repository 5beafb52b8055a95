"""Calibrations that several processes share: each solves its part of every layer's experts, those of a
lost one are solved by others, and the folder is one process's, byte for byte."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import run_cli
from faults import Killing, Tree, differing, ended, in_child, started, tree

from qconvert import api
from qconvert.checkpoint.checkpoint import WORK_DIR, Checkpoint
from qconvert.core.errors import OutputError
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Plan, run_passes
from qconvert.run import leases
from qconvert.run.division import Shard
from qconvert.run.exchange import solved_in
from qconvert.run.executor import RunResult, execute
from qconvert.run.files import Files
from qconvert.run.leases import journals_in
from qconvert.run.prepare import Options
from qconvert.run.until import Until
from qconvert.samples.request import Calibration

SAMPLES, LENGTH, EXPERTS, LAYERS = 3, 48, 5, 3


def make_model(folder: Path) -> None:
    import torch
    from calibrate_models import qwen3_moe, samples, saved
    from safetensors.torch import save_file

    config = qwen3_moe(num_hidden_layers=LAYERS, num_experts=EXPERTS)
    saved(config, folder / "model")
    tokens = torch.from_numpy(np.stack(samples(SAMPLES, LENGTH)))
    save_file({"input_ids": tokens}, folder / "tokens.safetensors")


def planned(folder: Path, correct: Any = "correct", save_stats: str | None = None) -> Plan:
    request = Calibration(
        data=str(folder / "tokens.safetensors"), samples=SAMPLES, length=LENGTH, min_tokens=12,
        propagated_error=correct, save_stats=save_stats,
    )  # fmt: skip
    step = ExpertsToW4A16(group_size=64, calibrate=request)
    return run_passes(Plan.identity(Checkpoint.open(folder / "model")), (step,))


def convert(
    folder: Path, out: Path, how: Options, files: Files | None = None, **more: Any
) -> RunResult:
    """How much waiting there is depends on who is there: a second is enough for a test."""
    import torch

    from qconvert.calibrate.backend import backend_for

    torch.set_num_threads(1)
    plan = planned(folder, **more)
    return execute(plan, out, how, files=files, backend=backend_for([plan]))


def shard(number: int, of: int = 2, **more: Any) -> Options:
    return Options(jobs=1, shard=Shard(number, of), **more)


WHOLE = Options(jobs=1)


# With both streams there is more to go wrong; `QCONVERT_ALL=1` divides calibrations of one, too.
_STREAMS = ["correct", "ignore"] if os.environ.get("QCONVERT_ALL") else ["correct"]


@pytest.fixture(scope="module", params=_STREAMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shards-gptq")
    assert in_child(lambda: make_model(made)) == 0
    (made / "correct").write_text(request.param)

    def one() -> None:
        convert(made, made / "one", WHOLE, correct=request.param)

    assert in_child(one) == 0
    return made


def work(folder: Path, out: Path, how: Options, files: Files | None = None) -> Callable[[], None]:
    def run() -> None:
        leases.STALE_SECONDS = 1.0
        convert(folder, out, how, files, correct=(folder / "correct").read_text())

    return run


def ends(pids: list[int]) -> list[int]:
    return [ended(pid) for pid in pids]


def wanted(folder: Path) -> Tree:
    return tree(folder / "one")


def noted(out: Path) -> dict[int, set[str]]:
    """What each shard put, as its journals say."""
    found: dict[int, set[str]] = {}
    for journal in journals_in(out / WORK_DIR):
        found.setdefault(journal.shard.index, set()).update(journal.remembered.solved)
    return found


def test_two_processes_make_what_one_makes(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert ends([started(work(folder, out, shard(n))) for n in (0, 1)]) == [0, 0]
    put = noted(out)
    assert sum(map(len, put.values())) == EXPERTS * LAYERS == solved_in(out / WORK_DIR)
    assert all(put.values()), "both have solved"
    (status,) = api.status(out)
    assert status.complete
    assert (status.experts, status.experts_done) == (EXPERTS * LAYERS, EXPERTS * LAYERS)
    assert sorted(row.experts_done for row in status.shards) == sorted(map(len, put.values()))
    assert not (out / "config.json").exists()
    assert in_child(work(folder, out, replace(WHOLE, finish=True))) == 0
    assert differing(tree(out), wanted(folder)) == []


def test_a_shard_alone_does_what_the_others_do_not(folder: Path, tmp_path: Path) -> None:
    """The other has not begun: its experts are solved here after a while. It then has little to do."""
    out = tmp_path / "out"
    assert in_child(work(folder, out, shard(1))) == 0
    assert len(noted(out)[1]) == EXPERTS * LAYERS
    done = run_cli("finish", out)
    assert done.code == 1  # what is not calibrated
    assert in_child(work(folder, out, shard(0))) == 0
    assert not noted(out)[0]
    assert in_child(work(folder, out, replace(WHOLE, finish=True))) == 0
    assert differing(tree(out), wanted(folder)) == []


def test_the_run_without_shards_does_the_rest(folder: Path, tmp_path: Path) -> None:
    """From the first layer on, with what was solved before."""
    out = tmp_path / "out"
    ticking = count(1)
    until = Until(0.5, 0.0, lambda: float(next(ticking)))

    def first() -> None:
        leases.STALE_SECONDS = 1.0
        correct = (folder / "correct").read_text()
        for _ in range(99):
            made = convert(folder, out, shard(0, until=until), correct=correct)
            assert (made.published, made.left_units > 0) == (False, True)
            if solved_in(out / WORK_DIR):
                return

    assert in_child(first) == 0
    assert 0 < solved_in(out / WORK_DIR) < EXPERTS * LAYERS
    assert api.status(out)[0].shards[0].state == "stopped"

    def early() -> None:
        with pytest.raises(OutputError, match=r"not all is done"):
            convert(
                folder, out, replace(WHOLE, finish=True), correct=(folder / "correct").read_text()
            )

    assert in_child(early) == 0
    assert in_child(work(folder, out, WHOLE)) == 0
    assert differing(tree(out), wanted(folder)) == []


@pytest.mark.crash
@pytest.mark.parametrize("at", [30, 60, 90, 120, 150])
def test_one_of_two_killed(at: int, folder: Path, tmp_path: Path) -> None:
    """The other solves its experts; started again it goes on with its own hidden states."""
    out = tmp_path / "out"
    pids = [started(work(folder, out, shard(n), Killing(at) if n else None)) for n in (0, 1)]
    assert ends(pids) == [0, -signal.SIGKILL]
    assert solved_in(out / WORK_DIR) == EXPERTS * LAYERS
    assert in_child(work(folder, out, shard(1))) == 0
    assert in_child(work(folder, out, replace(WHOLE, finish=True))) == 0
    assert differing(tree(out), wanted(folder)) == []


@pytest.mark.crash
def test_both_killed_and_finished_by_another_number_of_shards(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pids = [started(work(folder, out, shard(n), Killing(70 + 30 * n))) for n in (0, 1)]
    assert ends(pids) == [-signal.SIGKILL] * 2
    assert ends([started(work(folder, out, shard(n, 3))) for n in range(3)]) == [0, 0, 0]
    assert in_child(work(folder, out, replace(WHOLE, finish=True))) == 0
    assert differing(tree(out), wanted(folder)) == []
