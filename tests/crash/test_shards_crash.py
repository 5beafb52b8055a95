"""Shards that are killed, run twice, or killed while they are published: the bytes stay the same."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import faults
import pytest
from faults import (
    Counting,
    Killing,
    PowerCut,
    PowerFiles,
    Tree,
    convert,
    differing,
    ended,
    in_child,
    started,
    tree,
)

from qconvert.checkpoint.checkpoint import WORK_DIR
from qconvert.run.folder import leases
from qconvert.run.folder.leases import journals_in
from qconvert.run.work.division import Shard
from qconvert.run.work.options import RunOptions

pytestmark = pytest.mark.crash

KILLED = -signal.SIGKILL
COUNT = 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.write_small(tmp_path_factory.mktemp("crash") / "source")


@pytest.fixture(scope="module", params=["sharded", "single"])
def how(request: pytest.FixtureRequest) -> RunOptions:
    return faults.options(str(request.param))


@pytest.fixture(scope="module")
def wanted(source: Path, how: RunOptions, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """What one machine makes."""
    out = tmp_path_factory.mktemp("one") / "out"
    convert(source, out, how)
    return tree(out)


def _of(how: RunOptions, number: int) -> RunOptions:
    return replace(how, shard=Shard(number, COUNT))


def test_two_of_four_killed_and_one_run_twice(
    source: Path, how: RunOptions, wanted: Tree, tmp_path: Path
) -> None:
    chooser = random.Random(5)
    for round_ in range(12):
        out = tmp_path / f"out{round_}"
        files = [None, Killing(chooser.randrange(75)), Killing(chooser.randrange(75)), None, None]
        numbers = [0, 1, 2, 3, 3]
        pids = [
            started(partial(convert, source, out, _of(how, number), disk))
            for number, disk in zip(numbers, files, strict=True)
        ]
        ends = [ended(pid) for pid in pids]
        # The same shard twice at once: the second is refused, or comes after the first.
        assert ends[0] == 0, ends
        assert sorted(ends[3:]) in ([0, 0], [0, 3]), ends
        assert set(ends[1:3]) <= {KILLED, 0}, ends
        pids = [started(partial(convert, source, out, _of(how, n))) for n in (1, 2)]
        again = [ended(pid) for pid in pids]
        assert again == [0, 0]
        assert set(os.listdir(out)) == {WORK_DIR}
        convert(source, out, replace(how, finish=True))
        assert differing(tree(out), wanted) == [], round_


def test_a_shard_killed_at_every_operation(
    source: Path, how: RunOptions, wanted: Tree, tmp_path: Path
) -> None:
    counting = Counting()
    convert(source, tmp_path / "counted", _of(how, 1), counting)
    others = tmp_path / "others"
    for number in (0, 2):
        convert(source, others, _of(how, number))
    for at in faults.moments(len(counting.steps)):
        out = tmp_path / "out"
        shutil.copytree(others, out)
        # Beside others some operations fall away, so that the end may come first.
        ended = in_child(partial(convert, source, out, _of(how, 1), Killing(at)))
        assert ended in (KILLED, 0)
        for number in (1, 3):
            convert(source, out, _of(how, number))
        convert(source, out, replace(how, finish=True))
        assert differing(tree(out), wanted) == [], f"killed at {at}, {counting.steps[at]}"
        shutil.rmtree(out)


def test_finish_killed_at_every_operation(
    source: Path, how: RunOptions, wanted: Tree, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    for number in range(COUNT):
        convert(source, done, _of(how, number))
    counting = Counting()
    shutil.copytree(done, tmp_path / "counted")
    whole = replace(how, finish=True)
    convert(source, tmp_path / "counted", whole, counting)
    for at in faults.moments(len(counting.steps)):
        out = tmp_path / "out"
        shutil.copytree(done, out)
        assert in_child(partial(convert, source, out, whole, Killing(at))) == KILLED
        faults.check_visible(out, wanted)
        convert(source, out, whole)
        assert differing(tree(out), wanted) == [], f"killed at {at}, {counting.steps[at]}"
        shutil.rmtree(out)


def test_the_power_goes_in_a_shard(
    source: Path, how: RunOptions, wanted: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "STALE_SECONDS", 0.01)
    for at in range(0, 120, 3):
        root = tmp_path / f"disk{at}"
        root.mkdir()
        out = root / "out"
        disk = PowerFiles(root, at)
        with monkeypatch.context() as before:  # it boots anew
            before.setattr(leases, "this_process", lambda: leases.Process("a", "a boot", 1, "1"))
            with suppress(PowerCut):
                convert(source, out, _of(how, 1), disk)
        disk.settle(random.Random(at))
        for number in range(COUNT):
            convert(source, out, _of(how, number))
        convert(source, out, replace(how, finish=True))
        assert differing(tree(out), wanted) == [], at
        shutil.rmtree(root)


def test_a_stopped_shard_that_wakes_after_its_successor(
    source: Path, how: RunOptions, wanted: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine, a shard stands still for longer than a lease lasts, and goes on when all is
    done by others: it finds its successor, and does no harm."""
    out, gate = tmp_path / "out", tmp_path / "gate"
    monkeypatch.setattr(leases, "STALE_SECONDS", 0.5)

    class Sleeping(Counting):
        def step(self, what: str) -> None:
            super().step(what)
            while len(self.steps) == 40 and not gate.exists():
                (tmp_path / "asleep").touch()
                time.sleep(0.01)

    def there() -> None:
        leases.this_process = lambda: leases.Process("a", "its boot", 1, "1")
        leases.BEAT_SECONDS = 3600.0  # nothing of it goes on
        convert(source, out, _of(how, 1), Sleeping())

    # The lock of one machine does not hold on two.
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    sleeper = started(there)
    while not (tmp_path / "asleep").exists():
        time.sleep(0.01)
    for number in range(COUNT):
        convert(source, out, _of(how, number))
    assert len(journals_in(out / WORK_DIR)) == COUNT + 1
    convert(source, out, replace(how, finish=True))
    gate.touch()
    assert ended(sleeper) in (1, 3)
    assert differing(tree(out), wanted) == []
