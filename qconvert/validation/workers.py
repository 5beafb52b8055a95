"""Validators' work on tensor data: cut into tasks, done in the order of the layers by worker
processes, each with a bounded buffer.

Tasks about one matrix are done together, whichever validators they belong to, and a byte is read once
for all of them: a task that only has to see every byte of a tensor in order (`Watch`) is shown what
others read, and reads by itself only what no other task did.
"""

from __future__ import annotations

import mmap
import os
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from ctypes import c_byte
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, Protocol

from qconvert.checkpoint.checkpoint import Shard
from qconvert.core.errors import RunError
from qconvert.core.graph import Source
from qconvert.core.names import natural_key, parse, split_parameter
from qconvert.core.own_process import without_current_folder
from qconvert.core.profiling import OFF, Meter, Word, heard, recording
from qconvert.run.work.forkserver import undisturbed
from qconvert.run.work.meters import Meters
from qconvert.run.work.reader import Reader
from qconvert.run.work.worker import die_with
from qconvert.validation.compiled import LOOP_BYTES, LOOPS, worth
from qconvert.validation.findings import Finding, Measure, OnlyRead

CHUNK = 1 << 20

# Memory of a worker in addition to its task: interpreter, numpy, and buffers.
_INTERPRETER = 48 << 20
# Below this many bytes to read, starting processes costs more than it saves.
_WORTH_A_WORKER = 64 << 20
# Tasks are sent in batches: there may be 100,000 of them.
_BATCH_BYTES, _BATCH_TASKS = 64 << 20, 512

# What a batch's tasks found, and what they took if that is measured.
_Found = tuple[list[tuple[int, "Result"]], Word | None]
Shards = tuple[Sequence[Shard], Sequence[Shard]]
Result = Finding | Measure | OnlyRead
SideName = Literal["output", "source"]


class Reads(Protocol):
    """Fills memory with a tensor's bytes from `start` on, or raises RunError."""

    def read(self, tensor: Source, start: int, into: memoryview, /) -> None: ...


class Look(Protocol):
    """Progress that a Watch has seen so far."""

    def take(self, at: int, data: memoryview) -> None:
        """The next bytes, from byte `at` of the tensor on; valid until the call ends, not to be
        written to."""
        ...

    def end(self, folders: Folders) -> Iterator[Result]:
        """The findings once all bytes were seen."""
        ...


class Side:
    """One folder's tensors, read for the current tasks. Looks are shown what any of them reads."""

    def __init__(self, shards: Sequence[Shard], meter: Meter = OFF) -> None:
        self._shards = shards
        self._meter = meter
        self._looking: dict[str, list[_Looking]] = {}

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self._shards, meter=self._meter)

    def read(self, tensor: Source, start: int, into: memoryview) -> None:
        """Fill `into` with the tensor's bytes from `start` on. Raises RunError if they cannot be
        read."""
        self._reader.read(tensor, start, into)
        for looking in self._looking.get(tensor.name, ()):
            with self._meter.step(type(looking.watch).__name__, into.nbytes):
                looking.show(start, into)

    def begin(self, looking: _Looking) -> None:
        self._looking.setdefault(looking.watch.tensor.name, []).append(looking)

    def forget(self) -> None:
        """All current looks are done."""
        self._looking.clear()

    def close(self) -> None:
        if "_reader" in self.__dict__:
            self._reader.close()


class Folders:
    """The data a task works with: both folders' tensors. `meter` measures the steps."""

    def __init__(self, shards: Shards, meter: Meter = OFF) -> None:
        self.output, self.source = (Side(one, meter) for one in shards)
        self.meter = meter
        self._buffer: memoryview | None = None

    def side(self, name: SideName) -> Side:
        return self.output if name == "output" else self.source

    def step(self, task: AnyTask) -> AbstractContextManager[None]:
        """Around the work on a task."""
        return self.meter.step(type(task).__name__)

    def finish(self, looking: _Looking) -> None:
        """Read the rest of what a look must be shown."""
        if self._buffer is None:
            self._buffer = memoryview(bytearray(CHUNK))
        watch = looking.watch
        while (left := looking.left) is not None:
            start, stop = left
            into = self._buffer[: min(CHUNK, stop - start)]
            self.side(watch.side).read(watch.tensor, start, into)

    def close(self) -> None:
        self.output.close()
        self.source.close()


