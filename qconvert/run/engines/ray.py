"""The engine on a Ray cluster: this machine leads, keeps lock and journal, and publishes; workers on the
nodes read the source and write into the work folder, which all of them share.

A worker is an actor with one CPU and the memory that the plan says, pinned to its node, so that Ray's
books and ours agree. Ray does not retry: a lost batch goes back to the others.

Batches for workers on many machines: who gets which, and what becomes of those of a lost machine.

What brings work there is behind `RemoteWorkers`. Each node says how many workers its
memory holds, and a worker is sent a batch beyond the one it runs: no more is ever on its way.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from qconvert import __version__
from qconvert.core import own_process
from qconvert.core.errors import OutputError, RunError
from qconvert.core.shown import count, format_size, message
from qconvert.run.engines.base import ClaimedRun, UnitBatches
from qconvert.run.engines.local import BatchQueue, failure, whole_run
from qconvert.run.folder.target import Target
from qconvert.run.folder.workspace import Workspace
from qconvert.run.work.backend import Backend
from qconvert.run.work.cluster_node import BatchResult, EdgeBytes, NodeCheck, NodeWorker, check_node
from qconvert.run.work.events import Events
from qconvert.run.work.files import Files
from qconvert.run.work.memory import BYTES_PER_JOB
from qconvert.run.work.options import OWN, check_address, check_installed
from qconvert.run.work.worker import (
    Batch,
    BytesMade,
    StepTimes,
    WorkerEvent,
    WorkerFailed,
    WorkerSetup,
)

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


# How long nodes may take to say what they see: those that are there at the start, and those that join.
_FIRST_SECONDS, _LATER_SECONDS = 60.0, 5.0
_KNOCK_SECONDS = 10.0
_WHY = 300  # characters of what Ray says of a loss
# The thread of Ray's that prints what becomes of nodes.
_PRINTER = "ray_listen_error_messages"


@dataclass(frozen=True)
class RayEngine:
    """All units of a run, on the nodes of a cluster. None as address: RAY_ADDRESS, or the cluster that
    this machine belongs to. `memory` bounds what a node gives, in bytes."""

    address: str | None
    memory: int | None
    jobs: int | None
    space = Workspace
    publishes = True

    @contextmanager
    def begin(
        self, targets: Sequence[Target], events: Events, files: Files, backend: Backend | None
    ) -> Iterator[ClaimedRun | None]:
        check_installed()
        with whole_run(targets, events, backend) as begun:
            yield begun

    def finish_units(self, begun: ClaimedRun, events: Events) -> Sequence[int]:
        return ()

    def run(self, work: UnitBatches) -> Generator[WorkerEvent]:
        batches = list(work.batches)
        if not batches:
            return
        output = sum(unit.write for batch in batches for _, unit in batch.units)
        most = self.jobs or max(1, output // BYTES_PER_JOB)
        work = replace(work, setup=_anywhere(work.setup))
        with _probe(work) as probe, connected(self.address) as ray:
            share = work.targets[0].ready.share
            sizes = _Sizes(share.worker, share.total, self.memory)
            workers = _RayWorkers(ray, work.setup, probe, sizes, work.events)
            try:
                yield from run_on_workers(workers, batches, most, work)
            finally:
                workers.stop()


@dataclass(frozen=True)
class _Sizes:
    """Bytes of a worker, of this process, and what a node may give at most (None: what Ray has)."""

    worker: int
    leader: int
    most: int | None


def _anywhere(setup: WorkerSetup) -> WorkerSetup:
    """A setup whose paths are the same in any current folder."""
    shards = [replace(shard, path=shard.path.absolute()) for shard in setup.shards]
    return replace(setup, shards=shards, paths=[path.absolute() for path in setup.paths])


@contextmanager
def _probe(work: UnitBatches) -> Iterator[NodeCheck]:
    """New files in the work folders, for nodes to find until the run ends."""
    name, wanted = f"probe-{secrets.token_hex(8)}", secrets.token_hex(16).encode()
    files = work.files
    made: list[Path] = []
    try:
        for target in work.targets:
            if not target.space.finished:
                path = target.space.work.absolute() / name
                files.create(path, 0)
                made.append(path)
                fd = files.open(path)
                try:
                    files.append(fd, path, wanted)
                    files.sync(fd, path)
                finally:
                    files.close(fd)
        yield NodeCheck(__version__, [(path, wanted) for path in made], work.setup.shards)
    finally:
        for path in made:
            with suppress(OutputError):  # that goes with the work folder
                files.remove(path)


class _RayWorkers:
    """Ray's workers. Raises RunError where no node can take one."""

    def __init__(
        self, ray: Any, setup: WorkerSetup, probe: NodeCheck, sizes: _Sizes, events: Events
    ) -> None:
        self._ray, self._probe, self._sizes, self._events = ray, probe, sizes, events
        self._setup = ray.put(setup)
        self._here = ray.get_runtime_context().get_node_id()
        self._known: dict[str, str | None] = {}  # nodes that were asked, and what they lack
        self._actors: dict[int, Any] = {}
        # Of each worker what it was asked, in that order. Only the first is waited for: Ray may hold a
        # later answer while an earlier one is lost with its node.
        self._awaited: dict[int, deque[Any]] = {}
        self._started = 0
        self._first = True

    def nodes(self) -> list[Node]:
        alive = [each for each in self._ray.nodes() if each["Alive"]]
        found = [node for each in alive if (node := self._node(each)).workers]
        if self._first and not found:
            most = max((self._granted(each) for each in alive), default=0)
            raise RunError(
                f"no node of the Ray cluster has a CPU and {format_size(self._sizes.worker)} of memory "
                f"for a worker (the largest of {count(len(alive), 'node')} gives "
                f"{format_size(max(most, 0))})"
            )
        self._look([node for node in found if node.key not in self._known])
        able = [node for node in found if self._known.get(node.key, "") is None]
        if self._first and not able:
            raise RunError(
                f"no node of the Ray cluster answered within {_FIRST_SECONDS:.0f} s: see `ray status`"
            )
        self._first = False
        return able

    def _node(self, each: dict[str, Any]) -> Node:
        cores = int(each["Resources"].get("CPU", 0))
        name = f"{each['NodeManagerAddress']} ({each['NodeManagerHostname']})"
        fit = max(0, self._granted(each) // self._sizes.worker)
        return Node(each["NodeID"], name, min(cores, fit))

    def _granted(self, each: dict[str, Any]) -> int:
        """Bytes that a node gives to workers: what Ray was granted there, no more than --memory, and
        less this process where it is there."""
        granted = int(each["Resources"].get("memory", 0))
        if self._sizes.most is not None:
            granted = min(granted, self._sizes.most)
        return granted - (self._sizes.leader if each["NodeID"] == self._here else 0)

    def _look(self, nodes: Sequence[Node]) -> None:
        """Ask new nodes whether they see the same files. One that joins late and does not is left out;
        at the start it is a mistake, and the run is refused: raises RunError."""
        if not nodes:
            return
        ask = self._ray.remote(check_node)
        asked = {
            ask.options(num_cpus=0, max_retries=0, scheduling_strategy=self._on(node)).remote(
                self._probe
            ): node
            for node in nodes
        }
        seconds = _FIRST_SECONDS if self._first else _LATER_SECONDS
        self._ray.wait(list(asked), num_returns=len(asked), timeout=seconds)
        for ref, node in asked.items():
            try:
                lacks = self._ray.get(ref, timeout=0)
            except self._ray.exceptions.RayTaskError as error:
                lacks = (
                    f"cannot run qconvert: {_short(error.cause)}; install the same on every node"
                )
            except self._ray.exceptions.RayError:
                continue  # it is gone, or slow, and is asked again
            self._known[node.key] = lacks
            if lacks is not None and self._first:
                raise RunError(f"node {node.name} {lacks}")
            if lacks is not None:
                self._events.phase(f"left out: node {node.name} {lacks}")

    def _on(self, node: Node) -> Any:
        strategies = self._ray.util.scheduling_strategies
        return strategies.NodeAffinitySchedulingStrategy(node_id=node.key, soft=False)

    def start_worker(self, node: Node) -> int:
        self._started += 1
        actor = self._ray.remote(NodeWorker).options(
            num_cpus=1, memory=self._sizes.worker, max_restarts=0, max_task_retries=0,
            scheduling_strategy=self._on(node),
        ).remote()  # fmt: skip
        self._actors[self._started] = actor
        self._awaited[self._started] = deque([actor.begin.remote(self._setup)])
        return self._started

    def send(self, worker: int, batch: Batch) -> None:
        self._awaited[worker].append(self._actors[worker].run.remote(batch))

    def next(self, seconds: float) -> tuple[int, WorkerReady | BatchResult | WorkerLost] | None:
        first = {asked[0]: worker for worker, asked in self._awaited.items() if asked}
        ready, _ = self._ray.wait(list(first), num_returns=1, timeout=seconds)
        if not ready:
            return None
        worker = first[ready[0]]
        self._awaited[worker].popleft()
        try:
            found = self._ray.get(ready[0])
        except self._ray.exceptions.RayTaskError as error:
            raise RunError(f"a worker of the cluster failed: {_short(error.cause)}") from error
        except self._ray.exceptions.RayError as error:
            self._dismiss(worker)
            return worker, WorkerLost(_short(error))
        return worker, found if isinstance(found, BatchResult) else WorkerReady(found)

    def _dismiss(self, worker: int) -> None:
        """End a worker. What Ray takes for lost may go on otherwise."""
        del self._awaited[worker]
        self._ray.kill(self._actors.pop(worker))

    def stop(self) -> None:
        for worker in list(self._actors):
            self._dismiss(worker)


def _short(error: BaseException) -> str:
    """Return what Ray says of an error, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {' '.join(lines[:3])}"
    return message(text if len(text) <= _WHY else text[:_WHY] + " ...")


# --- a connection ---------------------------------------------------------------------------------


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The module ray, connected to a cluster; one that the caller is connected to already is used, and
    left so. Raises RunError where there is none."""
    import ray
    import ray.util.scheduling_strategies

    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    check_address(address)
    own: dict[str, Any] = {"include_dashboard": False} if address == OWN else {}
    if own:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with _without_notices() as quiet:
        try:
            _knock(address)
            with _handler_kept(), own_process.without_current_folder(), chdir("/"):
                # Ray lets its workers import from the folder that is the current one now.
                ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL, **own)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            raise RunError(
                f"no Ray cluster can be reached at {address}: {_short(error)}; start one with `ray "
                "start --head`, or name its head with --address HOST:PORT"
            ) from error
        try:
            yield ray
        finally:
            quiet.here = threading.get_ident()  # what was not printed yet is now
            with _handler_kept():
                ray.shutdown()


def _knock(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT: Ray would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()


@contextmanager
def _handler_kept() -> Iterator[None]:
    """The process's handler of SIGTERM, which ends the run and keeps what is finished, is the same
    afterwards: Ray takes its place, and at the end leaves the system's."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _without_notices() -> Iterator[_MutedStream]:
    """Return what a thread of Ray's prints of nodes, log files and all, does not reach stdout, which may
    be JSON: the run tells of lost workers itself."""
    before = sys.stdout
    sys.stdout = quiet = _MutedStream(before)
    try:
        yield quiet
    finally:
        sys.stdout = before


class _MutedStream:
    """A stream that a thread of Ray's cannot write to, nor the thread `here`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.here: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        thread = threading.current_thread()
        if thread.name == _PRINTER or thread.ident == self.here:
            return len(text)
        return int(self._stream.write(text))
