"""The engine whose results go elsewhere while they are made: files are finished one after another, sent,
and removed here, so that a run takes a stated part of the disk that its result would."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from qconvert.core.errors import OutputError, RunError
from qconvert.models.calibrated import calibrated_in
from qconvert.run.engines.base import ClaimedRun, UnitBatches
from qconvert.run.engines.local import (
    BATCH_BYTES,
    Numbered,
    cut_batches,
    locks_of,
    run_workers,
    whole_run,
)
from qconvert.run.engines.upload_queue import QueuedFile, StreamWorkspace, UploadQueue, hashes_in
from qconvert.run.folder.target import Target
from qconvert.run.work.events import Events
from qconvert.run.work.file_layout import files_of, in_file_order, places_of
from qconvert.run.work.files import Files
from qconvert.run.work.forkserver import AnyConnection
from qconvert.run.work.unit_runner import Place
from qconvert.run.work.upload_target import UploadTarget
from qconvert.run.work.worker import Batch, UnitDone, WorkerEvent

if TYPE_CHECKING:
    from qconvert.run.work.backend import Backend

# How often files that were sent and are lost are made again before that is no accident any more.
_ROUNDS = 3


class StreamEngine:
    """All units of a run, on this machine; the folders' files go to `outlets`, in the same order."""

    space = StreamWorkspace
    publishes = True

    def __init__(self, outlets: Sequence[UploadTarget]) -> None:
        self._outlets = outlets
        self._rounds = 0

    @contextmanager
    def begin(
        self, targets: Sequence[Target], events: Events, files: Files, backend: Backend | None
    ) -> Iterator[ClaimedRun | None]:
        for target, outlet in zip(targets, self._outlets, strict=True):
            if target.space.finished or target.space.in_sight:
                raise OutputError(
                    f"{target.out}: holds a finished folder, where the work for {outlet.url} would be; "
                    "remove it, or name another --work-dir"
                )
            events.phase(f"looking at {outlet.url}")
            _space(target).outlet = outlet
            outlet.prepare()
        with whole_run(targets, events, backend) as begun:
            assert begun is not None, "no folder is finished"
            parts = self._parts = _Parts.of(begun.targets)
            self._flow = UploadQueue(parts.files, parts.room, lambda n: parts.hashes(begun, n))
            try:
                yield begun
            finally:
                self._flow.close()

    def run(self, work: UnitBatches) -> Generator[WorkerEvent]:
        """Units in the order of the files. Those of a backend come after: their files are made
        before."""
        parts, flow, kept = self._parts, self._flow, work.progress.kept
        left: Counter[int] = Counter()
        for number, files in enumerate(parts.of_units):
            if number not in kept:
                left.update(files)
        if any(calibrated_in(unit) is not None for unit in work.targets[0].ready.units):
            flow.admit(sorted(left), idle=True)  # planned with room for all of them
        flow.send(n for n in flow.here if not left[n])
        supply = _Gated(_batches(work, parts), parts.of_units, flow)
        if not len(supply):
            return
        jobs = work.targets[0].ready.share.jobs
        for message in run_workers(work.setup, jobs, lambda: supply, locks_of(work)):
            yield message
            if isinstance(message, UnitDone):
                supply.running -= 1
                written = parts.of_units[message.number]
                left.subtract(written)
                finished = [number for number in written if not left[number]]
                if finished:
                    work.commit()
                    flow.send(finished)

    def finish_units(self, begun: ClaimedRun, events: Events) -> Sequence[int]:
        """Send what is left. Where files were lost meanwhile that had been sent, the units that make
        them are forgotten. Raises RunError where that happens again and again."""
        self._flow.drain(events)
        parts = self._parts
        missing = {target.space: set(_space(target).missing()) for target in begun.targets}
        lost = {
            number
            for number, going in enumerate(parts.files)
            if going.file.name in missing[going.space]
        }
        if not lost:
            return ()
        self._rounds += 1
        url = self._outlets[0].url
        if self._rounds > _ROUNDS:
            raise RunError(
                f"{url}: files that were sent are lost again and again; nothing was published. See who "
                "else writes to the repo, and run the same command again"
            )
        events.phase("making again what was sent and is lost")
        units, lost = parts.closure(lost)
        first = begun.targets[0]
        assert first.journal is not None
        first.journal.append([{"forget": sorted(units)}])
        for space in dict.fromkeys(parts.files[number].space for number in sorted(lost)):
            space.lose(
                [g.file.name for n, g in enumerate(parts.files) if n in lost and g.space is space]
            )
        return sorted(units)


