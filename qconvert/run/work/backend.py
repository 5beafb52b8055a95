"""The seam between the executor and whatever computes calibrated weights.

A unit with a `Calibrated` op is not a worker's to run: how a layer's codes come out depends on what goes
through the model up to it. A backend is asked for all such units of a run at once, and streams results
back. They are written at their known places, hashed and journalled like any other unit's. This module is
all that both sides know of each other: a backend may compute here, in another process, or far away.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer
from qconvert.core.profiling import heard
from qconvert.core.shown import count
from qconvert.models.calibrated import Calibrated, calibrated_in
from qconvert.plan.units import Unit
from qconvert.run.work.files import Files
from qconvert.run.work.meters import Meters
from qconvert.run.work.options import Until
from qconvert.run.work.sink import PendingMessages, Sink
from qconvert.run.work.unit_runner import Place, UnitResult
from qconvert.run.work.worker import UnitDone, WorkerSetup, unit_runner


@dataclass(frozen=True, slots=True)
class Requirements:
    """Needs of a backend beside the result, in bytes: `memory` at the very least (0: not known
    beforehand), `disk` of the work folder at the most."""

    memory: int
    disk: int


@dataclass(frozen=True, slots=True)
class CalibratedUnit:
    """A unit for a backend: its number, and the one op that gives all of its results."""

    number: int
    op: Calibrated


@dataclass(frozen=True, slots=True)
class BackendJob:
    """Request to a backend: `units`, which are those that are not in the journal yet.

    `memory` is what it may take, in bytes (None: as it sees fit). `work_dir` is a folder for what it has
    to keep between runs, removed with the rest of the work folder at the end; `files` carries out what
    is done there. `key` names this run: what was kept under another key must not be continued. Where
    `until` would be over within the next step that cannot be stopped, a backend pauses before it.
    `on_work` hears of work that was done, by kind, with the seconds it took."""

    units: tuple[CalibratedUnit, ...]
    memory: int | None
    work_dir: Path
    key: str
    files: Files
    until: Until | None = None
    on_work: Callable[[str, float, float], None] | None = None


@dataclass(frozen=True, slots=True)
class SolvedUnit:
    """Results of a unit, a buffer for each port of its op in order, and the source ranges that were read
    for it: name, start, stop, xxh3. The buffers are read before the next item is asked for."""

    number: int
    results: Sequence[Buffer]
    sources: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Barrier:
    """The next item is asked for only once everything before this one is on disk and in the journal."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Phase of work from now on, for a progress bar."""

    text: str


@dataclass(frozen=True, slots=True)
class Remark:
    """Remark on the result for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class PausedAt:
    """The last item of a job whose time is over: units are left, and the same run goes on with them.
    `done` of `steps` (layers) have been made, by earlier runs too."""

    done: int
    steps: int


Item = SolvedUnit | Barrier | Phase | Remark | PausedAt


class Backend(Protocol):
    """Solves all calibrated units of a run."""

    @property
    def follows(self) -> bool:
        """Return whether the process of another machine leads, which writes the result: a job of this
        one yields none, and no folder is claimed."""

    def at_work(self) -> AbstractContextManager[None]:
        """Around a run: what was begun for it, here or on other machines, is ended."""

    def needs(self) -> Requirements:
        """Return what it takes. Reads and writes nothing."""

    def check(self, folders: Sequence[Path]) -> None:
        """Refuse what is known to go wrong before anything is written: data, devices, folders of its own
        that overlap `folders`, the results'. Writes nothing."""

    def unused(self) -> Sequence[str]:
        """Remarks for a run that has nothing left to solve."""

    def work(self, job: BackendJob) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Return what the job takes, by kind (estimate.py), and what earlier runs have done of it. Reads
        no more than names in the work folder."""

    def get_ready(self, job: BackendJob) -> None:
        """Begin, in the background, what solving this job needs: workers still write other units."""

    def solve(self, job: BackendJob) -> Generator[Item]:
        """Every unit of the job, in any order. Closed early where the run fails; what it is to continue
        from after that lies in the job's `work_dir`."""


def write_solved(
    items: Generator[Item],
    setup: WorkerSetup,
    files: Files,
    units: Mapping[int, Unit],
    places: Mapping[str, Place],
    *,
    wrote: Callable[[int], None],
    phase: Callable[[str], None],
    finished: Callable[[int, UnitResult], None],
    commit: Callable[[], None],
) -> list[str]:
    """Write what a backend solves. `finished` hears of each unit once its bytes are written; `commit`
    makes durable what it heard of. Returns the backend's remarks. Raises PlanError where one of `units`
    was not solved, and the backend did not pause."""
    remarks: list[str] = []
    paused: PausedAt | None = None
    left = set(units)
    work = Meters(setup.metered)
    sink = Sink(files, setup.paths, setup.window, work)
    runner = unit_runner(setup, sink, wrote, work)
    underway: PendingMessages[UnitDone] = PendingMessages(sink)

    def tell(written: Iterable[UnitDone]) -> None:
        for done in written:
            finished(done.number, done.result)

    try:
        with closing(work.taking(items)) as solved:
            for item in solved:
                match item:
                    case SolvedUnit():
                        left.remove(item.number)
                        unit = units[item.number]
                        result = runner.write(unit, places, item.results, item.sources)
                        underway.add(UnitDone(item.number, result))
                        tell(underway.settled())
                    case Barrier():
                        tell(underway.flush())
                        commit()
                    case Phase():
                        phase(item.text)
                    case Remark():
                        remarks.append(item.text)
                    case PausedAt():
                        paused = item
                        remarks.append(
                            f"{item.done} of {count(item.steps, 'layer')} are calibrated"
                        )
                del item  # its buffers must not live on while the next ones are computed
            tell(underway.flush())
        if work.on:
            heard(work.word(), alone=True)
    finally:
        runner.close()
        sink.close()
    for number in sorted(left) if paused is None else ():
        op = calibrated_in(units[number])
        assert op is not None
        raise PlanError(f"{op.what} was not calibrated")
    return remarks
