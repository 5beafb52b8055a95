"""Pool of processes that run units: this process, or several workers fed over pipes."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Protocol

from qconvert.checkpoint.checkpoint import imports_of
from qconvert.core import errors
from qconvert.core.errors import QConvertError
from qconvert.ops.compiled import LOOPS
from qconvert.plan.units import Unit
from qconvert.run.engines.base import ClaimedRun, UnitBatches
from qconvert.run.folder.resume import open_journals, progress_of
from qconvert.run.folder.target import Target
from qconvert.run.folder.workspace import Workspace
from qconvert.run.work.events import Events
from qconvert.run.work.files import Files
from qconvert.run.work.forkserver import AnyConnection, ForkServer, server_for_a_run
from qconvert.run.work.meters import Meters
from qconvert.run.work.sink import PendingMessages, Sink
from qconvert.run.work.unit_runner import Place, UnitRunner
from qconvert.run.work.worker import (
    Batch,
    BatchDone,
    BytesMade,
    StepTimes,
    UnitDone,
    WorkerEvent,
    WorkerFailed,
    WorkerSetup,
    unit_runner,
)

if TYPE_CHECKING:
    from qconvert.run.work.backend import Backend


# Consecutive units travel together, so that a worker reads and writes long runs of a file; but only
# so many, for a batch of very small ones would be large itself and leave the others idle.
BATCH_BYTES = 64 << 20
BATCH_UNITS = 512
_BATCHES_AHEAD = 2

Numbered = tuple[int, Unit]


def run_here(setup: WorkerSetup, batches: Iterable[Batch], files: Files) -> Generator[WorkerEvent]:
    """Run units in this process, one after another."""
    work = Meters(setup.metered)
    return work.counting(_run_here(setup, batches, files, work))


def _run_here(
    setup: WorkerSetup, batches: Iterable[Batch], files: Files, work: Meters
) -> Generator[WorkerEvent]:
    made: list[int] = []
    sink = Sink(files, setup.paths, setup.window, work)
    runner = unit_runner(setup, sink, made.append, work)
    underway: PendingMessages[UnitDone] = PendingMessages(sink)
    try:
        for batch in _announced(batches, runner):
            for number, unit in batch.units:
                underway.add(UnitDone(number, runner.run(unit, batch.places)))
                yield BytesMade(sum(made))
                made.clear()
                yield from underway.settled()
            sink.seal()
            yield from underway.settled()
        yield from underway.flush()
        if work.on:
            yield StepTimes(work.word())
    finally:
        runner.close()
        sink.close()


def _announced(batches: Iterable[Batch], runner: UnitRunner) -> Iterator[Batch]:
    """Batches, of which the runner knows each before the one in front of it is run: what it reads of a
    store is then on its way."""
    before: Batch | None = None
    for batch in batches:
        runner.expect(unit for _, unit in batch.units)
        if before is not None:
            yield before
        before = batch
    if before is not None:
        yield before


class _Worker:
    """A worker and what it was sent."""

    def __init__(
        self, server: ForkServer, number: int, connection: AnyConnection, setup: WorkerSetup
    ) -> None:
        self.connection = connection
        self._server, self._number = server, number
        self.ahead = 0
        # Where the last batch it was sent begins.
        self.file: int | None = None
        self._setup: WorkerSetup | None = setup

    def send(self, batch: Batch | None) -> None:
        """Send work, or None to end it. Raises RunError if the worker died."""
        self.ahead += 1
        self.file = batch.file if batch is not None else None
        try:
            if self._setup is not None:
                self.connection.send(self._setup)
                self._setup = None
            self.connection.send(batch)
        except (BrokenPipeError, ConnectionResetError):
            raise self.died() from None

    def died(self) -> QConvertError:
        """Why a worker went: the error it sent before, else what its end tells."""
        with suppress(EOFError, ConnectionResetError):
            while True:
                message = self.connection.recv()
                if isinstance(message, WorkerFailed):
                    return failure(message)
        return self._server.why_ended(self._number)


class BatchSource(Protocol):
    """Batches for workers, of which some may have to wait for what happens outside them."""

    def __len__(self) -> int:
        """Return how many nobody has been given yet."""

    def next(self, current: int | None) -> Batch | None:
        """A batch for a worker that is at file `current`; None where there is none, or none now."""

    @property
    def bell(self) -> AnyConnection | None:
        """Can be read from where there may be more to give than before; None where that never is."""

    def answer(self) -> None:
        """Take what the bell rang for. Raises what went wrong outside the workers."""


class BatchQueue:
    """Batches nobody has been given yet, by the file they begin in. As far as there are files enough
    each worker gets one of its own and goes through it from front to back: file systems lock a file
    that is written to (tmpfs, measured with 16 processes: 3 GB/s into one file, 31 into 16)."""

    bell: AnyConnection | None = None

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._files: dict[int, deque[Batch]] = {}
        for batch in batches:
            self._files.setdefault(batch.file, deque()).append(batch)
        self._given = dict.fromkeys(self._files, 0)

    def __len__(self) -> int:
        return sum(map(len, self._files.values()))

    def next(self, current: int | None) -> Batch | None:
        """A batch for a worker that is at file `current`: of the same file, or else of the one that
        fewest workers were sent to; None when there are no more."""
        if not self._files:
            return None
        file = current
        if file is None or file not in self._files:
            file = min(self._files, key=lambda n: (self._given[n], n))
            self._given[file] += 1
        batches = self._files[file]
        batch = batches.popleft()
        if not batches:
            del self._files[file]
        return batch

    def answer(self) -> None:
        raise AssertionError("nobody rings")

    def again(self, batch: Batch) -> None:
        """Take back a batch whose worker was lost: it is the next of its file."""
        self._files.setdefault(batch.file, deque()).appendleft(batch)
        self._given.setdefault(batch.file, 0)


def failure(message: WorkerFailed) -> QConvertError:
    """The error that a worker events of."""
    error: QConvertError = getattr(errors, message.kind)(message.message)
    return error


def run_workers(
    setup: WorkerSetup, jobs: int, supply: Callable[[], BatchSource], locks: Sequence[int]
) -> Generator[WorkerEvent]:
    """Run units in `jobs` processes, which inherit the descriptors of the output folders' locks. What
    there is to do is asked for once the first of them is on its way. Raises what a worker raised, or
    RunError if one died."""
    setup = replace(setup, maps=True)
    server = server_for_a_run()
    try:
        server.preload(imports_ahead(setup), compiled=setup.compiled)
        backlog = supply()
        pipes = server.fork(min(jobs, len(backlog)), locks)
        workers = [_Worker(server, number, pipe, setup) for number, pipe in enumerate(pipes)]
        for worker in workers * _BATCHES_AHEAD:
            if (batch := backlog.next(worker.file)) is not None:
                worker.send(batch)
        busy = {worker.connection: worker for worker in workers}
        bell = [] if backlog.bell is None else [backlog.bell]
        while busy:
            for ready in wait([*busy, *bell]):
                if ready in bell:
                    backlog.answer()
                    continue
                worker = busy[ready]  # type: ignore[index]
                try:
                    message = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    raise worker.died() from None
                if isinstance(message, WorkerFailed):
                    raise failure(message)
                if isinstance(message, BatchDone):
                    worker.ahead -= 1
                else:
                    yield message
            _feed(busy, backlog)
        server.finish()
    finally:
        server.close()


def _feed(busy: dict[AnyConnection, _Worker], supply: BatchSource) -> None:
    """Give workers that have room for more what there is, and let those go that will get nothing."""
    for worker in list(busy.values()):
        while worker.ahead < _BATCHES_AHEAD and (batch := supply.next(worker.file)) is not None:
            worker.send(batch)
        if not worker.ahead and not len(supply):
            worker.send(None)
            del busy[worker.connection]


def run_local(work: UnitBatches) -> Generator[WorkerEvent]:
    """Units in this process or in workers, as the plan shares out the memory."""
    jobs = work.targets[0].ready.share.jobs
    if jobs == 1:
        return run_here(work.setup, work.batches, work.files)
    return run_workers(work.setup, jobs, lambda: BatchQueue(work.batches), locks_of(work))


def locks_of(work: UnitBatches) -> list[int]:
    """Descriptors of the locks of a run's folders, which its workers hold on to."""
    return [target.space.lock_fd for target in work.targets if not target.space.finished]


