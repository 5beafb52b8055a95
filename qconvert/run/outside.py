"""Units that no worker can make alone: calibrated weights, which a maker hands in a layer at a time.

The maker computes in this process, with whatever it needs; what it makes goes the same way as all
else: written at its known place, hashed, journalled once it is safe on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qconvert.core.graph import Buffer
from qconvert.matrices.calibrated import Calibrated, calibrated_op
from qconvert.plan.units import Compute, Unit
from qconvert.run.files import Files
from qconvert.run.sink import Sink, Underway
from qconvert.run.unit_runner import Place, UnitResult
from qconvert.run.worker import Done, Setup, unit_runner


@dataclass(frozen=True, slots=True)
class Wanted:
    """A unit to be made outside: its number, and the one op that makes all of it."""

    number: int
    op: Calibrated


class Desk(Protocol):
    """Where a maker hands its work in."""

    def put(
        self, number: int, results: Sequence[Buffer], sources: Sequence[Mapping[str, Any]]
    ) -> None:
        """A unit's results, one a port in order, and what was read for it: name, start, stop, xxh3 of
        each range of a source. The buffers may be reused afterwards."""

    def commit(self) -> None:
        """Return when all that was put is on disk and in the journal."""


class Maker(Protocol):
    """Makes all units of a plan that have a `Calibrated` op. `room` is a folder for what it must
    remember between runs; it is removed with the rest of the workroom at the end."""

    def disk_bytes(self) -> int:
        """What `room` may come to hold."""

    def check(self, folders: Sequence[Path]) -> None:
        """Refuse what can be known to go wrong before anything is written: data, devices, folders of
        its own that overlap these, which the results go to. Writes nothing."""

    def idle(self) -> Sequence[str]:
        """Remarks for a run that finds nothing left to make."""

    def make(
        self,
        wanted: Sequence[Wanted],
        desk: Desk,
        *,
        room: Path,
        key: str,
        files: Files,
        say: Callable[[str], None],
    ) -> Sequence[str]:
        """Hand in every wanted unit. `key` names this run: what is remembered under another one is
        not gone on with; `files` carries out what is done in `room`. Returns remarks for the
        user."""


def made_outside(unit: Unit) -> Calibrated | None:
    """The op that makes a unit, where that is a maker's to run."""
    for step in unit.steps:
        if isinstance(step, Compute):
            for node in step.nodes:
                if (op := calibrated_op(node)) is not None:
                    return op
    return None


class OpenDesk:
    """A desk that writes through a sink. `finished` is told of each unit once its bytes are written;
    `lasting` makes what was told so."""

    def __init__(
        self,
        write: Callable[[int, Sequence[Buffer], Sequence[Mapping[str, Any]]], UnitResult],
        sink: Sink,
        finished: Callable[[int, UnitResult], None],
        lasting: Callable[[], None],
    ) -> None:
        self._write = write
        self._underway: Underway[Done] = Underway(sink)
        self._finished = finished
        self._lasting = lasting

    def put(
        self, number: int, results: Sequence[Buffer], sources: Sequence[Mapping[str, Any]]
    ) -> None:
        self._underway.add(Done(number, self._write(number, results, sources)))
        self._say(self._underway.settled())

    def commit(self) -> None:
        self._say(self._underway.flush())
        self._lasting()

    def _say(self, written: Iterable[Done]) -> None:
        for done in written:
            self._finished(done.number, done.result)


@contextmanager
def open_desk(
    setup: Setup,
    files: Files,
    units: Mapping[int, Unit],
    places: Mapping[str, Place],
    *,
    progress: Callable[[int], None],
    finished: Callable[[int, UnitResult], None],
    lasting: Callable[[], None],
) -> Iterator[OpenDesk]:
    """A desk for some units of a conversion. `progress` is told of bytes as they are handed in."""
    sink = Sink(files, setup.paths, setup.window)
    runner = unit_runner(setup, sink, progress)

    def write(
        number: int, results: Sequence[Buffer], sources: Sequence[Mapping[str, Any]]
    ) -> UnitResult:
        return runner.write(units[number], places, results, sources)

    try:
        yield OpenDesk(write, sink, finished, lasting)
    finally:
        runner.close()
        sink.close()
