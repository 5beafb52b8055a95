"""Profiling: seconds, CPU seconds and bytes of steps, recorded where somebody asked for it.

Without a record, a phase is one look at a context variable, and there are a few dozen in a run; a step
(a read, a part of an op) asks its meter, which is off: 0.2 us, where its clocks take 7.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter, process_time, thread_time
from typing import Any

READ, WRITE, HASH, COPY, AGAIN = "read", "write", "hash", "copy", "read back"
FOR_WORK, FOR_DISK = "wait for work", "wait for disk"
# Steps that a worker takes beside its ops, in the order in which they are shown.
STEPS = (READ, COPY, HASH, AGAIN, FOR_DISK, FOR_WORK)


@dataclass(slots=True)
class Spent:
    """Cost of a step, over all times it was done: seconds by the clock, seconds of CPU, and bytes."""

    times: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    nbytes: int = 0

    def add(self, other: Spent) -> None:
        self.times += other.times
        self.seconds += other.seconds
        self.cpu += other.cpu
        self.nbytes += other.nbytes


Steps = dict[str, Spent]


def add_steps(into: Steps, more: Mapping[str, Spent]) -> None:
    for name, spent in more.items():
        into.setdefault(name, Spent()).add(spent)


class Meter:
    """Measures the steps of one thread, if it is `on`. What a step within another takes is its own, and
    not also the other's: sums of all steps are no more than the whole."""

    def __init__(self, *, on: bool = True) -> None:
        self.on = on
        self._steps: Steps = {}
        self._lock = Lock()
        # What steps within the current one took: seconds, and seconds of CPU.
        self.within = (0.0, 0.0)

    def step(self, name: str, nbytes: int = 0) -> AbstractContextManager[None]:
        return _Step(self, name, nbytes) if self.on else _NOTHING

    def add(self, name: str, seconds: float, cpu: float, nbytes: int) -> None:
        with self._lock:
            spent = self._steps.get(name)
            if spent is None:
                spent = self._steps[name] = Spent()
            spent.times += 1
            spent.seconds += seconds
            spent.cpu += cpu
            spent.nbytes += nbytes

    def take(self) -> Steps:
        """The steps since the last time this was asked, from any thread."""
        with self._lock:
            steps, self._steps = self._steps, {}
        return steps


_NOTHING = nullcontext()
OFF = Meter(on=False)


class _Step(AbstractContextManager[None]):
    """A class, not a generator: there are three or four steps for each small tensor."""

    __slots__ = ("_begin", "_cpu", "_meter", "_name", "_nbytes", "_outer")

    def __init__(self, meter: Meter, name: str, nbytes: int) -> None:
        self._meter, self._name, self._nbytes = meter, name, nbytes

    def __enter__(self) -> None:
        self._outer, self._meter.within = self._meter.within, (0.0, 0.0)
        self._cpu, self._begin = thread_time(), perf_counter()

    def __exit__(self, *_error: object) -> None:
        seconds, cpu = perf_counter() - self._begin, thread_time() - self._cpu
        meter = self._meter
        within, outer = meter.within, self._outer
        meter.within = (outer[0] + seconds, outer[1] + cpu)
        meter.add(self._name, seconds - within[0], cpu - within[1], self._nbytes)


@dataclass(frozen=True, slots=True)
class Word:
    """Time of a worker process since its last word: `steps`, some of them `beside` the others in
    threads of their own, and `seconds` and `cpu` of the whole process. `computes` says what its ops
    ran in."""

    process: int
    seconds: float
    cpu: float
    steps: Steps
    beside: Steps
    computes: str = ""


@dataclass
class Record:
    """Profile of a conversion or a validation: `main` has the phases of this process, `steps`
    and `beside` those of all workers. `runs` says what was run. `slots` are seconds of workers: their
    number times the time that they were there for; `seconds` and `cpu` what workers told of, `own_cpu`
    what of that was this process's, where it ran units itself."""

    main: Meter = field(default_factory=Meter)
    steps: Steps = field(default_factory=dict)
    beside: Steps = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    processes: set[int] = field(default_factory=set)
    computes: set[str] = field(default_factory=set)
    slots: float = 0.0
    seconds: float = 0.0
    cpu: float = 0.0
    own_cpu: float = 0.0
    _there: set[int] = field(default_factory=set)

    def heard(self, word: Word) -> None:
        self.processes.add(word.process)
        self._there.add(word.process)
        if word.computes:
            self.computes.add(word.computes)
        self.seconds += word.seconds
        self.cpu += word.cpu
        if word.process == os.getpid():
            self.own_cpu += word.cpu
        add_steps(self.steps, word.steps)
        add_steps(self.beside, word.beside)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around the time for which there are workers."""
        self._there.clear()
        begin = perf_counter()
        try:
            yield
        finally:
            self.slots += len(self._there) * (perf_counter() - begin)


_record: ContextVar[Record | None] = ContextVar("record", default=None)


def recording() -> Record | None:
    """The record that somebody asked for, if any."""
    return _record.get()


@contextmanager
def recorded() -> Iterator[Record]:
    """Within this, what this process and its workers do is recorded."""
    record = Record()
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase of the main process; also as a decorator."""
    record = _record.get()
    if record is None:
        yield
    else:
        with record.main.step(name):
            yield


def heard(word: Word, *, alone: bool = False) -> None:
    """A worker's word goes into the record. `alone`: nobody counts for how long the worker was there."""
    record = _record.get()
    assert record is not None, "workers are metered only where there is a record"
    record.heard(word)
    if alone:
        record.slots += word.seconds


@contextmanager
def working() -> Iterator[None]:
    """Around the time for which there are workers."""
    record = _record.get()
    if record is None:
        yield
    else:
        with record.working():
            yield


class Stopwatch:
    """Seconds and CPU seconds of this process, while it is not paused."""

    def __init__(self) -> None:
        self._begin = (perf_counter(), process_time())
        self._sum = [0.0, 0.0]

    def pause(self) -> None:
        self._sum[0] += perf_counter() - self._begin[0]
        self._sum[1] += process_time() - self._begin[1]

    def resume(self) -> None:
        self._begin = (perf_counter(), process_time())

    def take(self) -> tuple[float, float]:
        self.pause()
        self.resume()
        seconds, cpu = self._sum
        self._sum = [0.0, 0.0]
        return seconds, cpu
