"""Source bytes, read at known offsets, from files and objects that must not change meanwhile."""

from __future__ import annotations

import mmap
import os
import sys
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import Shard
from qconvert.core.errors import RunError
from qconvert.core.graph import Source, aligned
from qconvert.core.links import reading
from qconvert.core.profiling import OFF, READ, Meter
from qconvert.plan.units import FAR_REREAD_BYTES, Copy, Unit, kept_in, read_whole
from qconvert.run.work.files import OpenFiles

# One block of memory a worker reuses for everything it reads and computes; its size is the promise
# kept to --memory. Fresh pages are the slowest memory there is (measured 0.25 to 1.9 GB/s on 4 KiB
# pages against 9 GB/s reused), so they are taken once, and as huge pages where the kernel grants them.

_HUGE = 2 << 20


def fresh_pages(size: int) -> memoryview:
    """`size` bytes of zeroed memory, page-aligned, given back with the last view of it."""
    pages = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= _HUGE:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)[:size]


class Arena:
    """A bump allocator over one anonymous mapping. `reset` frees everything at once, or all that was
    taken after a `mark`."""

    def __init__(self, size: int) -> None:
        self.size = max(aligned(size), mmap.PAGESIZE)
        self._view = fresh_pages(self.size)
        self._used = 0

    def take(self, size: int) -> memoryview:
        """`size` bytes, aligned for any dtype. Raises RunError when the arena is used up, which only
        a plan that understates its needs can cause."""
        start = self._used
        if start + size > self.size:
            raise RunError(f"buffers need {start + size} bytes, the arena has {self.size}")
        self._used = start + aligned(size)
        return self._view[start : start + size]

    def mark(self) -> int:
        return self._used

    def reset(self, mark: int = 0) -> None:
        self._used = mark


# Bytes of objects in a store, asked for before they are needed, in a bounded piece of memory. A
# request takes tens of milliseconds before its first byte comes, and one stream is slower than the
# network: so several pieces are on their way at any time. A conversion says which ranges it will read
# (`expect`), and nothing else is fetched; ranges that touch are one. Without that (validators,
# calibrations) the rest of a tensor is fetched ahead of who reads it from front to back.

PIECE_BYTES = 4 << 20
# The least that is fetched at a time where nothing was said of what is read.
LEAST_BYTES = 256 << 10
# Requests at a time; so many pieces are held.
AT_ONCE = 6
# What a process takes for it: pieces, each one twice while it arrives, and the client's libraries
# (s3fs 2026.9: 40 MB; 66 MB while it fetches).
FETCH_BYTES = 2 * AT_ONCE * PIECE_BYTES + (44 << 20)
_MOST_QUEUED = 64

Range = tuple[int, int, int]  # number of the shard, first byte, end


