"""Source bytes, read at known offsets, from files and objects that must not change meanwhile."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable, Sequence

from qconvert.checkpoint.checkpoint import Shard
from qconvert.core.errors import RunError
from qconvert.core.graph import Source
from qconvert.core.profiling import OFF, READ, Meter
from qconvert.plan.units import Unit
from qconvert.run.fetch import Fetching, ranges_of
from qconvert.run.files import Handles

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
        self._open = Handles(self._open_shard, os.close, _OPEN_FILES)
        self._fetching = Fetching(shards)
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
        try:
            fd = shard.open()
        except OSError as error:
            raise RunError(f"{shard.path}: cannot be read: {error.strerror or error}") from error
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
