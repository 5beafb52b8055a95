"""Estimate of how much of a run's work is done, and how long the rest takes: by what each kind of work
took so far.

Bytes say little of a calibration: before its first layer most of them may be written, and nearly all of
the time is to come. So work is planned by kind (bytes written and read, operations of forwards, of
Hessians, of solving), each with its own measured speed. What was not measured yet is taken to be as much
slower than `COSTS` as what was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.run.work.files import existing_parent, reserve
from qconvert.run.work.reader import fresh_pages

WRITE, READ, FORWARD, HESSIAN, SOLVE = "write", "read", "forward", "hessian", "solve"
# Seconds for a byte, or for a multiplication and addition, on one core, of matrices of 256 columns by
# the solver "best". How they compare matters, until a kind has been measured.
COSTS: Mapping[str, float] = {
    WRITE: 2e-9, READ: 1e-8, FORWARD: 2.5e-10, HESSIAN: 5e-10, SOLVE: 1.2e-8,
}  # fmt: skip


@dataclass(slots=True)
class Amount:
    """Of one kind of work: what is `planned` for this run, `before` it was done, `done` by it, and the
    seconds that took."""

    planned: float = 0.0
    before: float = 0.0
    done: float = 0.0
    seconds: float = 0.0

    @property
    def left(self) -> float:
        return max(0.0, self.planned - self.done)


class Estimate:
    """Estimate of what is left of a run. `now` is a clock that only goes forward."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.kinds: dict[str, Amount] = {}
        self._begun: float | None = None
        self._last = 0.0

    def plan(self, work: Mapping[str, float], before: Mapping[str, float]) -> None:
        """More work to do, and what earlier runs have done of the whole."""
        for kind, amount in work.items():
            self._of(kind).planned += amount
        for kind, amount in before.items():
            self._of(kind).before += amount

    def did(self, kind: str, amount: float, seconds: float) -> None:
        """Work of a kind has been done, and took so long. Below 0 where too much was seconds."""
        found = self._of(kind)
        found.done += amount
        found.seconds += seconds
        self._last = self._now()
        if kind != WRITE and self._begun is None:
            self._begun = self._last - seconds

    def _of(self, kind: str) -> Amount:
        return self.kinds.setdefault(kind, Amount())

    def _rates(self) -> dict[str, float] | None:
        """Seconds for a piece of each kind of work; None before any was measured. How fast a disk is
        says nothing of how fast a processor is."""
        measured = {k: a for k, a in self.kinds.items() if a.done > 0 and a.seconds > 0}
        if not measured:
            return None
        computed = {k: a for k, a in measured.items() if k != WRITE}
        expected = sum(a.done * COSTS.get(k, 1.0) for k, a in computed.items())
        spent = sum(a.seconds for a in computed.values())
        slower = spent / expected if expected else 1.0
        return {
            kind: a.seconds / a.done if kind in measured else COSTS.get(kind, 1.0) * slower
            for kind, a in self.kinds.items()
        }

    @property
    def _beside(self) -> float:
        """Seconds by the clock for a second of what is computed: above 1 for what no kind counts
        (writing what was solved), below 1 where several devices work at once. What passes before the
        first of it, 20 s of imports, is no part of it."""
        seconds = sum(amount.seconds for kind, amount in self.kinds.items() if kind != WRITE)
        if self._begun is None or seconds <= 0:
            return 1.0
        return (self._last - self._begun) / seconds

    def left(self) -> float | None:
        """Seconds that the rest takes, from now; None before anything was measured."""
        rates = self._rates()
        if rates is None:
            return None
        rest = {kind: amount.left * rates[kind] for kind, amount in self.kinds.items()}
        writing = rest.pop(WRITE, 0.0)
        left = writing + sum(rest.values()) * self._beside
        return max(0.0, left - (self._now() - self._last))

    def part(self) -> float:
        """Return how much of the whole is done, from 0 to 1, by the time that it takes."""
        rates = self._rates() or COSTS
        cost = {kind: rates.get(kind, 1.0) for kind in self.kinds}
        done = sum((a.before + min(a.done, a.planned)) * cost[k] for k, a in self.kinds.items())
        whole = sum((a.before + a.planned) * cost[k] for k, a in self.kinds.items())
        return min(1.0, max(0.0, done / whole)) if whole else 0.0


# Speed at which this machine reads the source and writes the output, measured in a moment, so that a
# plan can say how long it will take here.

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
