"""execute: a checked plan becomes a folder, in bounded memory, resumable, published at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.checkpoint.checkpoint import WORK_DIR, Shard
from qconvert.core.errors import QConvertError, RunError
from qconvert.core.profiling import heard, phase, recording, working
from qconvert.core.shown import count
from qconvert.models.calibrated import calibrated_in
from qconvert.plan.plan import Plan
from qconvert.plan.units import Unit
from qconvert.run.engines.base import ClaimedRun, Engine, UnitBatches
from qconvert.run.engines.local import BATCH_BYTES, LocalEngine, Numbered, cut_batches
from qconvert.run.folder.journal import Committer
from qconvert.run.folder.prepare import Prepared
from qconvert.run.folder.resume import RunProgress
from qconvert.run.folder.staging import Judge, Staged, publish_order, stage_the_rest
from qconvert.run.folder.target import (
    Parts,
    Target,
    check_backend,
    check_parts,
    claimed,
    is_finished,
)
from qconvert.run.folder.verify import check_same_sources, check_sources, seen, touched
from qconvert.run.folder.workspace import CALIBRATION
from qconvert.run.work.events import Events, NoEvents, ProgressEvents
from qconvert.run.work.files import Files
from qconvert.run.work.memory import MemoryShare
from qconvert.run.work.options import RunOptions
from qconvert.run.work.unit_runner import Place, UnitResult
from qconvert.run.work.upload_target import UploadTarget
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


@dataclass(frozen=True)
class RunResult:
    """A finished run: where it is, its fingerprint, what was written, remarks (NaN codes met), and
    whether it had been finished before. `repaired` are files of a finished folder that were not as
    they had been made, and are again, with what was wrong. A shard's run publishes nothing:
    `published` is false, and `nbytes` are those of its own units; of a machine that only takes part in a
    calibration they are none. Where the run's time was over first (`RunOptions.until`), `left_units` are
    left to the same call, with `left_bytes` to write."""

    out: Path
    fingerprint: str
    files: tuple[str, ...]
    nbytes: int
    remarks: tuple[str, ...] = ()
    resumed_units: int = 0
    already_done: bool = False
    repaired: Mapping[str, str] = field(default_factory=dict)
    published: bool = True
    share: MemoryShare | None = field(default=None, compare=False)
    left_units: int = 0
    left_bytes: int = 0


def execute(
    plan: Plan,
    out: Path,
    options: RunOptions | None = None,
    *,
    events: Events | None = None,
    files: Files | None = None,
    backend: Backend | None = None,
) -> RunResult:
    """Run a checked plan into folder `out`. Calibrated weights are the `backend`'s to compute.

    Interrupted, by anything, the same call goes on where it stopped; the result is byte for byte
    that of an undisturbed run. Raises OutputError (foreign or locked folder, other plan, full
    disk), CheckpointError (the source changed), RunError (invalid data), PlanError (memory too
    small). Nothing is published unless all of it is.
    """
    from qconvert.run.folder.prepare import prepare

    ready = prepare(plan, options or RunOptions())
    return run_prepared(ready, out, events=events, files=files, backend=backend)


def run_prepared(
    ready: Prepared,
    out: Path,
    *,
    events: Events | None = None,
    files: Files | None = None,
    backend: Backend | None = None,
) -> RunResult:
    """The second half of `execute`, for callers that have shown the user the first."""
    return run_together([(ready, out)], events=events, files=files, backend=backend)[0]


def run_together(
    parts: Parts,
    *,
    events: Events | None = None,
    files: Files | None = None,
    backend: Backend | None = None,
    outlets: Sequence[UploadTarget] = (),
    judge: Judge | None = None,
) -> list[RunResult]:
    """Run plans that were prepared together, each into its folder, from one read of the source.

    The first folder's journal tells what is done of all of them, and that folder is published last:
    when it is there, all are. With `outlets`, one a folder, shards go there while others are made, and
    the folders are published there; what was prepared is `streamed`. `judge` is shown all folders before
    any is published, and raises for one that must not be. Raises as `execute` does.
    """
    events = events or NoEvents()
    disk = files or Files()
    check_parts(parts, backend)
    if not is_finished(parts):
        check_backend(parts, backend)
    with nullcontext() if backend is None else backend.at_work():
        if backend is not None and backend.follows:
            follow(parts, events, disk, backend)
            return [
                RunResult(out, ready.fingerprint, (), 0, published=False) for ready, out in parts
            ]
        return _run_together(parts, events, disk, backend, outlets, judge)


def _run_together(
    parts: Parts,
    events: Events,
    disk: Files,
    backend: Backend | None,
    outlets: Sequence[UploadTarget],
    judge: Judge | None,
) -> list[RunResult]:
    first = parts[0][0]
    _as_planned(first)
    engine = engine_of(first.options, outlets)
    with claimed(parts, disk, events.phase, engine.space) as targets:
        with engine.begin(targets, events, disk, backend) as begun:
            if begun is None:
                return [_already(target, backend) for target in targets]
            _fill(begun, events, disk, backend, engine, judge)
        publishes = engine.publishes and not _left(begun)
        if publishes:
            for target in reversed(begun.targets):
                if not target.space.finished:
                    target.space.tidy()
        return _results(begun, published=publishes)


def engine_of(options: RunOptions, outlets: Sequence[UploadTarget] = ()) -> Engine:
    """Return what runs the units, as the options have it. Each engine is imported where it is used: with
    the others a start took 20 ms more."""
    if outlets:
        from qconvert.run.engines.stream import StreamEngine

        return StreamEngine(outlets)
    if options.shard is not None:
        from qconvert.run.engines.shard import ShardEngine

        return ShardEngine(options.shard)
    if options.engine == "ray":
        from qconvert.run.engines.ray import RayEngine

        return RayEngine(options.address, options.memory, options.jobs)
    return LocalEngine()


def _already(target: Target, backend: Backend | None) -> RunResult:
    ready = target.ready
    remarks = tuple(backend.unused()) if backend is not None else ()
    names = tuple(publish_order(ready))
    return RunResult(
        target.out, ready.fingerprint, names, ready.layout.nbytes, remarks, already_done=True
    )


def _fill(
    begun: ClaimedRun,
    events: Events,
    files: Files,
    backend: Backend | None,
    engine: Engine,
    judge: Judge | None,
) -> None:
    """Run what is left to run, and publish where the engine does."""
    targets, progress = begun.targets, begun.progress
    now: Sequence[Shard] | None = None
    if not any(target.publishing for target in targets):
        now = _look_at_source(targets[0], progress, events)
        run_units(targets, progress, events, files, backend, engine)
        while not _left(begun) and (lost := engine.finish_units(begun, events)):
            for number in lost:
                del progress.kept[number]
            run_units(targets, progress, events, files, backend, engine)
        targets[0].ready.plan.checkpoint.check_unchanged(now)
    if engine.publishes and not _left(begun):
        events.phase("publishing")
        _publish(targets, progress, now, judge)


def _left(begun: ClaimedRun) -> list[int]:
    """Units that are left to the same run again."""
    return begun.progress.left(len(begun.targets[0].ready.units))


def _results(begun: ClaimedRun, *, published: bool) -> list[RunResult]:
    targets, progress = begun.targets, begun.progress
    left = [targets[0].ready.units[number].write for number in _left(begun)]
    remarks = tuple(dict.fromkeys(progress.remarks))
    results = []
    for number, target in enumerate(targets):
        ready = target.ready
        nbytes = ready.layout.nbytes
        if progress.mine is not None:  # the units of all folders count for the first
            nbytes = sum(ready.units[n].write for n in progress.mine) if not number else 0
        results.append(
            RunResult(
                target.out, ready.fingerprint, tuple(publish_order(ready)) if published else (),
                nbytes, remarks, begun.resumed, repaired=target.faults, published=published,
                share=ready.share, left_units=len(left), left_bytes=sum(left),
            )
        )  # fmt: skip
    return results


def _as_planned(ready: Prepared) -> Sequence[Shard]:
    """The source's shards as they are now, which is as they were when their headers were read. Links of
    our own change a file's ctime."""
    return ready.plan.checkpoint.check_unchanged(linked=ready.options.link_near is not None)


