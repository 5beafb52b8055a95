"""A worker process: takes units over a pipe, runs them, sends back what they left behind.

Forked by the server of `run/work/forkserver.py`. A worker ignores Ctrl-C (the main process decides) and
dies with the server, which dies with the main process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from qconvert.checkpoint.checkpoint import Shard
from qconvert.core import errors
from qconvert.core.profiling import FOR_WORK, Word
from qconvert.ops.compiled import use
from qconvert.plan.units import Unit
from qconvert.run.work.files import Files
from qconvert.run.work.meters import Meters
from qconvert.run.work.reader import Arena, Reader
from qconvert.run.work.sink import PendingMessages, Sink
from qconvert.run.work.unit_runner import Place, UnitResult, UnitRunner

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PROGRESS_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """Setup of a worker: the source's shards, the files to write, its memory in bytes (an
    arena, and each window of the sink), whether it computes in compiled loops, whether it tells what
    its steps take, and whether it may map source files (a file that is cut then ends the process, which
    must be one that somebody waits for)."""

    shards: Sequence[Shard]
    paths: Sequence[Path]
    arena: int
    window: int
    compiled: bool = False
    metered: bool = False
    maps: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Units to run, with their numbers and the places of their outputs. `file` is where those
    begin."""

    file: int
    units: Sequence[tuple[int, Unit]]
    places: Mapping[str, Place]


@dataclass(frozen=True, slots=True)
class BytesMade:
    """Bytes made since the last word; the last few of them are still on their way to the disk."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class UnitDone:
    """A finished unit."""

    number: int
    result: UnitResult


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Time since the last message, of a worker that is profiled."""

    word: Word


@dataclass(frozen=True, slots=True)
class BatchDone:
    """A batch's last word."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """An error the user should see: the name of its class in qconvert.core.errors, and its message."""

    kind: str
    message: str


WorkerEvent = BytesMade | UnitDone | StepTimes
Message = WorkerEvent | BatchDone | WorkerFailed


class ProgressMeter:
    """Adds up small writes and speaks up every _PROGRESS_BYTES."""

    def __init__(self, connection: Connection[Message, Batch | None]) -> None:
        self._connection = connection
        self._bytes = 0

    def __call__(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._bytes >= _PROGRESS_BYTES:
            self.flush()

    def flush(self) -> None:
        self._connection.send(BytesMade(self._bytes))
        self._bytes = 0


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; macOS has no such call, there the
    closed pipe ends it at the next unit."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


def serve(connection: Connection[Message, Batch | None], setup: WorkerSetup) -> None:
    """Run batches until told to stop (None) or the pipe closes."""
    queue: SimpleQueue[Batch | None] = SimpleQueue()
    # Read in a thread of its own: while the main process is held up sending us work it takes no
    # results, and both would wait for ever.
    Thread(target=_receive, args=(connection, queue), daemon=True).start()
    meter = ProgressMeter(connection)
    work = Meters(setup.metered)
    sink = Sink(Files(), setup.paths, setup.window, work)
    runner = unit_runner(setup, sink, meter, work)
    inbox = _Inbox(queue, runner, work)
    underway: PendingMessages[Message] = PendingMessages(sink)
    try:
        while (batch := inbox.next()) is not None:
            for number, unit in batch.units:
                underway.add(UnitDone(number, runner.run(unit, batch.places)))
                _send(connection, underway.settled(), work)
            meter.flush()
            sink.seal()
            underway.add(BatchDone())
            # With more to do, that goes on while the disk catches up.
            _send(connection, underway.flush() if inbox.empty else underway.settled(), work)
    except errors.QConvertError as error:
        connection.send(WorkerFailed(type(error).__name__, str(error)))
    except BrokenPipeError:
        return
    finally:
        runner.close()
        sink.close()


def unit_runner(
    setup: WorkerSetup, sink: Sink, progress: Callable[[int], None], work: Meters
) -> UnitRunner:
    """A runner for units of the setup's conversion."""
    use(setup.compiled)
    names = [path.name for path in setup.paths]
    arena = Arena(setup.arena)
    reader = Reader(setup.shards, maps=setup.maps, meter=work.own)
    return UnitRunner(reader, sink, names, arena, progress, work.own)


class _Inbox:
    """Batches to run. The runner is told of those that came before their turn: what they read of a store
    can be on its way while another runs."""

    def __init__(self, queue: SimpleQueue[Batch | None], runner: UnitRunner, work: Meters) -> None:
        self._queue, self._runner, self._work = queue, runner, work
        self._told: deque[Batch | None] = deque()

    @property
    def empty(self) -> bool:
        return not self._told and self._queue.empty()

    def next(self) -> Batch | None:
        if not self._told:
            with self._work.own.step(FOR_WORK):
                batch = self._queue.get()
            self._take(batch)
        while not self._queue.empty():
            self._take(self._queue.get())
        return self._told.popleft()

    def _take(self, batch: Batch | None) -> None:
        if batch is not None:
            self._runner.expect(unit for _, unit in batch.units)
        self._told.append(batch)


def _send(
    connection: Connection[Message, Batch | None], messages: Iterable[Message], work: Meters
) -> None:
    """Return what a batch took is told before its last word, after which nobody may be listening."""
    for message in messages:
        if work.on and isinstance(message, BatchDone):
            connection.send(StepTimes(work.word()))
        connection.send(message)


def _receive(
    connection: Connection[Message, Batch | None], inbox: SimpleQueue[Batch | None]
) -> None:
    batch: Batch | None
    while True:
        try:
            batch = connection.recv()
        except (EOFError, ConnectionResetError):
            batch = None
        inbox.put(batch)
        if batch is None:
            return


def main(descriptor: int) -> None:
    """Serve the main process at the other end of an inherited descriptor."""
    connection: Connection[Message, Batch | None] = Connection(descriptor)
    setup = Connection.recv(connection)
    assert isinstance(setup, WorkerSetup)
    try:
        serve(connection, setup)
    except (MemoryError, OSError, RuntimeError) as error:
        # An arena, a thread or a module that there is no room for.
        with suppress(OSError):
            connection.send(broken(error))


def broken(error: Exception, where: str = "") -> WorkerFailed:
    """Return what a worker says of an arena, a thread or a module that there is no room for; `where`
    names its machine."""
    what = str(error) or "out of memory"
    return WorkerFailed(
        "RunError",
        f"worker process {os.getpid()}{where}: {type(error).__name__}: {what} (its limits are in "
        "`ulimit -a`; fewer --jobs need less); run the same command again to go on",
    )