def imports_ahead(setup: WorkerSetup) -> list[str]:
    """Return what a plan's ops are of, which was imported to plan them, and what they import when they
    run. Not loops that this process has compiled before: numba takes a worker that needs none 1 s
    more."""
    ours = "qconvert.ops.", "qconvert.formats."
    of_ops = [n for n in sys.modules if n.startswith(ours) and not n.startswith(f"{LOOPS}.")]
    return ["numpy", "xxhash", *imports_of(setup.shards), *of_ops]


def cut_batches(
    todo: Sequence[Numbered], places: Mapping[str, Place], most: int = BATCH_BYTES
) -> Iterator[Batch]:
    """Units in batches that begin in one file each, of `most` bytes or little more."""
    group: list[Numbered] = []
    size, file = 0, -1
    for number, unit in todo:
        its_file = places[unit.names[0]].file
        if group and (its_file != file or size >= most or len(group) >= BATCH_UNITS):
            yield _batch(file, group, places)
            group, size = [], 0
        file = its_file
        group.append((number, unit))
        size += unit.write
    if group:
        yield _batch(file, group, places)


def _batch(file: int, group: Sequence[Numbered], places: Mapping[str, Place]) -> Batch:
    names = [name for _, unit in group for name in unit.names]
    return Batch(file, tuple(group), {name: places[name] for name in names})


# The engine that needs nothing: worker processes of this machine, or this process alone.


class LocalEngine:
    """All units of a run, on this machine."""

    space = Workspace
    publishes = True

    @contextmanager
    def begin(
        self, targets: Sequence[Target], events: Events, files: Files, backend: Backend | None
    ) -> Iterator[ClaimedRun | None]:
        with whole_run(targets, events, backend) as begun:
            yield begun

    def finish_units(self, begun: ClaimedRun, events: Events) -> Sequence[int]:
        return ()

    def run(self, work: UnitBatches) -> Generator[WorkerEvent]:
        return run_local(work)


@contextmanager
def whole_run(
    targets: Sequence[Target], events: Events, backend: Backend | None
) -> Iterator[ClaimedRun | None]:
    """One run's journals in folders that it has claimed alone: begun, gone on with, or made for a
    repair."""
    _mark_finished(targets)
    if targets[0].ready.options.finish:
        from qconvert.run.engines.shard import check_complete

        check_complete(targets)
    if targets[0].space.finished:
        from qconvert.run.folder.resume import begin_repair, claim_damaged

        targets = claim_damaged(targets, events)
        if not any(target.faults for target in targets):
            yield None
            return
        targets = begin_repair(targets, backend)
    else:
        targets = open_journals(targets)
    try:
        progress = progress_of(targets, events)
        yield ClaimedRun(targets, progress, len(progress.kept))
    finally:
        for target in targets:
            if target.journal is not None:
                target.journal.close()


def _mark_finished(targets: Sequence[Target]) -> None:
    """Take folders for finished ones where a run was stopped after its last rename, in all of them."""
    if all(target.space.finished or target.space.in_sight for target in targets):
        for target in targets:
            if target.space.in_sight:
                target.space.mark_finished()