@dataclass(frozen=True)
class _Parts:
    """A run's files of all folders, the place of every output among them, and the files of each unit.
    `room` is what may be here of them at a time, in bytes."""

    files: Sequence[QueuedFile]
    places: Mapping[str, tuple[int, int]]
    of_units: Sequence[frozenset[int]]
    room: int

    @staticmethod
    def of(targets: Sequence[Target]) -> _Parts:
        layouts = [target.ready.layout for target in targets]
        places = places_of(layouts)
        ready = targets[0].ready
        assert ready.room is not None, "prepared as streamed"
        return _Parts(
            [
                QueuedFile(_space(target), file)
                for target in targets
                for file in target.ready.layout.files
            ],
            places,
            [files_of(unit, places) for unit in ready.units],
            ready.room.takes - ready.room.rest,
        )

    def hashes(self, begun: ClaimedRun, number: int) -> dict[str, str]:
        """Of the tensors of a finished file."""
        wanted = {tensor.name for tensor in self.files[number].file.tensors}
        kept, units = begun.progress.kept, begun.targets[0].ready.units
        return hashes_in(
            record
            for unit, files in enumerate(self.of_units)
            if number in files
            for name, record in zip(units[unit].names, kept[unit], strict=True)
            if name in wanted
        )

    def closure(self, lost: set[int]) -> tuple[set[int], set[int]]:
        """The units that make lost files again, and all files that those write to."""
        while True:
            units = {n for n, files in enumerate(self.of_units) if files & lost}
            more = {file for unit in units for file in self.of_units[unit]}
            if more == lost:
                return units, lost
            lost = more | lost


class _Gated:
    """Batches in the order of their files, which are made where there is room. `running` counts units
    that were given out and are not done."""

    def __init__(
        self, batches: deque[Batch], of_units: Sequence[frozenset[int]], flow: UploadQueue
    ) -> None:
        self._batches, self._of_units, self._flow = batches, of_units, flow
        self.bell: AnyConnection | None = flow.bell
        self.running = 0

    def __len__(self) -> int:
        return len(self._batches)

    def next(self, current: int | None) -> Batch | None:
        if not self._batches:
            return None
        numbers = {file for n, _ in self._batches[0].units for file in self._of_units[n]}
        if not self._flow.admit(sorted(numbers), idle=not self.running):
            return None
        batch = self._batches.popleft()
        self.running += len(batch.units)
        return batch

    def answer(self) -> None:
        self._flow.answer()


def _batches(work: UnitBatches, parts: _Parts) -> deque[Batch]:
    """The units again, in batches whose units have the same first file."""
    todo: list[Numbered] = []
    places: dict[str, Place] = {}
    for batch in work.batches:
        todo += batch.units
        places |= batch.places
    ordered = in_file_order(todo, parts.places)
    most = min(BATCH_BYTES, work.targets[0].ready.options.commit_bytes)
    found: deque[Batch] = deque()
    for _, group in groupby(ordered, key=lambda item: min(parts.of_units[item[0]])):
        found.extend(cut_batches(list(group), places, most))
    return found


def _space(target: Target) -> StreamWorkspace:
    assert isinstance(target.space, StreamWorkspace)
    return target.space
