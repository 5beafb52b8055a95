"""Who runs the units: this process, or several workers fed over pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe, wait
from tempfile import TemporaryFile
from typing import Any

from qconvert.core import errors
from qconvert.core.errors import QConvertError, RunError
from qconvert.core.shown import message
from qconvert.plan.units import Unit
from qconvert.run.files import Files
from qconvert.run.sink import Sink, Underway
from qconvert.run.unit_runner import Place
from qconvert.run.worker import Batch, BatchDone, Done, Failed, Progress, Setup, unit_runner

# Consecutive units travel together, so that a worker reads and writes long runs of a file; but only
# so many, for a batch of very small ones would be large itself and leave the others idle.
BATCH_BYTES = 64 << 20
BATCH_UNITS = 512
_BATCHES_AHEAD = 2

Numbered = tuple[int, Unit]


def run_here(setup: Setup, batches: Iterable[Batch], files: Files) -> Generator[Progress | Done]:
    """Run units in this process, one after another."""
    made: list[int] = []
    sink = Sink(files, setup.paths, setup.window)
    runner = unit_runner(setup, sink, made.append)
    underway: Underway[Done] = Underway(sink)
    try:
        for batch in batches:
            for number, unit in batch.units:
                underway.add(Done(number, runner.run(unit, batch.places)))
                yield Progress(sum(made))
                made.clear()
                yield from underway.settled()
            sink.seal()
            yield from underway.settled()
        yield from underway.flush()
    finally:
        runner.close()
        sink.close()


class _Worker:
    def __init__(self, setup: Setup, locks: Sequence[int]) -> None:
        try:
            ours, theirs = Pipe()
            # What the interpreter says where it cannot even start: kept, for one message of ours.
            self._said = TemporaryFile()  # noqa: SIM115 - closed by stop
        except OSError as error:
            raise _cannot_start(error) from error
        self.connection: Connection[Any, Any] = ours
        # -P: the current folder is not a place to import from. -c, not -m: run as __main__, the
        # worker's message classes would not be those of the module.
        code = f"from qconvert.run.worker import main; main({theirs.fileno()})"
        command = [sys.executable, "-P", "-c", code]
        # Parts are too small to share out among threads, which numpy and torch would start.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            with undisturbed():
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stderr=self._said,
                    pass_fds=(theirs.fileno(), *locks),
                    env={**os.environ, **threads},
                )
        except (OSError, MemoryError) as error:
            ours.close()
            self._said.close()
            raise _cannot_start(error) from error
        finally:
            theirs.close()
        self.ahead = 0
        # Where the last batch it was sent begins.
        self.file: int | None = None
        self._setup: Setup | None = setup

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
        try:
            while True:
                message = self.connection.recv()
                if isinstance(message, Failed):
                    return _error(message)
        except (EOFError, ConnectionResetError):
            code = self.process.wait()
        why = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        hint = " (out of memory? try fewer --jobs)" if code == -9 else self._last_words()
        return RunError(
            f"worker process {self.process.pid} {why}{hint}; run the same command again to go on"
        )

    def _last_words(self) -> str:
        """The last line that the interpreter wrote: what it could not do."""
        said = self._said
        size = said.seek(0, os.SEEK_END)
        said.seek(max(0, size - _LAST_WORDS))
        lines = said.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if not last:
            return ""
        short = any(word in last.lower() for word in _OF_MEMORY)
        hint = (
            "; there is too little memory for it, see `ulimit -v`, or give --jobs 1"
            if short
            else ""
        )
        return f" ({message(last)}){hint}"

    def stop(self) -> None:
        self.connection.close()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()
        self._said.close()


_LAST_WORDS = 4096
# In what Python, numpy and the loader say where an address space is full.
_OF_MEMORY = ("memory", "cannot allocate", "failed to map", "can't start new thread", "enomem")


def _cannot_start(error: OSError | MemoryError) -> RunError:
    what = error.strerror if isinstance(error, OSError) else "out of memory"
    return RunError(
        f"a worker process cannot be started: {what or error}; raise the limit (`ulimit -n`, "
        "`ulimit -u`, `ulimit -v`), or give --jobs 1. Run the same command again to go on"
    )


@contextmanager
def undisturbed() -> Iterator[None]:
    """A process is started without Ctrl-C, which is this one's to answer: in the middle of its imports
    it would end in a traceback of its own. A Ctrl-C meanwhile comes as soon as this is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Backlog:
    """Batches nobody has been given yet, by the file they begin in. As far as there are files enough
    each worker gets one of its own and goes through it from front to back: file systems lock a file
    that is written to (tmpfs, measured with 16 processes: 3 GB/s into one file, 31 into 16)."""

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


def _error(message: Failed) -> QConvertError:
    error: QConvertError = getattr(errors, message.kind)(message.message)
    return error


def run_workers(
    setup: Setup, jobs: int, all_batches: Iterable[Batch], locks: Sequence[int]
) -> Generator[Progress | Done]:
    """Run units in `jobs` processes, which inherit the descriptors of the output folders' locks.
    Raises what a worker raised, or RunError if one died."""
    backlog = Backlog(all_batches)
    workers: list[_Worker] = []
    try:
        for _ in range(min(jobs, len(backlog))):
            workers.append(_Worker(setup, locks))
        for worker in workers * _BATCHES_AHEAD:
            if (batch := backlog.next(worker.file)) is not None:
                worker.send(batch)
        busy = {worker.connection: worker for worker in workers}
        while busy:
            for ready in wait(list(busy)):
                worker = busy[ready]  # type: ignore[index]
                try:
                    message = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    raise worker.died() from None
                if isinstance(message, Failed):
                    raise _error(message)
                if isinstance(message, BatchDone):
                    worker.ahead -= 1
                    if (batch := backlog.next(worker.file)) is not None:
                        worker.send(batch)
                    elif not worker.ahead:
                        worker.send(None)
                        del busy[worker.connection]
                else:
                    yield message
    finally:
        for worker in workers:
            worker.stop()


def cut_batches(
    todo: Sequence[Numbered], places: Mapping[str, Place], most: int = BATCH_BYTES
) -> Iterator[Batch]:
    """Units in batches that begin in one file each, of `most` bytes or little more."""
    group: list[Numbered] = []
    size, file = 0, -1
    for number, unit in todo:
        its_file = places[unit.outputs[0][0]].file
        if group and (its_file != file or size >= most or len(group) >= BATCH_UNITS):
            yield _batch(file, group, places)
            group, size = [], 0
        file = its_file
        group.append((number, unit))
        size += unit.write
    if group:
        yield _batch(file, group, places)


def _batch(file: int, group: Sequence[Numbered], places: Mapping[str, Place]) -> Batch:
    names = [name for _, unit in group for name, _ in unit.outputs]
    return Batch(file, tuple(group), {name: places[name] for name in names})