@dataclass(eq=False, slots=True)
class _Piece:
    """A range that is fetched by one request; `left` bytes of it are still to be read."""

    shard: int
    start: int
    stop: int
    left: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class RangeFetcher:
    """Reads objects for one reader, from one thread."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._known: dict[int, list[_Piece]] = {}
        self._queue: deque[_Piece] = deque()
        self._held: OrderedDict[_Piece, Future[bytes]] = OrderedDict()
        self._bytes = 0
        self._expecting = False
        self._pool: ThreadPoolExecutor | None = None

    def expect(self, ranges: Iterable[Range]) -> None:
        """These ranges are read after what was expected before, about in this order, each byte as often
        as they hold it."""
        self._expecting = True
        for piece in pieces_of(ranges):
            self._queue.extend(self._made_known(piece))
        self._go_ahead()

    def _made_known(self, new: _Piece) -> list[_Piece]:
        """Return what of a piece no other holds, as pieces; those that hold the rest are read once
        more."""
        known = self._known.setdefault(new.shard, [])
        made: list[_Piece] = []
        start = new.start
        while start < new.stop:
            at = bisect_right(known, start, key=_start)
            if at and start < known[at - 1].stop:
                other = known[at - 1]
                stop = min(new.stop, other.stop)
                other.left += stop - start
            else:
                stop = min(new.stop, known[at].start) if at < len(known) else new.stop
                left = new.left if (start, stop) == (new.start, new.stop) else stop - start
                made.append(_Piece(new.shard, start, stop, left))
                known.insert(at, made[-1])
            start = stop
        return made

    def read(self, shard: int, start: int, into: memoryview, end: int) -> None:
        """Fill `into` with the object's bytes from `start` on; its tensor ends at byte `end`. Raises as
        the store does, and RunError where the object ends before."""
        while into.nbytes:
            piece = self._piece_at(shard, start, start + into.nbytes, end)
            data = self._data(piece)
            if len(data) != piece.size:
                url = self._shards[shard].name
                raise RunError(f"{url}: expected {piece.size} bytes from byte {piece.start} on, found "
                               f"{len(data)}")  # fmt: skip
            count = min(into.nbytes, piece.stop - start)
            into[:count] = memoryview(data)[start - piece.start :][:count]
            piece.left -= count
            into, start = into[count:], start + count
            self._go_ahead()

    def close(self) -> None:
        self._forget()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _forget(self) -> None:
        for future in self._held.values():
            future.cancel()
        self._known.clear()
        self._queue.clear()
        self._held.clear()
        self._bytes = 0

    def _piece_at(self, shard: int, start: int, stop: int, end: int) -> _Piece:
        """The piece that holds byte `start`; a new one where that was not expected."""
        known = self._known.setdefault(shard, [])
        at = bisect_right(known, start, key=_start)
        if at and start < known[at - 1].stop:
            return known[at - 1]
        if not self._expecting:
            # Who reads small tensors reads their neighbours next: they come with them.
            stop = min(max(end, start + LEAST_BYTES), max(end, self._shards[shard].size))
        if at < len(known):
            stop = min(stop, known[at].start)
        made = [
            _Piece(shard, first, last, max(0, min(last, end) - first))
            for first in range(start, stop, PIECE_BYTES)
            for last in (min(first + PIECE_BYTES, stop),)
        ]
        known[at:at] = made
        self._queue.extendleft(reversed(made))
        while not self._expecting and len(self._queue) > _MOST_QUEUED:
            self._drop(self._queue.pop())
        return made[0]

    def _drop(self, piece: _Piece) -> None:
        self._known[piece.shard].remove(piece)

    def _data(self, piece: _Piece) -> bytes:
        if piece not in self._held:
            while self._held and self._bytes + piece.size > AT_ONCE * PIECE_BYTES:
                self._let_go(self._read_through() or next(iter(self._held)))
            self._ask_for(piece)
            if piece in self._queue:
                self._queue.remove(piece)
            self._go_ahead()
        self._held.move_to_end(piece)
        return self._held[piece].result()

    def _go_ahead(self) -> None:
        """Ask for what comes next, as far as there is room."""
        while self._queue:
            while self._bytes + self._queue[0].size > AT_ONCE * PIECE_BYTES:
                done = self._read_through()
                if done is None:
                    return
                self._let_go(done)
            self._ask_for(self._queue.popleft())

    def _read_through(self) -> _Piece | None:
        """The piece that was read to its end the longest time ago."""
        return next((piece for piece in self._held if piece.left <= 0), None)

    def _let_go(self, piece: _Piece) -> None:
        future = self._held.pop(piece)
        if not future.cancel():
            future.exception()  # it is on its way: until it is here, it takes its memory
        self._bytes -= piece.size
        self._drop(piece)

    def _ask_for(self, piece: _Piece) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AT_ONCE)
        remote = self._shards[piece.shard].remote
        assert remote is not None
        self._held[piece] = self._pool.submit(remote.read, piece.start, piece.stop)
        self._bytes += piece.size


def _start(piece: _Piece) -> int:
    return piece.start


def pieces_of(ranges: Iterable[Range]) -> list[_Piece]:
    """Ranges as pieces, in the order in which they are first needed: what touches is one, what is large
    is cut."""
    found: list[tuple[int, _Piece]] = []
    for shard, start, stop, order in sorted((*r, order) for order, r in enumerate(ranges)):
        at = start
        while at < stop:
            first, last = found[-1] if found else (0, None)
            if last is not None and last.shard == shard and last.start <= at < last.stop:
                part = min(stop, last.stop) - at
                last.left += part
                found[-1] = (min(first, order), last)
            elif (
                last is not None
                and last.shard == shard
                and last.stop == at
                and last.size < PIECE_BYTES
            ):
                part = min(stop - at, PIECE_BYTES - last.size)
                last.stop, last.left = last.stop + part, last.left + part
                found[-1] = (min(first, order), last)
            else:
                part = min(stop - at, PIECE_BYTES)
                found.append((order, _Piece(shard, at, at + part, part)))
            at += part
    return [piece for _, piece in sorted(found, key=lambda pair: pair[0])]


def ranges_of(units: Iterable[Unit], room: int = 0) -> Iterator[Range]:
    """Return what units read of their sources, in their order; of one step the small parts first, since
    a part of its work needs some of each. What a step reads more than once is read once where it has
    `room` to keep it."""
    for unit in units:
        for step in unit.steps:
            if isinstance(step, Copy):
                yield _range(step.source, step.start, step.stop)
                continue
            args = [arg for node in step.nodes for arg in node.args]
            once = dict.fromkeys(kept_in(step, room, FAR_REREAD_BYTES))
            found = [
                _range(origin, low, high)
                for origin, low, high in once
                if isinstance(origin, Source)
            ]
            found += [
                _range(origin, low, high)
                for arg in args
                if not (read_whole(arg) and arg.pieces[0] in once)
                for origin, low, high in arg.bytes_range(0, arg.type.nbytes)
                if isinstance(origin, Source)
            ]
            yield from sorted(found, key=lambda each: each[2] - each[1])


def _range(source: Source, start: int, stop: int) -> Range:
    return source.shard, source.offset + start, source.offset + stop


_OPEN_FILES = 64
# Of what loops take for an array of numbers of up to eight bytes.
_ALIGNED = 8
# Linux 5.14, include/uapi/asm-generic/mman-common.h; Python 3.11 has no name for it.
_MADV_POPULATE_READ = 22


class Reader:
    """Reads slices of sources. Descriptors are opened on first use and kept. `far`: some are objects of
    a store, of which each byte is asked for as often as a unit's ranges hold it. `maps`: whether files
    may be mapped into this process."""

    def __init__(self, shards: Sequence[Shard], *, maps: bool = False, meter: Meter = OFF) -> None:
        self._shards, self._meter = shards, meter
        self._maps = maps and sys.platform == "linux"
        self._open = OpenFiles(self._open_shard, os.close, _OPEN_FILES)
        self._fetching = RangeFetcher(shards)
        self.far = any(shard.remote is not None for shard in shards)

    def expect(self, units: Iterable[Unit], room: int = 0) -> None:
        """These units are run next: what they read of a store is asked for now. A step has so much
        `room` to keep what it reads more than once."""
        if self.far:
            shards = self._shards
            ranges = (r for r in ranges_of(units, room) if shards[r[0]].remote is not None)
            self._fetching.expect(ranges)

    def _open_shard(self, number: int) -> int:
        shard = self._shards[number]
        with reading(shard.path, RunError):
            fd = shard.open()
        now = os.fstat(fd)
        if (now.st_size, now.st_mtime_ns) != (shard.size, shard.mtime_ns):
            os.close(fd)
            raise RunError(
                f"{shard.path} changed while it was being converted; leave the source alone and "
                "start again (qconvert clean OUT first)"
            )
        return fd

    def read(self, source: Source, start: int, into: memoryview) -> None:
        """Fill `into` with the source's bytes from `start` on. Raises RunError on a short read."""
        with self._meter.step(READ, into.nbytes):
            self._read(source, start, into)

    def _read(self, source: Source, start: int, into: memoryview) -> None:
        at = source.offset + start
        if self._shards[source.shard].remote is not None:
            end = source.offset + source.type.nbytes
            self._fetching.read(source.shard, at, into, end)
            return
        fd = self._open[source.shard]
        while into.nbytes:
            try:
                done = os.preadv(fd, [into], at)
            except OSError as error:
                path = self._shards[source.shard].path
                raise RunError(
                    f"{path}: tensor {source.name!r}: cannot be read: {error.strerror or error}"
                ) from error
            if not done:
                path = self._shards[source.shard].path
                raise RunError(f"{path}: tensor {source.name!r}: the file ends at byte {at}")
            into, at = into[done:], at + done

    def mapped(self, source: Source, start: int, stop: int) -> memoryview | None:
        """Bytes [start, stop) of a source where the page cache has them, for what is read twice: a copy
        of 12 MB is not in the processor's cache any more when it is needed again (NVFP4 takes 9 to 20 %
        less time). What is written to them is seen here alone. None where they have to be read: mapping
        is not allowed, or they are of a store, lie at an odd address, or are not all there.

        The kernel reads them all before this returns, and says so if it cannot: a file that is cut
        after that ends the process (SIGBUS)."""
        with self._meter.step(READ, stop - start):
            return self._mapped(source, start, stop)

    def _mapped(self, source: Source, start: int, stop: int) -> memoryview | None:
        at = source.offset + start
        if not self._maps or self._shards[source.shard].remote is not None or at % _ALIGNED:
            return None
        fd = self._open[source.shard]
        before = at % mmap.PAGESIZE
        size = before + stop - start
        try:
            os.posix_fadvise(fd, at, stop - start, os.POSIX_FADV_WILLNEED)
            pages = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, offset=at - before)
            pages.madvise(_MADV_POPULATE_READ)
        except (OSError, ValueError):  # an older kernel, a shorter file: reading says what is wrong
            return None
        return memoryview(pages)[before:]

    def close(self) -> None:
        self._fetching.close()
        self._open.close()
