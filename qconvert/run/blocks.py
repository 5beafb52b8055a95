"""What a machine writes of its units where others write to the same files: whole blocks that no other
unit has a part in. The bytes at the ends of a run are handed over, and one machine writes all of those.

Two hosts must not write to one page of a file through their page caches (run/division.py says why). A
shard leaves such units to `finish`. On a cluster there is an end wherever two batches meet: a few KiB
beside 64 MiB."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from qconvert.run.division import BLOCK_BYTES
from qconvert.run.sink import Sink
from qconvert.run.worker import Batch

# Bytes [start, stop) of a file.
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class End:
    """Bytes that belong at `offset` of a file, for another machine to write."""

    file: int
    offset: int
    data: bytes


def own_blocks(batch: Batch) -> dict[int, list[Range]]:
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
    _ends: list[End]

    def own(self, blocks: Mapping[int, Sequence[Range]]) -> None:
        """What may be written from now on. All that was taken before has been flushed, and asked for."""
        self._own, self._ends = blocks, []

    def ends(self) -> tuple[End, ...]:
        """What was kept since this was last asked. All that was taken has been flushed."""
        found, self._ends = self._ends, []
        return tuple(found)

    def put(self, file: int, memory: memoryview, base: int, first: int, last: int) -> None:
        for start, stop, mine in parts_of(base + first, base + last, self._own.get(file, ())):
            if mine:
                super().put(file, memory, base, start - base, stop - base)
            else:
                self._ends.append(End(file, start, bytes(memory[start - base : stop - base])))

    def read(self, file: int, at: int, size: int) -> bytes:
        found = bytearray(super().read(file, at, size))
        for end in self._ends:
            low, high = max(at, end.offset), min(at + size, end.offset + len(end.data))
            if end.file == file and low < high:
                found[low - at : high - at] = end.data[low - end.offset : high - end.offset]
        return bytes(found)
