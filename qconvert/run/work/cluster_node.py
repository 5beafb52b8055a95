"""Node of a cluster, in a run that another machine leads: it looks whether it sees the same
files, and runs batches of units. Standard library and this package alone: whatever brings it there."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from qconvert import __version__
from qconvert.checkpoint.checkpoint import Shard, as_they_are
from qconvert.core.errors import QConvertError
from qconvert.core.profiling import FOR_WORK, Word
from qconvert.run.work.division import BLOCK_BYTES
from qconvert.run.work.files import Files
from qconvert.run.work.meters import Meters
from qconvert.run.work.sink import PendingMessages, Sink
from qconvert.run.work.worker import Batch, UnitDone, WorkerFailed, WorkerSetup, broken, unit_runner

# --- Blocks of files that several machines write --------------------------------------------------


# Bytes [start, stop) of a file.
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class EdgeBytes:
    """Bytes that belong at `offset` of a file, for another machine to write."""

    file: int
    offset: int
    data: bytes


def aligned_blocks(batch: Batch) -> dict[int, list[Range]]:
    """Of each file, the whole blocks that the units of a batch fill alone, as ranges in order."""
    written = sorted(
        (place.file, place.offset, place.offset + output.type.nbytes)
        for _, unit in batch.units
        for name, output in unit.outputs
        if not (place := batch.places[name]).linked
    )
    joined: list[tuple[int, int, int]] = []
    for file, start, stop in written:
        if joined and joined[-1][0] == file and joined[-1][2] == start:
            joined[-1] = (file, joined[-1][1], stop)
        else:
            joined.append((file, start, stop))
    found: dict[int, list[Range]] = {}
    for file, start, stop in joined:
        low, high = -(-start // BLOCK_BYTES) * BLOCK_BYTES, stop - stop % BLOCK_BYTES
        if low < high:
            found.setdefault(file, []).append((low, high))
    return found


def parts_of(start: int, stop: int, own: Sequence[Range]) -> Iterator[tuple[int, int, bool]]:
    """Bytes [start, stop) cut where ranges begin and end; true for what is in one."""
    at = start
    for low, high in own[max(0, bisect_right(own, (start, stop)) - 1) :]:
        if low >= stop:
            break
        if high <= at or at == stop:
            continue
        if at < low:
            yield at, low, False
        yield max(at, low), min(high, stop), True
        at = min(high, stop)
    if at < stop:
        yield at, stop, False


class BlockSink(Sink):
    """A sink that writes only the blocks it was told of, and keeps the rest."""

    _own: Mapping[int, Sequence[Range]]
    _ends: list[EdgeBytes]

    def own(self, blocks: Mapping[int, Sequence[Range]]) -> None:
        """Return what may be written from now on. All that was taken before has been flushed, and asked
        for."""
        self._own, self._ends = blocks, []

    def ends(self) -> tuple[EdgeBytes, ...]:
        """Return what was kept since this was last asked. All that was taken has been flushed."""
        found, self._ends = self._ends, []
        return tuple(found)

    def put(self, file: int, memory: memoryview, base: int, first: int, last: int) -> None:
        for start, stop, mine in parts_of(base + first, base + last, self._own.get(file, ())):
            if mine:
                super().put(file, memory, base, start - base, stop - base)
            else:
                self._ends.append(EdgeBytes(file, start, bytes(memory[start - base : stop - base])))

    def read(self, file: int, at: int, size: int) -> bytes:
        found = bytearray(super().read(file, at, size))
        for end in self._ends:
            low, high = max(at, end.offset), min(at + size, end.offset + len(end.data))
            if end.file == file and low < high:
                found[low - at : high - at] = end.data[low - end.offset : high - end.offset]
        return bytes(found)


_ALIKE = (
    "every node must see source and output under the same path, on a file system that all share"
)


@dataclass(frozen=True)
class NodeCheck:
    """Expectations of a node: the version of qconvert, files with these contents that it may write to,
    and the shards of the source."""

    version: str
    files: Sequence[tuple[Path, bytes]]
    shards: Sequence[Shard]


def check_node(probe: NodeCheck) -> str | None:
    """Why this machine cannot work for the run, or None. The text goes behind the node's name."""
    if __version__ != probe.version:
        return (
            f"has qconvert {__version__}, expected {probe.version}: install the same on every node"
        )
    for path, wanted in probe.files:
        folder = path.parent.parent
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return f"does not see the output folder {folder}: {_ALIKE}"
        except OSError as error:
            return f"cannot write in {folder}: {error.strerror or error}"
        try:
            found = os.pread(fd, len(wanted) + 1, 0)
        finally:
            os.close(fd)
        if found != wanted:
            return f"sees another folder as {folder}: {_ALIKE}"
    try:
        far = [shard for shard in probe.shards if shard.remote is not None]
        others = [now for shard, now in zip(far, as_they_are(far), strict=True) if now != shard]
    except QConvertError as error:
        return f"cannot read the source: {error}"
    if others:
        return f"sees another object as {others[0].name}: every node must reach the same store"
    for shard in probe.shards:
        if shard.remote is not None:
            continue
        try:
            status = (shard.real or shard.path).stat()
        except OSError as error:
            return f"cannot read {shard.path}: {error.strerror or error}; {_ALIKE}"
        if (status.st_size, status.st_mtime_ns) != (shard.size, shard.mtime_ns):
            return f"sees another file as {shard.path}: {_ALIKE}"
    return None


