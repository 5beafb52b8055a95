"""`--until`: a run ends itself between two units, or two layers, and the bytes are those of an
undisturbed one. No test looks at real time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, count, repeat
from pathlib import Path

import faults
import numpy as np
import pytest
import torch
from calibrate_models import qwen3_moe, samples, saved
from checkpoints import run_cli
from faults import Tree, convert, differing, tree
from models import qwen3_moe as moe
from safetensors.torch import save_file

from qconvert import api
from qconvert.calibrate.backend import backend_for
from qconvert.checkpoint.checkpoint import WORK_DIR, Checkpoint
from qconvert.core.errors import UsageError
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Plan, run_passes
from qconvert.run.executor import RunResult, execute
from qconvert.run.work.options import Pace, RunOptions, Until, parse_until
from qconvert.samples.request import Calibration

LAYERS, UNITS = 3, 30
_SIZE = ("--max-shard-size", str(faults.SHARD_BYTES), "--jobs", "1")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.write_small(tmp_path_factory.mktemp("until") / "source")


@pytest.fixture(scope="module")
def one(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    out = tmp_path_factory.mktemp("one") / "out"
    assert run_cli("dequant", source, out, *_SIZE).code == 0
    return tree(out)


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def over(looks: int = 0) -> Until:
    """A time that has passed before a run begins, or after so many looks at the clock."""
    ticking = count(1)
    return Until(looks + 0.5, 0.0, lambda: float(next(ticking)))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the times of commands be over at once."""

    def now() -> None:
        monkeypatch.setattr(
            Until, "of", staticmethod(lambda given: None if given is None else over())
        )

    return now


# --- times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h50m", 13800), ("90m", 5400), ("3:50:00", 13800), ("45s", 45), ("1d2h", 93600),
     ("1-02:00:00", 93600), ("0h5m", 300), ("03:50:07", 13807), ("1h1s", 3601)],
)  # fmt: skip
def test_times_as_people_and_slurm_write_them(text: str, seconds: int) -> None:
    assert parse_until(text) == seconds


@pytest.mark.parametrize("text", ["90", "0s", "", "50:00", "1h2", "5m1h", "-1h", "1:60:00"])
def test_a_time_without_its_unit_is_refused(text: str) -> None:
    """Plain numbers are minutes to some tools and seconds to others."""
    with pytest.raises(UsageError, match="write a time such as 90s"):
        parse_until(text)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_no_seconds_are_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="above 0"):
        Until.of(seconds)


def test_a_step_as_long_as_the_longest_must_fit() -> None:
    clock = Hand()
    pace = Pace(Until(100.0, 1000.0, clock))
    steps = [20.0, 30.0, 10.0, 9.0, 2.0]  # 80, 50, 40, 31 and 29 s are left
    told = []
    for seconds in steps:
        clock.at += seconds
        told.append(pace.another())
    assert told == [True, True, True, True, False]
    assert pace.longest == 30.0
    assert Pace(None).another()


# --- conversions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_conversion_stops_at_a_unit_and_goes_on(jobs: int, source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "one", faults.options("sharded"))
    out = tmp_path / "out"
    how = replace(faults.options("sharded"), jobs=jobs)
    plan = faults.plan_of(source)
    first = execute(plan, out, replace(how, until=over()))
    assert (first.published, first.files) == (False, ())
    assert first.left_units > 0
    assert first.left_bytes > 0
    assert {path.name for path in out.iterdir()} == {WORK_DIR}
    left, runs = first.left_units, 1
    while left:
        again = execute(plan, out, replace(how, until=over()))
        # Each start does one unit at least.
        assert again.left_units < left
        assert again.resumed_units > 0
        left, runs = again.left_units, runs + 1
    assert runs > 2
    assert differing(tree(out), tree(tmp_path / "one")) == []


