"""The units that the journal does not know are run: by an engine, or by a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.checkpoint.checkpoint import WORK_DIR
from qconvert.core.errors import QConvertError, RunError
from qconvert.core.profiling import heard, phase, recording, working
from qconvert.core.shown import count
from qconvert.models.calibrated import calibrated_in
from qconvert.plan.units import Unit
from qconvert.run.engines.base import Engine, UnitBatches
from qconvert.run.engines.local import BATCH_BYTES, Numbered, cut_batches
from qconvert.run.folder.journal import Committer
from qconvert.run.folder.prepare import Prepared
from qconvert.run.folder.resume import RunProgress
from qconvert.run.folder.target import Parts, Target
from qconvert.run.folder.verify import check_same_sources
from qconvert.run.folder.workspace import CALIBRATION
from qconvert.run.work.events import Events, ProgressEvents
from qconvert.run.work.files import Files
from qconvert.run.work.unit_runner import Place, UnitResult
from qconvert.run.work.worker import BytesMade as Made
from qconvert.run.work.worker import StepTimes, WorkerSetup

if TYPE_CHECKING:
    from qconvert.run.work.backend import Backend, BackendJob


@dataclass(frozen=True)
class _Writing:
    """Writer of all units of a run. `finished` takes what a unit leaves once its bytes are
    written, `commit` makes that durable."""

    setup: WorkerSetup
    places: Mapping[str, Place]
    files: Files
    events: Events
    finished: Callable[[int, UnitResult], None]
    commit: Callable[[], None]


@phase("fill")
def run_units(
    targets: Sequence[Target],
    progress: RunProgress,
    events: Events,
    files: Files,
    backend: Backend | None,
    engine: Engine,
) -> None:
    """Run the units that are left, the engine's first, and add their records to `progress`. Where the
    run's time is over before, some stay left."""
    ready, journal = targets[0].ready, targets[0].journal
    assert journal is not None, "the first folder is published last"
    mine = [
        (number, unit)
        for number, unit in enumerate(ready.units)
        if progress.mine is None or number in progress.mine
    ]
    left = [(number, unit) for number, unit in mine if number not in progress.kept]
    solved = calibrated_left(ready, progress)
    total = sum(unit.write for _, unit in mine)
    events.start(total, total - sum(unit.write for _, unit in left))
    if not left and not solved:
        return
    watching = events if isinstance(events, ProgressEvents) else None
    job = _job(targets[0], solved, files, watching) if solved else None
    if job is not None and watching is not None:
        assert backend is not None, "checked before anything was claimed"
        work, before = backend.work(job)
        rest = sum(unit.write for number, unit in left if number not in solved)
        if work:
            from qconvert.run.work.estimate import WRITE

            watching.planned({**work, WRITE: float(rest)}, before)
    setup, places = _setup(targets)
    committer = Committer(journal, files, setup.paths, ready.options.commit_bytes)

    def finished(number: int, result: UnitResult) -> None:
        if number in progress.before:
            check_same_sources(progress.before[number], result.records, ready.plan.checkpoint)
        progress.kept[number] = result.records
        progress.remarks.extend(result.remarks)
        committer.add(number, result)

    writing = _Writing(setup, places, files, events, finished, committer.commit)
    if recording() is not None:
        from qconvert.run.profile import note_run

        note_run(targets, left)
    try:
        by_engine = [item for item in left if item[0] not in solved]
        if job is not None:
            assert backend is not None, "checked before anything was claimed"
            backend.get_ready(job)
        stopped = _by_engine(engine, targets, by_engine, writing, progress)
        if not stopped:
            _check_all_done(by_engine, progress)
        if job is not None and not stopped:
            assert backend is not None, "checked before anything was claimed"
            progress.remarks.extend(_by_backend(job, backend, solved, writing))
    except (KeyboardInterrupt, QConvertError):
        # What is finished is kept, unless keeping it fails as well.
        with suppress(QConvertError):
            committer.commit()
        raise
    committer.commit()