@dataclass(frozen=True)
class BatchResult:
    """Result of a batch on a node: its finished units, whose blocks are synced, the bytes that the
    leading machine is to write, how many bytes were made, what went wrong, and, where the run is
    profiled, what was spent."""

    done: tuple[UnitDone, ...] = ()
    ends: tuple[EdgeBytes, ...] = ()
    made: int = 0
    failed: WorkerFailed | None = None
    word: Word | None = None


class NodeWorker:
    """Runs batches in one process. Nothing here raises: errors are returned, as text."""

    def begin(self, setup: WorkerSetup) -> WorkerFailed | None:
        """Take memory and import what units need."""
        try:
            self._paths = setup.paths
            self._made: list[int] = []
            self._files = Files()
            self._meters = Meters(setup.metered)
            self._sink = BlockSink(self._files, setup.paths, setup.window, self._meters)
            self._runner = unit_runner(setup, self._sink, self._made.append, self._meters)
        except QConvertError as error:
            return WorkerFailed(type(error).__name__, str(error))
        except (MemoryError, OSError, RuntimeError) as error:
            return broken(error, _here())
        self._waiting = ExitStack()
        self._wait()
        return None

    def _wait(self) -> None:
        self._waiting.enter_context(self._meters.own.step(FOR_WORK))

    def run(self, batch: Batch) -> BatchResult:
        """Run a batch and make it last: a sync on another machine knows nothing of this one's cache."""
        self._waiting.close()
        left = self._run(batch)
        if self._meters.on:
            left = replace(left, word=self._meters.word())
        self._wait()
        return left

    def _run(self, batch: Batch) -> BatchResult:
        underway: PendingMessages[UnitDone] = PendingMessages(self._sink)
        self._made.clear()
        self._sink.own(aligned_blocks(batch))
        failed: WorkerFailed | None = None
        try:
            try:
                self._runner.expect(unit for _, unit in batch.units)
                for number, unit in batch.units:
                    underway.add(UnitDone(number, self._runner.run(unit, batch.places)))
            except QConvertError as error:
                failed = WorkerFailed(type(error).__name__, str(error))
            done = tuple(underway.flush())
            self._sync(sorted({file for each in done for file in each.result.files}))
        except QConvertError as error:
            return BatchResult(failed=failed or WorkerFailed(type(error).__name__, str(error)))
        except (MemoryError, OSError, RuntimeError) as error:
            return BatchResult(failed=broken(error, _here()))
        return BatchResult(done, self._sink.ends(), sum(self._made), failed)

    def _sync(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            path = self._paths[number]
            fd = self._files.open(path)
            try:
                self._files.sync(fd, path)
            finally:
                self._files.close(fd)


def _here() -> str:
    return f" on {os.uname().nodename}"
