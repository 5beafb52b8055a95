"""execute: a checked plan becomes a folder, in bounded memory, resumable, published at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.checkpoint.checkpoint import Shard
from qconvert.core.profiling import phase
from qconvert.plan.plan import Plan
from qconvert.run.engines.base import ClaimedRun, Engine
from qconvert.run.engines.local import LocalEngine
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
from qconvert.run.folder.verify import check_sources, seen, touched
from qconvert.run.run_units import follow, run_units
from qconvert.run.work.events import Events, NoEvents
from qconvert.run.work.files import Files
from qconvert.run.work.memory import MemoryShare
from qconvert.run.work.options import RunOptions
from qconvert.run.work.upload_target import UploadTarget

if TYPE_CHECKING:
    from qconvert.run.work.backend import Backend


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
