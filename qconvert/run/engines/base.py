"""Engines, which run the units of a conversion, as one small protocol: workers of this machine
(run/engines/local.py), the same as one shard of several machines (run/engines/shard.py), a Ray cluster
(run/engines/ray.py).

An engine says how folders are claimed, which journal a run has and which units are its own, and it
runs batches of units. The rest is the executor's, once: the look at the source, the journal's lines,
publishing. A journal does not tell whole runs apart: what one engine has begun another finishes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from qconvert.run.folder.resume import RunProgress
from qconvert.run.folder.target import Target
from qconvert.run.folder.workspace import Workspace
from qconvert.run.work.events import Events
from qconvert.run.work.files import Files
from qconvert.run.work.worker import Batch, WorkerEvent, WorkerSetup

if TYPE_CHECKING:
    from qconvert.run.work.backend import Backend


@dataclass(frozen=True)
class ClaimedRun:
    """Folders with their journals, and how far the run has come; `resumed` of its units were done
    before."""

    targets: Sequence[Target]
    progress: RunProgress
    resumed: int


@dataclass(frozen=True)
class UnitBatches:
    """Units that are left, in batches that begin in one file each. `targets` are the run's folders,
    `progress` has the records of finished units; `commit` makes durable what was told of so far."""

    targets: Sequence[Target]
    setup: WorkerSetup
    batches: Iterable[Batch]
    files: Files
    events: Events
    progress: RunProgress
    commit: Callable[[], None]


class Engine(Protocol):
    """Place where the units of a run are done."""

    @property
    def space(self) -> type[Workspace]:
        """Return what claims an output folder: for one run alone, or beside others."""

    @property
    def publishes(self) -> bool:
        """Return whether a run does all units, and its folders are published then."""

    def begin(
        self, targets: Sequence[Target], events: Events, files: Files, backend: Backend | None
    ) -> AbstractContextManager[ClaimedRun | None]:
        """Journals for claimed folders, until the run ends; None where all are finished and whole.
        Raises OutputError where what is there cannot be gone on with."""

    def finish_units(self, begun: ClaimedRun, events: Events) -> Sequence[int]:
        """Return what is to be done once all units have run, before anything is published. Returns
        numbers of units that have to run again: what they had made was lost meanwhile."""

    def run(self, work: UnitBatches) -> Generator[WorkerEvent]:
        """Run units, in any order. A `Done` comes when its bytes are in their files, so that a sync by
        this machine makes them last. Raises what a unit raised, RunError where workers are lost for
        good; closed early, no worker goes on."""
