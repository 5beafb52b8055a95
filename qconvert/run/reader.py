"""Source bytes, read at known offsets, from files and objects that must not change meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from qconvert.checkpoint.checkpoint import Shard
from qconvert.core.errors import RunError
from qconvert.core.graph import Source
from qconvert.plan.units import Unit
from qconvert.run.fetch import Fetching, ranges_of
from qconvert.run.handles import Handles

_OPEN_FILES = 64


class Reader:
    """Reads slices of sources. Descriptors are opened on first use and kept. `far`: some are objects of
    a store, of which each byte is asked for as often as a unit's ranges hold it."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
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

    def close(self) -> None:
        self._fetching.close()
        self._open.close()
