"""Killed at any moment, a run that goes to the Hub while it is made goes on, and sends nothing twice
that was kept there; nobody sees a part of its result."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tree, wide_moe
from faults import Stepping, in_child
from hub_client import hub_and_client
from loopback_hub import LoopbackHub

from qconvert import api
from qconvert.hub.upload_target import UNFINISHED, HubUploadTarget
from qconvert.run.executor import run_together
from qconvert.run.work.files import Files

pytestmark = [
    pytest.mark.crash,
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # of the client
]

REPO = "me/model-bf16"
OUT = f"hf://{REPO}"
SHARD = 3_000
KILLED = -signal.SIGKILL
_MOMENTS = 12


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_moe(8192).write(tmp_path_factory.mktemp("crash") / "source")


@pytest.fixture(scope="module")
def wanted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("near") / "out"
    api.run("dequant-fp8", source, folder, jobs=1, max_shard_size=SHARD)
    return tree(folder)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    with hub_and_client(tmp_path / "home") as (server, _):
        yield server


@dataclass
class Moments:
    """What a run does one after another: files written to, and requests begun and answered. At the one
    of number `at` the process is killed."""

    at: int | None = None
    seen: list[str] = field(default_factory=list)

    def now(self, what: str) -> None:
        if len(self.seen) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen.append(what)


class Watched(Stepping):
    def __init__(self, moments: Moments) -> None:
        super().__init__()
        self._moments = moments

    def step(self, what: str) -> None:
        self._moments.now(what)


class WatchedOutlet(HubUploadTarget):
    moments: Moments

    def _ask(self, call: Callable[[], Any], what: str) -> Any:
        self.moments.now(f"before {what}")
        found = super()._ask(call, what)
        self.moments.now(f"after {what}")
        return found


def run(source: Path, work: Path, moments: Moments | None) -> None:
    """A run with a budget for no more than is needed."""
    options: dict[str, Any] = {"jobs": 1, "max_shard_size": SHARD, "work_dir": work}
    room = api.plan("dequant-fp8", source, OUT, **options).folders[0].ready.room
    assert room is not None
    (folder,) = api.plan("dequant-fp8", source, OUT, disk_budget=room.least, **options).folders
    outlet, files = folder.output.outlet(folder.ready), Files()
    assert outlet is not None
    assert folder.out is not None
    if outlet.look() == "finished":  # as service/planned.py does
        outlet.tidy()
        return
    if moments is not None:
        outlet.__class__ = WatchedOutlet
        assert isinstance(outlet, WatchedOutlet)
        outlet.moments, files = moments, Watched(moments)
    run_together([(folder.ready, folder.out)], files=files, outlets=[outlet])


def weights_sent(hub: LoopbackHub, wanted: dict[str, Any]) -> dict[str, int]:
    """How often each shard's bytes arrived at the Hub."""
    oids = {n: sha256(data).hexdigest() for n, data in wanted.items() if n.endswith(".safetensors")}
    return {
        name: sum(asked.status == 200 for asked in hub.asked("PUT", oid))
        for name, oid in oids.items()
    }


def check_shown(hub: LoopbackHub, wanted: dict[str, Any]) -> bool:
    """Whether the result is there: all of it or nothing."""
    if REPO not in hub.repos:
        return False
    files = {n: b.data for n, b in hub.repos[REPO].tree().items() if n != ".gitattributes"}
    assert files in ({}, wanted)
    return bool(files)


def test_killed_at_moments(
    hub: LoopbackHub, source: Path, wanted: dict[str, Any], tmp_path: Path
) -> None:
    moments = Moments()
    run(source, tmp_path / "counted", moments)
    assert check_shown(hub, wanted)
    assert sum(what.startswith("before sending") for what in moments.seen) == 4
    count = len(moments.seen)
    numbers = range(count)
    if not os.environ.get("QCONVERT_ALL"):
        numbers = sorted(random.Random(5).sample(range(count), _MOMENTS))  # type: ignore[assignment]
    killed = 0
    for at in numbers:
        hub.repos.clear()
        hub.objects.clear()
        work = tmp_path / f"killed{at}"
        code = in_child(lambda n=at, w=work: run(source, w, Moments(n)))  # type: ignore[misc]
        assert code in (0, KILLED)  # batches of threads differ: a run may have fewer moments
        killed += code == KILLED
        check_shown(hub, wanted)
        kept = {
            name
            for repo in hub.repos.values()
            for ref, commit in repo.refs.items()
            if ref.startswith(UNFINISHED)
            for name in repo.commits[commit]
        }
        hub.log.clear()
        run(source, work, None)
        assert check_shown(hub, wanted), f"killed at {at}"
        assert list(hub.repos[REPO].refs) == ["main"], f"killed at {at}"
        again = {name for name, times in weights_sent(hub, wanted).items() if times}
        assert not again & kept, f"killed at {at}: what was kept there was sent again"
        hub.log.clear()
        run(source, work, None)
        assert {asked.method for asked in hub.log} == {"GET"}
    assert killed >= 0.8 * len(numbers)


def test_killed_again_and_again(
    hub: LoopbackHub, source: Path, wanted: dict[str, Any], tmp_path: Path
) -> None:
    chooser = random.Random(3)
    for _ in range(4):
        hub.repos.clear()
        hub.objects.clear()
        hub.log.clear()
        work = tmp_path / str(chooser.random())
        for _ in range(4):
            at = chooser.randrange(20, 120)
            assert in_child(lambda n=at, w=work: run(source, w, Moments(n))) in (0, KILLED)  # type: ignore[misc]
            check_shown(hub, wanted)
        run(source, work, None)
        assert check_shown(hub, wanted)
        # One whose last bytes were on their way when its run was killed may be sent twice.
        assert max(weights_sent(hub, wanted).values()) <= 2
