"""The way out: a worker's output bytes are gathered in large windows and written past the page cache.

Going through the page cache takes fresh memory for every byte written, which is the slowest memory
there is (measured 0.3 to 1.8 GB/s), and a copy. Direct writes need whole, aligned blocks; what a run
of bytes has at its ends beyond those goes through the cache. A thread of its own writes one window
while the next is being filled, so that computing and the disk do not wait for each other.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Generic, TypeVar

from qconvert.core.errors import RunError
from qconvert.core.profiling import FOR_DISK, WRITE
from qconvert.run.work.files import Files, OpenFiles
from qconvert.run.work.meters import Meters
from qconvert.run.work.reader import fresh_pages

# Where direct writes must begin and end. Data in our files starts at a multiple of 4096.
BLOCK = max(4096, mmap.PAGESIZE)
# The most of one window; there is memory for two. A few results of an op's parts (units.PART_BYTES) fit
# one.
WINDOW_BYTES = 8 << 20
MIN_WINDOW_BYTES = 16 * BLOCK
WINDOWS = 2
_OPEN_FILES = 16

T = TypeVar("T")


@dataclass(slots=True)
class Window:
    """Bytes [start, stop) of `memory` belong at byte `base` + start of a file on. `base` is a
    multiple of BLOCK, as is the memory's address. `place` is where in the ring the memory begins, and
    where, once that is known, it ends."""

    memory: memoryview
    place: int
    file: int
    base: int
    start: int
    stop: int


class Sink:
    """Takes bytes for known places in files. `paths` are the files, which exist at full size;
    `window` is in bytes, a multiple of BLOCK."""

    def __init__(
        self, files: Files, paths: Sequence[Path], window: int = WINDOW_BYTES,
        meters: Meters | None = None,
    ) -> None:  # fmt: skip
        assert window % BLOCK == 0
        # The most that `room` gives at once.
        self.limit = window - BLOCK
        # Bytes asked room for so far.
        self.taken = 0
        self._files = files
        self._paths = paths
        meters = meters or Meters(on=False)
        self._meter, self._writing = meters.own, meters.writing if files.beside else meters.own
        self._now: Window | None = None
        self._ring = Ring(WINDOWS * window, window, BLOCK)
        self._full: SimpleQueue[Window | None] = SimpleQueue()
        self._cached = OpenFiles(lambda n: files.open(paths[n]), files.close, _OPEN_FILES)
        self._direct = OpenFiles(lambda n: files.open_direct(paths[n]), files.close, _OPEN_FILES)
        self._go_direct = True
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._moved = Condition()
        self._written = 0

    @property
    def written(self) -> int:
        """Return how many bytes have been written, those taken first. Raises what a write raised."""
        self._check()
        return self._written

    def room(self, file: int, at: int, size: int) -> memoryview:
        """Memory for bytes [at, at + size) of a file, `size` at most `limit`: to be filled before
        the next call of any method here. Raises OutputError where an earlier write failed."""
        assert size <= self.limit
        now = self._now
        if now is not None and (file != now.file or at != now.base + now.stop):
            self.seal()
            now = None
        rest = b""
        if now is not None and now.stop + size > now.memory.nbytes:
            # What does not fill a block goes along into the next window.
            kept = max(now.start, now.stop - now.stop % BLOCK)
            rest = bytes(now.memory[kept : now.stop])
            now.stop = kept
            self._submit(now)
            now = None
        fresh = now is None
        if now is None:
            start = (at - len(rest)) % BLOCK
            place = self._ring.begin(start + len(rest) + size)
            memory = self._ring.memory(place)
            self._now = now = Window(memory, place, file, at - at % BLOCK, start, start + len(rest))
        with self._meter.step(FOR_DISK):
            self._ring.wait(now.place + now.stop + size)
        self._check()
        if fresh:
            now.memory[now.start : now.stop] = rest
        begin = now.stop
        now.stop += size
        self.taken += size
        return now.memory[begin : now.stop]

    def seal(self) -> None:
        """Let go of everything taken so far: it will be written without waiting for more."""
        full, self._now = self._now, None
        if full is not None:
            self._submit(full)

    def flush(self) -> None:
        """Return when everything taken so far has been written."""
        self.seal()
        with self._meter.step(FOR_DISK), self._moved:
            while self._written < self.taken and self._error is None:
                self._moved.wait()
        self._check()

    def read(self, file: int, at: int, size: int) -> bytes:
        """Up to `size` bytes of what has been flushed. After a flush the writing thread is idle, so
        descriptors may be opened and closed here."""
        return os.pread(self._cached[file], size, at)

    def close(self) -> None:
        """Stop. What was not flushed may not have been written."""
        if self._thread is not None:
            self._full.put(None)
            self._thread.join()
        self._cached.close()
        self._direct.close()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _submit(self, window: Window) -> None:
        window.place = self._ring.end(window.place + window.stop)
        if not self._files.beside:
            self._write(window)
            return
        if self._thread is None:
            thread = Thread(target=self._serve, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise RunError(f"no thread can be started to write with: {error}") from error
            self._thread = thread
        self._full.put(window)

    def _serve(self) -> None:
        while (window := self._full.get()) is not None:
            try:
                if self._error is None:
                    self._write(window)
                    continue
            except BaseException as error:  # raised again in the worker's own thread
                with self._moved:
                    self._error = error
                    self._moved.notify()
            self._ring.give(window.place)

    def _write(self, window: Window) -> None:
        count = window.stop - window.start
        with self._writing.step(WRITE, count):
            self.put(window.file, window.memory, window.base, window.start, window.stop)
        self._ring.give(window.place)
        with self._moved:
            self._written += count
            self._moved.notify()

    def put(self, file: int, memory: memoryview, base: int, first: int, last: int) -> None:
        """Write bytes [first, last) of a window's memory, which belong at `base` + first of a file."""
        low = min(-(-first // BLOCK) * BLOCK, last)
        high = max(last - last % BLOCK, low)
        high = low + self._write_directly(file, memory, base, low, high)
        for start, stop in ((first, low), (high, last)):
            if start < stop:
                path, data = self._paths[file], memory[start:stop]
                self._files.write(self._cached[file], path, data, base + start)

    def _write_directly(self, file: int, memory: memoryview, base: int, low: int, high: int) -> int:
        """Return how many of these bytes got written past the page cache: none where that is not to be
        had, which is then not asked for again."""
        if low == high or not self._go_direct:
            return 0
        path, data = self._paths[file], memory[low:high]
        done = self._files.write_direct(self._direct[file], path, data, base + low)
        self._go_direct = done > 0
        return done


class PendingMessages(Generic[T]):
    """Things to be said once all bytes taken before them have been written, in order."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._waiting: deque[tuple[int, T]] = deque()

    def add(self, item: T) -> None:
        self._waiting.append((self._sink.taken, item))

    def settled(self) -> Iterator[T]:
        """Those that can be said now. Raises what a write raised, also where some were written
        before it: those are done again."""
        written = self._sink.written
        while self._waiting and self._waiting[0][0] <= written:
            yield self._waiting.popleft()[1]

    def flush(self) -> Iterator[T]:
        """All of them, once everything is written."""
        self._sink.flush()
        yield from self.settled()


class Ring:
    """Memory that is taken piece after piece and given back in the same order, by one thread to another.
    Two windows of fixed size would hold up who fills them where runs of bytes are short: of a matrix's
    codes, its scales and the next matrix's codes the third waits for the first to be on the disk (NVFP4
    of 12.9 GB: 1.2 of 9 worker seconds).

    Of `size` bytes, two times `window` or more. Positions count on from round to round, so that the
    difference of two is the memory between them; a piece does not go over the end. `block` is what
    positions are multiples of. One thread takes, one gives back."""

    def __init__(self, size: int, window: int, block: int) -> None:
        # What is passed over at the end, and a piece after it, are less than all of it: nobody waits for
        # ever.
        assert size >= 2 * window
        self._size, self._window, self._block = size, window, block
        self._pages = fresh_pages(self._size)
        self._changed = Condition()
        # Everything before it was given back; everything from the second on is free.
        self._oldest = self._next = 0

    def begin(self, least: int) -> int:
        """Return where a piece of `least` bytes, at most a window, may begin. What is left before the
        end is passed over if it is less, or less than half a window."""
        assert least <= self._window
        left = self._size - self._next % self._size
        if left < max(least, self._window // 2):
            self._next += left
        return self._next

    def memory(self, begin: int) -> memoryview:
        """The most that a piece can be, a window or less; see `wait` for how much of it is free."""
        at = begin % self._size
        return self._pages[at : min(at + self._window, self._size)]

    def wait(self, stop: int) -> None:
        """Return when all memory before this position is free."""
        if stop - self._oldest <= self._size:  # it only grows: no lock is needed to see that
            return
        with self._changed:
            while stop - self._oldest > self._size:
                self._changed.wait()

    def end(self, stop: int) -> int:
        """The piece that was begun ends here: the position after it."""
        self._next = -(-stop // self._block) * self._block
        return self._next

    def give(self, stop: int) -> None:
        """A piece, up to the position after it, and all before it are not needed any more."""
        with self._changed:
            self._oldest = stop
            self._changed.notify()