def _look_at_source(first: Target, progress: RunProgress, events: Events) -> Sequence[Shard]:
    """The source's shards as they are now. Where they were touched since units were made from them, what
    those of this run were made from is hashed again: raises CheckpointError where it is not the same."""
    checkpoint = first.ready.plan.checkpoint
    now = _as_planned(first.ready)
    if changed := touched(now, progress.seen):
        own = [r for n, r in progress.kept.items() if progress.mine is None or n in progress.mine]
        if own:
            events.phase("the source's files were touched: hashing them again")
            check_sources(own, checkpoint, changed)
        assert first.journal is not None
        first.journal.append([{"seen": seen(now)}])
    return now


@phase("publish")
def _publish(
    targets: Sequence[Target],
    progress: RunProgress,
    now: Sequence[Shard] | None,
    judge: Judge | None,
) -> None:
    """Write what lies beside the tensors, have it judged, then rename everything into place, the first
    folder last."""
    for target in targets:
        if not target.space.finished and not target.publishing:
            stage_the_rest(target.ready, target.space, progress.kept)
            target.ready.plan.checkpoint.check_unchanged(now)
    if judge is not None and not any(target.publishing for target in targets):
        judge([Staged(target.ready, target.space) for target in targets])
    for target in reversed(targets):
        if target.journal is not None:
            target.space.publish(publish_order(target.ready), target.journal)
