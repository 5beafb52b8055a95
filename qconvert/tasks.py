"""Validators' work on tensor data: cut into tasks, done in the order of the layers by worker
processes, each with a bounded buffer.

Tasks of one layer stand together whatever validator they are of, so that what one reads another finds
in the page cache, and a disk is read once.
"""

from __future__ import annotations

import os
import resource
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from typing import Any, Protocol

from qconvert.checkpoint import Shard
from qconvert.errors import RunError
from qconvert.findings import Finding, Measure, OnlyRead
from qconvert.graph import Source
from qconvert.names import natural_key, parse
from qconvert.run.reader import Reader
from qconvert.run.worker import die_with

CHUNK = 4 << 20

# What a worker takes beside its task: interpreter, numpy, and buffers for the task itself.
_INTERPRETER = 48 << 20
# Below this much to read, starting processes costs more than they save.
_WORTH_A_WORKER = 64 << 20
# Tasks are sent in batches: there may be 100,000 of them.
_BATCH_BYTES, _BATCH_TASKS = 64 << 20, 512

Shards = tuple[Sequence[Shard], Sequence[Shard]]
Result = Finding | Measure | OnlyRead


class Room:
    """What a task works with: both folders' tensors, and a buffer for each that tasks share in turn."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._buffers: dict[Reader, memoryview] = {}
        self._held: dict[Reader, tuple[Source, int, int]] = {}

    @cached_property
    def output(self) -> Reader:
        return Reader(self._shards[0])

    @cached_property
    def source(self) -> Reader:
        return Reader(self._shards[1])

    def chunks(
        self, reader: Reader, tensor: Source, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, memoryview]]:
        """Bytes [start, stop) of a tensor, CHUNK at a time with their offset; each is good until the
        next, and not to be written to: what the buffer holds already is not read again, so tasks
        about one small tensor share a read."""
        stop = tensor.type.nbytes if stop is None else stop
        for at in range(start, stop, CHUNK):
            size = min(CHUNK, stop - at)
            buffer = self._buffers.get(reader)
            if buffer is None:
                buffer = self._buffers[reader] = memoryview(bytearray(CHUNK))
            if self._held.get(reader) != (tensor, at, size):
                self._held.pop(reader, None)  # should reading fail
                reader.read(tensor, at, buffer[:size])
                self._held[reader] = tensor, at, size
            yield at, buffer[:size].toreadonly()

    def close(self) -> None:
        for name in ("output", "source"):
            reader = self.__dict__.pop(name, None)
            if reader is not None:
                reader.close()


class Task(Protocol):
    """A frozen dataclass that can be sent to another process. `where` is the tensor it is about, in
    either folder; `nbytes` what it reads; `scratch` bytes it holds at a time, buffer apart."""

    @property
    def where(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def scratch(self) -> int: ...

    def run(self, room: Room) -> Iterator[Result]: ...


class Progress(Protocol):
    """Told how far the tasks are, in bytes."""

    def start(self, total: int, done: int) -> None: ...

    def wrote(self, nbytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Batch:
    tasks: tuple[tuple[int, Task], ...]
    nbytes: int


def run_tasks(
    tasks: Sequence[tuple[int, Task]],
    shards: Shards,
    *,
    jobs: int | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[int, Result]]:
    """Do all tasks, each with a number that its results carry; results come in the order of the
    layers. Raises RunError where data cannot be read, a worker dies, or one task needs more than
    `memory`."""
    ordered = sorted(tasks, key=lambda task: _place(task[1].where))
    total = sum(task.nbytes for _, task in ordered)
    workers = _workers(ordered, total, jobs, memory)
    if progress is not None:
        progress.start(total, 0)
    batches = list(_batches(ordered, total // max(1, 4 * workers)))
    if workers == 1:
        room = Room(shards)
        try:
            for batch in batches:
                yield from _do(batch, room)
                if progress is not None:
                    progress.wrote(batch.nbytes)
        finally:
            room.close()
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _enter, (shards, os.getpid()))
    running: deque[tuple[_Batch, Future[list[tuple[int, Result]]]]] = deque()
    try:
        for batch in batches:
            with _undisturbed():
                running.append((batch, pool.submit(_work, batch)))
            if len(running) >= 3 * workers:
                yield from _finished(running, progress)
        while running:
            yield from _finished(running, progress)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _place(name: str) -> tuple[int, tuple[Any, ...]]:
    """By layer first: CPU experts (`blk.3.`) and draft layers' names follow other customs."""
    layer = parse(name).layer
    return -1 if layer is None else layer, natural_key(name)


def _workers(
    tasks: Sequence[tuple[int, Task]], total: int, jobs: int | None, memory: int | None
) -> int:
    """How many processes. `memory` is for all of them, this one and what it holds included."""
    largest = max(tasks, key=lambda task: task[1].scratch)[1]
    work = 2 * CHUNK + largest.scratch
    count = jobs or max(1, min(len(os.sched_getaffinity(0)), total // _WORTH_A_WORKER))
    if memory is None:
        return int(count)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if own + work > memory:
        raise RunError(
            f"{largest.where!r}: looking at it takes {work >> 20} MiB beside the {own >> 20} MiB of "
            f"names and headers, more than granted; give --memory {-(-(own + work) >> 20)}MiB"
        )
    # One worker is this process itself.
    return int(max(1, min(count, (memory - own) // (_INTERPRETER + work))))


def _batches(tasks: Sequence[tuple[int, Task]], share: int) -> Iterator[_Batch]:
    held: list[tuple[int, Task]] = []
    size = 0
    for task in tasks:
        held.append(task)
        size += task[1].nbytes
        if size >= min(_BATCH_BYTES, share) or len(held) >= _BATCH_TASKS:
            yield _Batch(tuple(held), size)
            held, size = [], 0
    if held:
        yield _Batch(tuple(held), size)


def _finished(
    running: deque[tuple[_Batch, Future[list[tuple[int, Result]]]]], progress: Progress | None
) -> Iterator[tuple[int, Result]]:
    batch, future = running.popleft()
    try:
        found = future.result()
    except BrokenProcessPool as error:
        raise RunError(
            f"a worker process died at or soon after {batch.tasks[0][1].where!r}, most likely for "
            "want of memory; give fewer --jobs, or --memory"
        ) from error
    yield from found
    if progress is not None:
        progress.wrote(batch.nbytes)


def _do(batch: _Batch, room: Room) -> Iterator[tuple[int, Result]]:
    for number, task in batch.tasks:
        for item in task.run(room):
            yield number, item


_room: Room | None = None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A worker is started without Ctrl-C, which is this process's to answer: it would end in a
    traceback of its own. A Ctrl-C meanwhile comes as soon as this is over."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _enter(shards: Shards, parent: int) -> None:
    """Set a worker up. It ends with the process that started it, however that ends."""
    global _room
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    _room = Room(shards)


def _work(batch: _Batch) -> list[tuple[int, Result]]:
    assert _room is not None
    return list(_do(batch, _room))