def test_the_command_says_that_there_is_more_to_do(
    source: Path,
    one: Tree,
    tmp_path: Path,
    short: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context():
        short()
        done = run_cli("dequant", source, out, *_SIZE, "--until", "1h", "--validate", "full")
        assert done.code == 4, done.err
        assert "as --until asks" in done.out
        assert "are left; the same command goes on" in done.out
        told = run_cli("dequant", source, out, *_SIZE, "--until", "1h", "--json")
        assert told.code == 4
        found = json.loads(told.out)
        assert found["published"] is False
        assert found["left_units"] > 0
        monkeypatch.undo()
    assert run_cli("dequant", source, out, *_SIZE, "--until", "1h").code == 0
    assert differing(tree(out), one) == []


def test_a_stopped_shard_is_not_done(
    source: Path,
    one: Tree,
    tmp_path: Path,
    short: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context():
        short()
        words = ("dequant", source, out, *_SIZE, "--until", "2h", "--shard", "0/2")
        assert "stopped shard 0/2" in run_cli(*words).out
        assert [row.state for row in api.status(out)[0].shards] == ["stopped", "not begun"]
        monkeypatch.undo()
    for number in ("0/2", "1/2"):
        assert run_cli("dequant", source, out, *_SIZE, "--shard", number).code == 0
    journals = list((out / WORK_DIR / "shards").glob("0-of-2.*.jsonl"))
    assert journals
    assert all("--until" not in journal.read_text() for journal in journals)
    assert run_cli("finish", out).code == 0
    assert differing(tree(out), one) == []


def test_time_is_no_part_of_a_plan(source: Path) -> None:
    plain, timed = api.plan("copy", source), api.plan("copy", source, until="3h")
    assert plain.folders[0].fingerprint == timed.folders[0].fingerprint


def test_stages_that_were_not_begun_have_no_result(tmp_path: Path) -> None:
    source = moe("bf16").write(tmp_path / "source")
    with pytest.raises(UsageError, match="write a time"):
        api.plan("copy", source, until="soon")
    planned = api.plan_stages("copy", source, tmp_path / "out", "1,1", link=False, until=over())
    assert len(planned.folders) == 2
    (result,) = api.carry_out(planned)
    assert result.left_units > 0
    done = api.carry_out(api.plan_stages("copy", source, tmp_path / "out", "1,1", link=False))
    assert [each.published for each in done] == [True, True]


# --- calibrations ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated")
    saved(qwen3_moe(num_hidden_layers=LAYERS, num_experts=4), folder / "model")
    tokens = torch.from_numpy(np.stack(samples(3, 32)))
    save_file({"input_ids": tokens}, folder / "tokens.safetensors")
    return folder


def calibrated(
    folder: Path, out: Path, how: RunOptions, save_stats: str | None = None
) -> RunResult:
    torch.set_num_threads(1)
    request = Calibration(
        data=str(folder / "tokens.safetensors"),
        samples=3,
        length=32,
        min_tokens=8,
        save_stats=save_stats,
    )
    step = ExpertsToW4A16(group_size=64, calibrate=request)
    plan = run_passes(Plan.identity(Checkpoint.open(folder / "model")), (step,))
    return execute(plan, out, how, backend=backend_for([plan]))


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> Tree:
    calibrated(model, model / "out", RunOptions(jobs=1))
    return tree(model / "out")


def test_a_calibration_stops_at_a_layer_and_goes_on(
    model: Path, undisturbed: Tree, tmp_path: Path
) -> None:
    """First what is not calibrated, most of it in one start, then a unit and at last a layer each time
    though its time is over: every start gets on."""
    out, said = tmp_path / "out", []
    stats = str(tmp_path / "stats")
    looks = chain([UNITS - 3], repeat(0))
    while True:
        result = calibrated(
            model, out, RunOptions(jobs=1, until=over(next(looks))), save_stats=stats
        )
        if not result.left_units:
            break
        assert not result.published
        assert "map of hot experts" not in " ".join(result.remarks)
        said += [remark for remark in result.remarks if "calibrated" in remark and " of " in remark]
    assert [text for text in said if text.endswith("layers are calibrated")] == [
        f"{number} of {LAYERS} layers are calibrated" for number in range(1, LAYERS)
    ]
    assert differing(tree(out), undisturbed) == []
    assert len(list(Path(stats).glob("*.safetensors"))) == LAYERS


def test_time_enough_is_no_reason_to_stop(model: Path, undisturbed: Tree, tmp_path: Path) -> None:
    until = Until(100.0, 1000.0, Hand())
    result = calibrated(model, tmp_path / "out", RunOptions(jobs=1, until=until))
    assert (result.left_units, result.published) == (0, True)
    assert differing(tree(tmp_path / "out"), undisturbed) == []