def _setup(targets: Sequence[Target]) -> tuple[WorkerSetup, dict[str, Place]]:
    """Files of all folders, and where in them each output goes."""
    paths: list[Path] = []
    places: dict[str, Place] = {}
    for target in targets:
        base, layout = len(paths), target.ready.layout
        paths += [target.space.stage / file.name for file in layout.files]
        for name, (n, at) in layout.places.items():
            places[name] = Place(base + n, at, layout.files[n].link is not None)
    ready = targets[0].ready
    share = ready.share
    shards = ready.plan.checkpoint.shards
    metered = recording() is not None
    setup = WorkerSetup(shards, paths, share.arena, share.window, share.compiled, metered)
    return setup, places


def _by_engine(
    engine: Engine,
    targets: Sequence[Target],
    todo: Sequence[Numbered],
    writing: _Writing,
    progress: RunProgress,
) -> bool:
    """Return whether the time was over: units are left then, and what workers have not finished is lost.
    One unit is always done."""
    until = targets[0].ready.options.until
    size = min(BATCH_BYTES, targets[0].ready.options.commit_bytes)
    batches = cut_batches(todo, writing.places, size)
    work = UnitBatches(
        targets, writing.setup, batches, writing.files, writing.events, progress, writing.commit
    )
    stream = engine.run(work)
    # Closed whatever happens here: workers must not outlive the run they belong to.
    with closing(stream), working():
        for message in stream:
            if isinstance(message, Made):
                writing.events.wrote(message.nbytes)
            elif isinstance(message, StepTimes):
                heard(message.word)
            else:
                writing.finished(message.number, message.result)
                if until is not None and until.over:
                    return True
    return False


def _check_all_done(asked: Sequence[Numbered], progress: RunProgress) -> None:
    """Raise RunError where an engine ended, its time not over, and a unit is not done."""
    missing = [unit for number, unit in asked if number not in progress.kept]
    if missing:
        raise RunError(
            f"workers ended before {missing[0].names[0]!r} and {count(len(missing) - 1, 'more unit')} "
            "were made; nothing is published: run the same command again to go on"
        )


def calibrated_left(ready: Prepared, progress: RunProgress) -> dict[int, Unit]:
    """Units for a backend."""
    return {
        number: unit
        for number, unit in enumerate(ready.units)
        if number not in progress.kept and calibrated_in(unit) is not None
    }


def _job(
    first: Target, units: Mapping[int, Unit], files: Files, watching: ProgressEvents | None
) -> BackendJob:
    """Return what a backend is asked for."""
    from qconvert.run.work.backend import BackendJob, CalibratedUnit

    asked = [(number, calibrated_in(unit)) for number, unit in units.items()]
    return BackendJob(
        tuple(CalibratedUnit(number, op) for number, op in asked if op is not None),
        memory=first.ready.options.memory,
        work_dir=first.space.work / CALIBRATION,
        key=first.ready.fingerprint,
        files=files,
        until=first.ready.options.until,
        on_work=None if watching is None else watching.did,
    )


def follow(parts: Parts, events: Events, files: Files, backend: Backend) -> None:
    """Take part in a calibration that another machine leads, which writes what is found."""
    from qconvert.run.work.backend import BackendJob, CalibratedUnit, Phase

    ready, out = parts[0]
    asked = [(number, calibrated_in(unit)) for number, unit in enumerate(ready.units)]
    job = BackendJob(
        tuple(CalibratedUnit(number, op) for number, op in asked if op is not None),
        memory=ready.options.memory, work_dir=out / WORK_DIR / CALIBRATION, key=ready.fingerprint,
        files=files,
    )  # fmt: skip
    backend.get_ready(job)
    events.phase("waiting for the process that leads the calibration")
    with closing(backend.solve(job)) as items:
        for item in items:
            if isinstance(item, Phase):
                events.phase(item.text)


@phase("calibrate")
def _by_backend(
    job: BackendJob, backend: Backend, units: Mapping[int, Unit], writing: _Writing
) -> list[str]:
    """Let a backend solve units, and write what it solves. Returns its remarks."""
    from qconvert.run.work.backend import write_solved

    return write_solved(
        backend.solve(job), writing.setup, writing.files, units, writing.places,
        wrote=writing.events.wrote, phase=writing.events.phase, finished=writing.finished,
        commit=writing.commit,
    )  # fmt: skip
