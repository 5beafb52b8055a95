"""Plans looked at and run: in their folders, and on to a store or the Hub where they go there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.core.errors import OutputError, QConvertError, UsageError
from qconvert.run.executor import RunResult, run_together
from qconvert.run.folder.prepare import Prepared
from qconvert.run.folder.staging import publish_order
from qconvert.run.folder.workspace import clean
from qconvert.run.work.events import Counted, Events, NoEvents
from qconvert.run.work.files import Files
from qconvert.service.planned import Planned, PlannedFolder, PlannedStages, Result
from qconvert.validation import judgement

if TYPE_CHECKING:
    from qconvert.run.dry_run import DryRun
    from qconvert.run.work.backend import Backend
    from qconvert.run.work.events import Callback


def carry_out(planned: Planned, *, events: Events | Callback | None = None) -> tuple[Result, ...]:
    """Run a plan. Returns one result per folder; none of folders that were not begun when the time was
    over. Raises as `run` does."""
    if isinstance(planned, PlannedStages):
        planned.check_out()
    told = Counted.of(events)
    results: list[Result] = []
    for part in planned.parts:
        results += _carried_out(part.folders, told)
        if results[-1].left_units:
            break
    return tuple(results)


def dry_run(folders: Sequence[PlannedFolder]) -> list[DryRun]:
    """Return what a run would find in each folder, and at the place that it is sent to."""
    from qconvert.run.dry_run import dry_run as looked_at

    parts = _named(folders)
    looks = looked_at(parts, backend=_backend(parts))
    return [_there(folder, look) for folder, look in zip(folders, looks, strict=True)]


def check_dry_run(looks: Iterable[DryRun]) -> None:
    """Raise OutputError if a run would refuse to start in any of the folders."""
    refusals = [text for look in looks for text in look.refusals]
    if refusals:
        raise OutputError("; ".join(dict.fromkeys(refusals)))


def _there(folder: PlannedFolder, look: DryRun) -> DryRun:
    """Return what a run finds of a result that goes to a store."""
    place = folder.output.delivery(folder.ready) or folder.output.outlet(folder.ready)
    if place is None:
        return look
    look = replace(look, url=folder.output.url)
    try:
        found = place.look()
    except QConvertError as error:
        return replace(look, state=None, refusals=(*look.refusals, str(error)))
    return replace(look, state="finished", done=look.units) if found == "finished" else look


def _carried_out(folders: Sequence[PlannedFolder], events: Events | None) -> list[Result]:
    parts = _named(folders)
    backend = _backend(parts)
    outlets = [one for each in folders if (one := each.output.outlet(each.ready)) is not None]
    delivery = folders[0].output.delivery(folders[0].ready)
    places = (*outlets, *(() if delivery is None else (delivery,)))
    if places and all(place.look() == "finished" for place in places):
        for outlet in outlets:
            outlet.tidy()  # of a run that was killed at its very end
        for _, work in parts:
            if delivery is None:
                clean(work, Files())
            else:
                delivery.clear(work, Files())
        return [
            _result(folder, _already(*part)) for folder, part in zip(folders, parts, strict=True)
        ]
    done = run_together(
        parts, events=events, backend=backend, outlets=outlets, judge=judgement.judge_staged
    )
    if delivery is not None and done[0].published:  # of shards, whoever publishes sends
        delivery.send(parts[0][1], events or NoEvents())
        delivery.clear(parts[0][1], Files())
        # What was made before and only sent now is no result that was there already.
        done = [replace(done[0], already_done=False)]
    return [_result(*each) for each in zip(folders, done, strict=True)]


def _already(ready: Prepared, work: Path) -> RunResult:
    return RunResult(
        work, ready.fingerprint, tuple(publish_order(ready)), ready.layout.nbytes, already_done=True
    )


def _result(planned: PlannedFolder, done: RunResult) -> Result:
    return Result(
        done.out, done.fingerprint, planned.tensors, done.nbytes, done.files,
        planned.warnings, done.remarks, done.already_done, done.resumed_units,
        done.repaired, published=done.published, url=planned.output.url, left_units=done.left_units,
        left_bytes=done.left_bytes,
    )  # fmt: skip


def _named(folders: Sequence[PlannedFolder]) -> list[tuple[Prepared, Path]]:
    """Plans with their folders. Raises UsageError if a folder was not named."""
    found = [(part.ready, part.out) for part in folders if part.out is not None]
    if len(found) < len(folders):
        raise UsageError("the plan has no output folder; name one in `plan`")
    return found


def _backend(parts: Sequence[tuple[Prepared, Path]]) -> Backend | None:
    """Return what calibrates for plans that are run together; None, without its imports, where nothing
    does."""
    plans = [ready.plan for ready, _ in parts]
    if all(plan.calibration is None for plan in plans):
        return None
    from qconvert.calibrate.backend import backend_for

    return backend_for(plans)
