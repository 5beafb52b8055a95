"""Speed at which this machine reads the source and writes the output, measured in a moment, so that a
plan can say how long it will take here."""

from __future__ import annotations

import os
import time
from pathlib import Path

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.run.arena import fresh_pages
from qconvert.run.files import existing_parent, reserve

_BYTES = 64 << 20
_CHUNK = 4 << 20
_LEAST = 1 << 20  # less tells nothing


def read_rate(checkpoint: Checkpoint) -> float | None:
    """Bytes a second reading up to 64 MiB of the largest shard, None where that is too little to
    tell, or lies in a store. What the page cache holds already reads faster than the disk will."""
    largest = max(checkpoint.shards, key=lambda shard: shard.size)
    if largest.remote is not None:
        return None  # what a plan reads of it would be paid for twice
    buffer = memoryview(bytearray(_CHUNK))
    begin = time.perf_counter()
    done = 0
    with os.fdopen(largest.open(), "rb", buffering=0) as stream:
        while done < _BYTES and (count := stream.readinto(buffer)):
            done += count
    return done / (time.perf_counter() - begin) if done >= _LEAST else None


def write_rate(out: Path) -> float | None:
    """Bytes a second writing and syncing 64 MiB where the output will be, as a run would: past the
    page cache where that can be. The file has no name and leaves no trace. None where the folder or
    its parents cannot hold one."""
    folder = existing_parent(out)
    try:
        return _write_rate(folder, getattr(os, "O_DIRECT", 0))
    except OSError:
        pass
    try:
        return _write_rate(folder, 0)
    except OSError:
        return None


def _write_rate(folder: Path, flags: int) -> float:
    # Direct writes need aligned memory. Random bytes, in case the disk compresses.
    chunk = fresh_pages(_CHUNK)
    chunk[:] = os.urandom(1 << 20) * (_CHUNK >> 20)
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
    try:
        reserve(fd, _BYTES)
        begin = time.perf_counter()
        for start in range(0, _BYTES, _CHUNK):
            os.pwrite(fd, chunk, start)
        os.fdatasync(fd)
        return _BYTES / (time.perf_counter() - begin)
    finally:
        os.close(fd)
