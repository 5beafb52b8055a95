"""Progress by planned work, and the time left: arithmetic with a clock that is moved by hand."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calibrate_models import qwen3_moe, samples, saved
from checkpoints import fp8_moe, run_cli
from safetensors.torch import save_file

from qconvert import api
from qconvert.calibrate.engine import calibrate
from qconvert.calibrate.progress import Clock, Work, added, layer_work, sizes_of
from qconvert.calibrate.settings import Settings
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.cli.progress import Bar, spell
from qconvert.core.int_scheme import IntScheme
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Plan
from qconvert.run.work.estimate import COSTS, FORWARD, HESSIAN, READ, SOLVE, WRITE, Estimate
from qconvert.run.work.events import NoEvents, ProgressEvents
from qconvert.samples.request import Calibration

SAMPLES, LENGTH = 3, 32


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = 50.0

    def __call__(self) -> float:
        return self.at


class Run:
    """A run that is told: work of a kind at a speed, and seconds that nobody counts."""

    def __init__(self) -> None:
        self.clock = Hand()
        self.estimate = Estimate(self.clock)

    def work(self, kind: str, amount: float, seconds: float) -> None:
        self.clock.at += seconds
        self.estimate.did(kind, amount, seconds)


# --- the estimate ---------------------------------------------------------------------------------


def test_nothing_is_known_before_anything_was_done() -> None:
    estimate = Estimate(Hand())
    assert (estimate.left(), estimate.part()) == (None, 0.0)
    estimate.plan({SOLVE: 100.0}, {})
    assert (estimate.left(), estimate.part()) == (None, 0.0)


def test_each_kind_goes_on_at_its_own_speed() -> None:
    run = Run()
    run.estimate.plan({READ: 100.0, SOLVE: 1000.0}, {})
    run.work(READ, 50.0, 5.0)  # 0.1 s each
    run.work(SOLVE, 100.0, 20.0)  # 0.2 s each
    assert run.estimate.left() == pytest.approx(50 * 0.1 + 900 * 0.2)
    assert run.estimate.part() == pytest.approx(25 / (25 + 185))
    run.clock.at += 30.0  # while nothing is told, time passes
    assert run.estimate.left() == pytest.approx(155.0)
    run.clock.at += 1000.0
    assert run.estimate.left() == 0.0


@pytest.mark.parametrize(
    ("planned", "work", "left"),
    [
        # What was not measured is as much slower as what was.
        ({READ: 10.0, SOLVE: 10.0}, [(READ, 10.0, 30 * COSTS[READ])], 30 * COSTS[SOLVE]),
        # Half of the time goes to what no kind counts: the rest takes twice its seconds, too.
        ({SOLVE: 10.0}, [*[(SOLVE, 1.0, 10.0), (None, 0.0, 10.0)] * 4, (SOLVE, 1.0, 10.0)],
         5 * 10 * (90 / 50)),
        # What passes before the first work is no part of the rest: 20 s of imports between writing and
        # the first layer made 150 s of 38.
        ({WRITE: 10.0, SOLVE: 10.0}, [(WRITE, 5.0, 1.0), (None, 0.0, 20.0), (SOLVE, 2.0, 10.0)],
         5 * 0.2 + 8 * 5.0),
    ],
)  # fmt: skip
def test_what_is_left(
    planned: dict[str, float], work: list[tuple[str | None, float, float]], left: float
) -> None:
    run = Run()
    run.estimate.plan(planned, {})
    for kind, amount, seconds in work:
        if kind is None:
            run.clock.at += seconds
        else:
            run.work(kind, amount, seconds)
    assert run.estimate.left() == pytest.approx(left)


def test_a_slow_disk_makes_no_slow_processor() -> None:
    run = Run()
    run.estimate.plan({WRITE: 10.0, FORWARD: 1e9, SOLVE: 1e9}, {})
    run.work(WRITE, 10.0, 10 * COSTS[WRITE] * 1000)
    assert run.estimate.left() == pytest.approx(1e9 * (COSTS[FORWARD] + COSTS[SOLVE]))
    run.work(FORWARD, 5e8, 5e8 * COSTS[FORWARD] * 3)
    assert run.estimate.left() == pytest.approx(3 * (5e8 * COSTS[FORWARD] + 1e9 * COSTS[SOLVE]))


def test_devices_at_work_together_count_once() -> None:
    run = Run()
    run.estimate.plan({SOLVE: 8.0}, {})
    for _ in range(2):
        run.clock.at += 10.0
        run.estimate.did(SOLVE, 1.0, 10.0)
        run.estimate.did(SOLVE, 1.0, 10.0)
    assert run.estimate.left() == pytest.approx(20.0)


def test_what_earlier_runs_did_is_part_of_the_whole_and_of_no_speed() -> None:
    run = Run()
    run.estimate.plan({SOLVE: 50.0}, {SOLVE: 50.0})
    assert run.estimate.part() == 0.5
    run.work(SOLVE, 25.0, 100.0)
    assert run.estimate.part() == 0.75
    assert run.estimate.left() == pytest.approx(100.0)


def layer(run: Run, work: Mapping[str, float], speed: Mapping[str, float]) -> None:
    for kind, amount in work.items():
        for _ in range(10):
            run.work(kind, amount / 10, amount / 10 * speed[kind])


def test_it_holds_from_the_first_layer_on() -> None:
    """What was "80 %, 4 s left" in the first of four layers of 461 s: bytes first, then layers of 115 s.
    The estimate is within 15 % of what is left from the end of the first layer on, though the speeds are
    none of those that were expected, and within half of it in the middle of the first."""
    sizes = sizes_of(Plan.identity(Checkpoint.open(_MODEL)), {})
    works = [layer_work(one, SAMPLES * LENGTH, 1, Settings()) for one in sizes]
    run = Run()
    speed = {READ: 1e-7, FORWARD: 2e-9, HESSIAN: 1e-9, SOLVE: 4e-8, WRITE: 1e-8}
    each = [sum(amount * speed[kind] for kind, amount in work.items()) for work in works]
    run.estimate.plan({WRITE: 1e6, **added(works)}, {})
    run.work(WRITE, 1e6, 1e6 * speed[WRITE])
    assert run.estimate.part() < 0.2
    for number, work in enumerate(works[:-1]):
        layer(run, work, speed)
        left, true = run.estimate.left(), sum(each[number + 1 :])
        assert left is not None
        assert left == pytest.approx(true, rel=0.15)
        assert run.estimate.part() == pytest.approx(1 - true / (sum(each) + 0.01), abs=0.05)
    layer(run, works[-1], speed)
    assert run.estimate.left() == pytest.approx(0.0, abs=1e-6)
    assert run.estimate.part() == pytest.approx(1.0)


# --- what calibrations tell -----------------------------------------------------------------------

_MODEL = Path()


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    global _MODEL
    folder = tmp_path_factory.mktemp("progress")
    _MODEL = folder / "model"
    saved(qwen3_moe(num_hidden_layers=3, num_experts=4), _MODEL)
    tokens = torch.from_numpy(np.stack(samples(SAMPLES, LENGTH)))
    save_file({"input_ids": tokens}, folder / "tokens.safetensors")
    return folder


class Heard(NoEvents):
    """What a run told, by kind."""

    def __init__(self) -> None:
        self.work: dict[str, float] = {}
        self.did_work: dict[str, float] = {}

    def planned(self, work: Mapping[str, float], before: Mapping[str, float]) -> None:
        assert not self.work
        self.work = dict(work)
        self.before = dict(before)

    def did(self, kind: str, amount: float, seconds: float) -> None:
        assert seconds >= 0
        self.did_work[kind] = self.did_work.get(kind, 0.0) + amount


def request(folder: Path, **more: Any) -> ExpertsToW4A16:
    data = str(folder / "tokens.safetensors")
    asked = Calibration(data=data, samples=SAMPLES, length=LENGTH, min_tokens=1)
    return ExpertsToW4A16(group_size=64, calibrate=asked, **more)


def test_what_is_told_comes_to_what_was_planned(model: Path, tmp_path: Path) -> None:
    """Of all linear layers; of experts alone, test_commands_write_it."""
    told = Heard()
    assert isinstance(told, ProgressEvents)
    api.run(request(model, targets=("Linear",)), _MODEL, tmp_path / "out", jobs=1, events=told)
    del told.work[WRITE]
    assert set(told.work) == {READ, FORWARD, HESSIAN, SOLVE}
    assert told.did_work == pytest.approx(told.work)
    assert not told.before


@pytest.mark.parametrize("correct", ["ignore", "correct"])
def test_plans_of_work_are_near_what_layers_tell(correct: Any, tmp_path: Path) -> None:
    """Before the ends of layers make them equal: operations of shapes against those that were run."""
    settings = Settings(propagated_error=correct, min_tokens=1)
    clock = Clock()
    source = Plan.identity(Checkpoint.open(_MODEL))
    tokens = samples(SAMPLES, LENGTH)
    for _ in calibrate(
        source, tokens, [IntScheme(group=64)], settings, work_dir=tmp_path, memory=None, key="",
        clock=clock,
    ):  # fmt: skip
        pass
    planned = added(
        [layer_work(one, SAMPLES * LENGTH, 1, settings) for one in sizes_of(source, {})]
    )
    for kind in (READ, FORWARD, HESSIAN, SOLVE):
        assert clock.work[kind] == pytest.approx(planned[kind], rel=0.35), kind
    assert clock.work[SOLVE] == planned[SOLVE]
    assert set(clock.seconds) == {READ, FORWARD, HESSIAN, SOLVE}


def test_a_layer_that_told_another_amount_is_made_what_was_planned() -> None:
    told: list[tuple[str, float, float]] = []
    hand = Hand()
    clock = Clock(lambda *each: told.append(each), hand)
    with clock(SOLVE, "cpu") as tick:
        hand.at += 2.0
        tick(3.0)
        hand.at += 1.0
    assert told == [(SOLVE, 3.0, 2.0), (SOLVE, 0.0, 1.0)]
    work: Work = {SOLVE: 10.0, READ: 4.0}
    clock.layer_done(work, {})
    assert told[2:] == [(SOLVE, 7.0, 0.0), (READ, 4.0, 0.0)]
    before = dict(clock.work)
    with clock(READ, "cpu") as tick:
        tick(6.0)
    clock.layer_done({READ: 4.0}, before)
    assert clock.work[READ] == 8.0
    assert clock.seconds == {SOLVE: 3.0, READ: 0.0}


def test_a_profile_has_the_seconds_of_a_calibration(model: Path, tmp_path: Path) -> None:
    made = api.run(request(model), _MODEL, tmp_path / "out", jobs=1, profile=True)
    assert made.profile is not None
    rows = {row.step: row for row in made.profile.main}
    phases = {f"calibrate: {kind}" for kind in (READ, FORWARD, HESSIAN, SOLVE)}
    assert phases <= set(rows)
    assert all(rows[name].seconds > 0 for name in phases)


# --- what is shown --------------------------------------------------------------------------------


def test_a_line_a_minute_where_stderr_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hand = Hand()
    with Bar(now=hand) as bar:
        bar.start(1000, 0)
        bar.phase("writing")
        for _ in range(10):
            hand.at += 25.0
            bar.wrote(50)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "progress  15 %, 7 min left, writing",
        "progress  30 %, 6 min left, writing",
        "progress  45 %, 5 min left, writing",
    ]


def test_a_calibration_shows_its_work_and_not_its_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hand = Hand()
    with Bar(now=hand) as bar:
        bar.start(1000, 0)
        bar.planned({WRITE: 800.0, SOLVE: 100.0}, {})
        hand.at += 20.0
        bar.wrote(800)
        bar.phase("calibrating layer 0 of 4")
        hand.at += 50.0
        bar.did(SOLVE, 25.0, 50.0)
        bar.wrote(50)
    (line,) = capsys.readouterr().err.splitlines()
    # 80 % of the bytes; 70 of 220 s.
    assert line == "progress  32 %, 2 min left, calibrating layer 0 of 4"


def test_a_terminal_has_a_bar_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    hand = Hand()
    with Bar(now=hand) as bar:
        bar.start(1000, 0)
        bar.planned({SOLVE: 100.0}, {})
        hand.at += 100.0
        bar.did(SOLVE, 25.0, 100.0)
        assert (bar._bar.n, bar._bar.total) == (250, 1000)
    assert "5 min left" in screen.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "unknown"), (0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5000, "83 min"),
     (11100, "3 h 05 min")],
)  # fmt: skip
def test_times_as_they_are_read(seconds: float | None, text: str) -> None:
    assert spell(seconds) == text


_KEYS = {
    "event", "time", "seconds", "phase", "bytes", "bytes_total", "part", "left_seconds", "work",
}  # fmt: skip


def test_lines_of_json(tmp_path: Path) -> None:
    file, hand = tmp_path / "log.jsonl", Hand()
    file.write_text('{"event": "of before"}\n')
    with Bar(log=str(file), now=hand) as bar:
        bar.start(1000, 100)
        bar.planned({SOLVE: 100.0}, {SOLVE: 100.0})
        for _ in range(4):
            hand.at += 5.0
            bar.did(SOLVE, 5.0, 5.0)
        bar.phase("calibrating ::error:: ##[x]\n layer")
    before, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert before == {"event": "of before"}
    assert [line["event"] for line in lines] == ["start", "progress", "progress", "phase", "end"]
    assert all(line.keys() == _KEYS for line in lines[:-1])
    assert lines[-1].keys() == {*_KEYS, "ok"}
    first, second = lines[1:3]
    assert (first["seconds"], second["seconds"]) == (10.0, 20.0)
    assert (first["part"], first["left_seconds"]) == (0.55, 90.0)
    assert second["work"] == {SOLVE: {"done": 20.0, "planned": 100.0, "seconds": 20.0}}
    assert lines[0]["left_seconds"] is None
    assert (lines[0]["bytes"], lines[0]["bytes_total"]) == (100, 1000)
    assert "##[" not in file.read_text()


def test_commands_write_it(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    data = ("--gptq", "--data", model / "tokens.safetensors", "--samples", "2", "--length", "16")
    done = run_cli(
        "w4a16", _MODEL, tmp_path / "out", "--group-size", "64", *data, "--device", "cpu",
        "--jobs", "1", "--log-json", log,
    )  # fmt: skip
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[-1]["event"] == "end"
    assert (lines[-1]["ok"], lines[-1]["part"]) == (True, 1.0)
    assert set(lines[-1]["work"]) == {WRITE, READ, FORWARD, HESSIAN, SOLVE}
    said = run_cli("dequant", fp8_moe().write(tmp_path / "b"), tmp_path / "c", "--log-json", "-")
    found = [json.loads(line) for line in said.err.splitlines() if line.startswith("{")]
    assert [found[0]["event"], found[-1]["event"]] == ["start", "end"]
    assert found[-1]["work"] == {}
    gone = run_cli("dequant", tmp_path / "b", tmp_path / "d", "--log-json", tmp_path / "no" / "l")
    assert (gone.code, "cannot be written" in gone.err) == (1, True)
    assert not (tmp_path / "d").exists()
