"""Batches for workers on many machines: who gets which, and what becomes of those of a lost machine.

What brings work there is behind `RemoteWorkers`; ray.py has Ray's. Each node says how many workers its
memory holds, and a worker is sent a batch beyond the one it runs: no more is ever on its way."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from qconvert.core.errors import RunError
from qconvert.core.shown import count
from qconvert.run.engines.base import UnitBatches
from qconvert.run.engines.local import BatchQueue, failure
from qconvert.run.work.cluster_node import BatchResult, EdgeBytes
from qconvert.run.work.files import Files
from qconvert.run.work.worker import Batch, BytesMade, StepTimes, WorkerEvent, WorkerFailed

_BATCHES_AHEAD = 2
# How often a batch, or workers of a node one after another, may be lost before it is given up.
_MOST_LOSSES = 3
# How often the cluster is looked at again, for nodes that joined.
_LOOK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, by a key and a name for messages, and how many workers its memory and cores hold."""

    key: str
    name: str
    workers: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has begun, or could not."""

    failed: WorkerFailed | None = None


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is gone, with all it was sent."""

    why: str


class RemoteWorkers(Protocol):
    """Workers on machines. A worker is known by a number."""

    def nodes(self) -> Sequence[Node]:
        """Machines that are there now."""

    def start_worker(self, node: Node) -> int:
        """Begin a worker; `next` says when it is ready."""

    def send(self, worker: int, batch: Batch) -> None:
        """Send a batch; `next` brings what it left."""

    def next(self, seconds: float) -> tuple[int, WorkerReady | BatchResult | WorkerLost] | None:
        """Return what comes next of any worker, in the order in which it was sent batches; None when
        nothing did for that long."""


@dataclass
class _Worker:
    node: Node
    ready: bool = False
    file: int | None = None
    ahead: deque[Batch] = field(default_factory=deque)


class _Scheduler:
    """The state of one run."""

    def __init__(
        self, workers: RemoteWorkers, backlog: BatchQueue, most: int, notice: Callable[[str], None]
    ) -> None:
        self._remote, self._backlog, self._most, self._notice = workers, backlog, most, notice
        self._workers: dict[int, _Worker] = {}
        self._lost_on: Counter[str] = Counter()
        self._lost: Counter[int] = Counter()

    @property
    def left(self) -> int:
        return len(self._backlog) + sum(len(worker.ahead) for worker in self._workers.values())

    @property
    def idle(self) -> bool:
        """Return whether no worker has begun."""
        return not any(worker.ready for worker in self._workers.values())

    def start_workers(self) -> None:
        """As many workers as there is room and work for, evenly over the nodes. Raises RunError where
        there is room for none."""
        nodes = self._remote.nodes()
        at = Counter(worker.node.key for worker in self._workers.values())
        while len(self._workers) < min(self._most, self.left):
            free = [
                node
                for node in nodes
                if at[node.key] < node.workers and self._lost_on[node.key] < _MOST_LOSSES
            ]
            if not free:
                break
            node = min(free, key=lambda node: at[node.key])
            at[node.key] += 1
            self._workers[self._remote.start_worker(node)] = _Worker(node)
        if not self._workers:
            raise RunError("no machine of the cluster has room for a worker")

    def take(
        self, number: int, what: WorkerReady | BatchResult | WorkerLost
    ) -> Iterator[BatchResult]:
        worker = self._workers[number]
        if isinstance(what, WorkerLost):
            self._take_back(number, what.why)
            return
        if isinstance(what, WorkerReady):
            if what.failed is not None:
                raise failure(what.failed)
            worker.ready = True
        else:
            worker.ahead.popleft()
            self._lost_on.pop(worker.node.key, None)
            if what.word is not None:  # processes of several machines may have one number
                what = replace(what, word=replace(what.word, process=-number))
            yield what
        self._feed(number)

    def _feed(self, number: int) -> None:
        worker = self._workers[number]
        while worker.ready and len(worker.ahead) < _BATCHES_AHEAD:
            batch = self._backlog.next(worker.file)
            if batch is None:
                return
            worker.file = batch.file
            worker.ahead.append(batch)
            self._remote.send(number, batch)

    def _take_back(self, number: int, why: str) -> None:
        worker = self._workers.pop(number)
        self._lost_on[worker.node.key] += 1
        if worker.ahead:
            first, unit = worker.ahead[0].units[0]
            self._lost[first] += 1
            if self._lost[first] == _MOST_LOSSES:
                raise RunError(
                    f"units from {unit.names[0]!r} on were lost with their worker "
                    f"{count(_MOST_LOSSES, 'time')}, the last time on {worker.node.name}: {why}; "
                    "run the same command again to go on"
                )
        for batch in reversed(worker.ahead):
            self._backlog.again(batch)
        self._notice(f"a worker on {worker.node.name} was lost: its units are run again")
        try:
            self.start_workers()
        except RunError as error:
            raise RunError(
                f"the last worker was lost, on {worker.node.name}: {why}; run the same command again to "
                "go on, with any engine"
            ) from error
        for other in list(self._workers):
            self._feed(other)


def run_on_workers(
    workers: RemoteWorkers, batches: Sequence[Batch], most: int, work: UnitBatches
) -> Generator[WorkerEvent]:
    """Run batches, in any order. `most` bounds the workers of all nodes together. Raises what a unit
    raised, RunError where no machine is left or a batch was lost several times."""
    for left in _returned(workers, BatchQueue(batches), most, work.events.phase):
        _write_ends(left.ends, work.setup.paths, work.files)
        yield BytesMade(left.made)
        if left.word is not None:
            yield StepTimes(left.word)
        yield from left.done
        if left.failed is not None:
            raise failure(left.failed)


def _write_ends(ends: Sequence[EdgeBytes], paths: Sequence[Path], files: Files) -> None:
    """Write what nodes left to this machine."""
    fds: dict[int, int] = {}
    try:
        for end in ends:
            path = paths[end.file]
            if end.file not in fds:
                fds[end.file] = files.open(path)
            files.write(fds[end.file], path, memoryview(end.data), end.offset)
    finally:
        for fd in fds.values():
            files.close(fd)


def _returned(
    workers: RemoteWorkers, backlog: BatchQueue, most: int, notice: Callable[[str], None]
) -> Generator[BatchResult]:
    scheduler = _Scheduler(workers, backlog, most, notice)
    scheduler.start_workers()
    looked = time.monotonic()
    while scheduler.left:
        event = workers.next(_LOOK_SECONDS)
        if event is not None:
            yield from scheduler.take(*event)
        elif scheduler.idle:
            notice("waiting for the cluster to start a worker: its cores or memory are taken")
        if time.monotonic() - looked >= _LOOK_SECONDS:
            scheduler.start_workers()
            looked = time.monotonic()