class Work(Protocol):
    """A frozen dataclass that can be sent to another process. `where` is the tensor it is about, in
    either folder; `nbytes` how many it processes; `scratch` how many it holds at a time."""

    @property
    def where(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def scratch(self) -> int: ...


class Task(Work, Protocol):
    """Work that reads for itself; preferably a tensor's bytes once, in order, so that looks can
    follow. One with a true `computes` has compiled loops to compute in."""

    def run(self, folders: Folders) -> Iterator[Result]: ...


@dataclass(frozen=True, kw_only=True)
class Watch(ABC):
    """Work that has to see bytes `spans` (ascending; None: all) of one tensor, once and in order.
    `grouped_with` is a tensor of the folder whose tasks read it as well, if it has another name."""

    tensor: Source
    side: SideName = "output"
    spans: tuple[tuple[int, int], ...] | None = None
    grouped_with: str = ""

    @property
    def where(self) -> str:
        return self.tensor.name

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return ((0, self.tensor.type.nbytes),) if self.spans is None else self.spans

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    @abstractmethod
    def scratch(self) -> int:
        """Bytes its look holds at a time, for CHUNK bytes that it is shown."""

    @abstractmethod
    def look(self) -> Look:
        """Begin."""


class _Looking:
    def __init__(self, watch: Watch) -> None:
        self.watch, self.look = watch, watch.look()
        self._ranges = deque(watch.ranges)
        self._at = self._ranges[0][0] if self._ranges else 0

    @property
    def left(self) -> tuple[int, int] | None:
        """The next bytes to show it, to the end of its range; None: nothing left."""
        while self._ranges and self._at == self._ranges[0][1]:
            self._ranges.popleft()
            self._at = self._ranges[0][0] if self._ranges else 0
        return (self._at, self._ranges[0][1]) if self._ranges else None

    def show(self, start: int, data: memoryview) -> None:
        """Bytes of its tensor from `start` on; bytes that are not next are ignored."""
        while (left := self.left) is not None:
            at, stop = left
            if not start <= at < start + data.nbytes:
                return
            part = data[at - start : stop - start]
            self.look.take(at, part.toreadonly())
            self._at = at + part.nbytes


AnyTask = Task | Watch
Numbered = tuple[int, AnyTask]


class Progress(Protocol):
    def start(self, total: int, done: int) -> None: ...

    def wrote(self, nbytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Batch:
    """Tasks with the numbers of their results; those about one matrix together."""

    groups: tuple[tuple[Numbered, ...], ...]
    nbytes: int

    @property
    def where(self) -> str:
        return self.groups[0][0][1].where


def run_tasks(
    tasks: Sequence[Numbered],
    shards: Shards,
    *,
    jobs: int | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[int, Result]]:
    """Do all tasks, each with a number that its results carry; results come in the order of the
    layers. Raises RunError where data cannot be read, a worker dies, or one task needs more than
    `memory`."""
    groups = grouped(tasks)
    total = sum(task.nbytes for _, task in tasks)
    workers = _workers(groups, total, jobs, memory)
    computed = sum(task.nbytes for _, task in tasks if getattr(task, "computes", False))
    loops = worth(computed, workers) and _loops_fit(groups, workers, memory)
    record = recording()
    if record is not None:
        record.runs.append(
            {"kind": "validation", "tasks": len(tasks), "bytes_to_read": total, "jobs": workers}
        )
    if progress is not None:
        progress.start(total, 0)
    batches = list(_batches(groups, total // max(1, 4 * workers)))
    if workers == 1:
        meters = Meters(record is not None)
        folders = Folders(shards, meters.own)
        LOOPS.use(loops)
        try:
            for batch in batches:
                yield from _do(batch, folders)
                if progress is not None:
                    progress.wrote(batch.nbytes)
                if meters.on:
                    heard(meters.word())
        finally:
            LOOPS.use(False)
            folders.close()
        return
    context = get_context("spawn")
    stop = context.RawValue("b", 0)
    given = (shards, os.getpid(), record is not None, loops, stop)
    with without_current_folder():  # multiprocessing's tracker of its semaphores is started here
        pool = ProcessPoolExecutor(workers, context, _enter, given)
    running: deque[tuple[_Batch, Future[_Found]]] = deque()
    try:
        for batch in batches:
            with undisturbed(), without_current_folder():
                running.append((batch, pool.submit(_work, batch)))
            if len(running) >= 3 * workers:
                yield from _finished(running, progress)
        while running:
            yield from _finished(running, progress)
    except BaseException:
        # Workers are not killed: in the middle of an answer that would hold up this process for ever.
        stop.value = 1
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def grouped(tasks: Sequence[Numbered]) -> list[tuple[Numbered, ...]]:
    """Tasks about one matrix, its scales included, in the order of the layers."""
    found: dict[str, list[Numbered]] = {}
    for numbered in tasks:
        found.setdefault(_matrix(numbered[1]), []).append(numbered)
    return [tuple(found[name]) for name in sorted(found, key=_place)]


def _matrix(task: AnyTask) -> str:
    """The matrix that a task's weights, scales and shapes are part of; shards for NUMA nodes count as
    one matrix."""
    name = task.grouped_with or task.where if isinstance(task, Watch) else task.where
    return split_parameter(name)[0].partition(".numa.")[0]


def _place(name: str) -> tuple[int, str]:
    """By layer first: CPU experts (`blk.3.`) and draft layers' names follow other conventions."""
    layer = parse(name).layer
    return -1 if layer is None else layer, natural_key(name)


def _workers(
    groups: Sequence[Sequence[Numbered]], total: int, jobs: int | None, memory: int | None
) -> int:
    """Number of processes. `memory` is for all of them, this one and what it holds included."""
    work, where = max((_scratch(group), group[0][1].where) for group in groups)
    count = jobs or max(1, min(len(os.sched_getaffinity(0)), total // _WORTH_A_WORKER))
    if memory is None:
        return int(count)
    own = _resident()
    if own + work > memory:
        raise RunError(
            f"{where!r}: checking it takes {work >> 20} MiB in addition to {own >> 20} MiB for "
            f"names and headers, more than granted; give --memory {-(-(own + work) >> 20)}MiB"
        )
    # One worker is this process itself.
    return int(max(1, min(count, (memory - own) // (_INTERPRETER + work))))


def _loops_fit(groups: Sequence[Sequence[Numbered]], workers: int, memory: int | None) -> bool:
    """Tell whether compiled loops fit into the memory granted, in each process that works."""
    if memory is None:
        return True
    each = max(map(_scratch, groups)) + LOOP_BYTES
    return _resident() + (each if workers == 1 else workers * (_INTERPRETER + each)) <= memory


def _resident() -> int:
    """Bytes this process holds now; memory it once held it can hold again."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def _scratch(group: Sequence[Numbered]) -> int:
    """Bytes that tasks done together hold: one runs at a time, and shows one look what it read."""
    looks = [task.scratch for _, task in group if isinstance(task, Watch)]
    others = [task.scratch for _, task in group if not isinstance(task, Watch)]
    return 2 * CHUNK + max(looks, default=0) + max(others, default=0)


def _batches(groups: Sequence[tuple[Numbered, ...]], share: int) -> Iterator[_Batch]:
    held: list[tuple[Numbered, ...]] = []
    size = count = 0
    for group in groups:
        held.append(group)
        size += sum(task.nbytes for _, task in group)
        count += len(group)
        if size >= min(_BATCH_BYTES, share) or count >= _BATCH_TASKS:
            yield _Batch(tuple(held), size)
            held, size, count = [], 0, 0
    if held:
        yield _Batch(tuple(held), size)


def _finished(
    running: deque[tuple[_Batch, Future[_Found]]], progress: Progress | None
) -> Iterator[tuple[int, Result]]:
    batch, future = running.popleft()
    try:
        found, word = future.result()
    except BrokenProcessPool as error:
        raise RunError(
            f"a worker process died at or soon after {batch.where!r}, most likely out of "
            "memory; give fewer --jobs, or --memory"
        ) from error
    yield from found
    if word is not None:
        heard(word)
    if progress is not None:
        progress.wrote(batch.nbytes)


def _do(
    batch: _Batch, folders: Folders, stop: c_byte | None = None
) -> Iterator[tuple[int, Result]]:
    """Results of a batch's tasks, as far as they are done before `stop` is set."""
    for group in batch.groups:
        if stop is not None and stop.value:
            return
        yield from _together(group, folders)


def _together(group: Sequence[Numbered], folders: Folders) -> Iterator[tuple[int, Result]]:
    """Tasks that read, which looks follow; then what looks have not been shown yet."""
    looks: list[tuple[int, _Looking]] = []
    try:
        for number, task in group:
            if isinstance(task, Watch):
                looks.append((number, _Looking(task)))
                folders.side(task.side).begin(looks[-1][1])
        for number, task in group:
            if not isinstance(task, Watch):
                with folders.step(task):
                    for item in task.run(folders):
                        yield number, item
        for number, looking in looks:
            with folders.step(looking.watch):
                folders.finish(looking)
                for item in looking.look.end(folders):
                    yield number, item
    finally:
        folders.output.forget()
        folders.source.forget()


_folders: Folders | None = None
_meters: Meters | None = None
_stop: c_byte | None = None


def _enter(shards: Shards, parent: int, metered: bool, loops: bool, stop: c_byte) -> None:
    """Set a worker up. It ends with the process that started it, however that ends, and begins no task
    once `stop`, which all share, is set."""
    global _folders, _meters, _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    _meters = Meters(metered)
    _folders = Folders(shards, _meters.own)
    LOOPS.use(loops)


def _work(batch: _Batch) -> _Found:
    assert _folders is not None
    assert _meters is not None
    _meters.resume()
    found = list(_do(batch, _folders, _stop))
    return found, _meters.word() if _meters.on else None
