"""Plans that were checked and judged, looked at and run: in their folders, and on to a store or the Hub
where they go there; and the results of runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import OutputError, QConvertError, UsageError
from qconvert.plan.plan import Plan
from qconvert.run.executor import RunResult, run_together
from qconvert.run.folder.prepare import Prepared, disk_bytes
from qconvert.run.folder.staging import publish_order
from qconvert.run.folder.workspace import check_disk, clean
from qconvert.run.work.events import Counted, Events, NoEvents
from qconvert.run.work.files import Files
from qconvert.service.output import Output
from qconvert.validation import judgement
from qconvert.validation.findings import Verdict

if TYPE_CHECKING:
    from qconvert.run.dry_run import DryRun
    from qconvert.run.engines.shard import Share
    from qconvert.run.profile import Profile
    from qconvert.run.work.backend import Backend
    from qconvert.run.work.events import Callback
    from qconvert.runtimes.pipeline import PipelineCut


@dataclass(frozen=True)
class PlannedFolder:
    """A folder that a run would make: `ready` is its plan, cut into units and files; `verdict` holds
    the warnings of the header rules; `output` is where it is made and sent."""

    output: Output
    ready: Prepared
    verdict: Verdict

    @property
    def out(self) -> Path | None:
        """The folder that the result is made in, None if none was named."""
        return self.output.folder

    @property
    def name(self) -> str | None:
        """Return where the result will be, None if that was not said."""
        return self.output.name

    @property
    def tensors(self) -> int:
        return len(self.ready.plan.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return self.ready.plan.bytes_out

    @property
    def fingerprint(self) -> str:
        """A hash of the source's headers and of all steps; paths and times do not enter it."""
        return self.ready.fingerprint

    @property
    def disk(self) -> int:
        """Upper bound of the bytes that the run writes to disk."""
        return disk_bytes(self.ready)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the source, those of the header rules about the result, and what a calibration
        lacks on this machine."""
        plan = self.ready.plan
        found = (*plan.checkpoint.warnings, *self.verdict.lines())
        if plan.calibration is None:
            return found
        from qconvert.calibrate.backend import unmet

        return (*found, *unmet(plan))


@dataclass(frozen=True)
class Planned:
    """A checked and judged plan over `source`; no tensor data has been read. Several folders are made
    `together`, from one read, or one after another."""

    source: Checkpoint
    folders: tuple[PlannedFolder, ...]
    together: bool = True

    @property
    def tensors(self) -> int:
        return sum(folder.tensors for folder in self.folders)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(folder.nbytes for folder in self.folders)

    @property
    def memory(self) -> int:
        """Bytes of memory that all processes of a run use together; with the engine ray, this one."""
        return max(folder.ready.share.total for folder in self.folders)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for folder in self.folders for text in folder.warnings))

    @property
    def losses(self) -> Mapping[str, int]:
        """The lossy steps, each with the number of times."""
        found: dict[str, int] = {}
        for folder in self.folders:
            for what, number in folder.ready.plan.losses().items():
                found[what] = found.get(what, 0) + number
        return found

    @property
    def parts(self) -> tuple[Planned, ...]:
        """The plan as runs: one, or one per folder."""
        if self.together:
            return (self,)
        return tuple(Planned(self.source, (folder,)) for folder in self.folders)

    @property
    def shares(self) -> tuple[Share, ...]:
        """Return what a run with `shard` does of each part; empty without."""
        if all(folder.ready.options.shard is None for folder in self.folders):
            return ()
        from qconvert.run.engines.shard import share_of

        found = (share_of([folder.ready for folder in part.folders]) for part in self.parts)
        return tuple(share for share in found if share is not None)

    def dry_run(self) -> tuple[DryRun, ...]:
        """Return what a run would find in each folder, and why it would refuse to start. Writes nothing.
        Empty if no folder was named."""
        named = (part.folders for part in self.parts if all(one.out for one in part.folders))
        return tuple(look for folders in named for look in dry_run(folders))


@dataclass(frozen=True)
class PlannedStages(Planned):
    """A plan of one folder per pipeline stage in `out`: the `partition`, the environment variables that
    configure a runtime for it (`NAME=VALUE`; only one if the runtime is known), notes for the user.
    `whole` is the plan before it was split. `unbalanced`: the cut that the runtime would make, and
    `balanced` the one in its place, both None unless it was asked for."""

    out: Path = Path()
    whole: Plan | None = None
    partition: tuple[int, ...] = ()
    environment: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unbalanced: PipelineCut | None = None
    balanced: PipelineCut | None = None

    def dry_run(self) -> tuple[DryRun, ...]:
        """First for the folder of all stages, then for each stage."""
        from qconvert.run.dry_run import DryRun

        refusals: tuple[str, ...] = ()
        try:
            self.check_out()
        except QConvertError as error:
            refusals = (str(error),)
        return (DryRun(self.out, None, 0, 0, refusals), *super().dry_run())

    def check_out(self) -> None:
        """Raise OutputError if `out` holds something else, or if its disk has no room for all stages."""
        folders = [(folder.out, folder.ready) for folder in self.folders if folder.out is not None]
        names = {out.name for out, _ in folders}
        foreign = sorted(set(os.listdir(self.out)) - names) if self.out.is_dir() else []
        if foreign:
            raise OutputError(
                f"{self.out} holds {foreign[0]}, which is not part of this split; choose an empty or "
                "new folder"
            )
        check_disk(self.out, sum(disk_bytes(ready) for out, ready in folders if not out.exists()))


@dataclass(frozen=True)
class Result:
    """A folder that a run made, or, with `dry_run`, would make.

    `nbytes` is the size of the weight files. `warnings` are from the plan, `remarks` from the run (such
    as NaN codes). `already_done`: the folder already held this result. `resumed_units` were finished by
    an earlier run. `repaired` maps files of a finished folder that were damaged to the damage; they have
    been made again. `published` is false after a run of one shard: `nbytes` are those of its units, and
    of a machine that only took part in a calibration none.
    `profile` is there if it was asked for. `url` is where in a store the result is; `folder`, where it
    was made, is gone then. Where time was over first (`until`), `left_units` are left to the same call,
    with `left_bytes` to write, and nothing is published.
    """

    folder: Path
    fingerprint: str
    tensors: int
    nbytes: int
    files: tuple[str, ...]
    warnings: tuple[str, ...]
    remarks: tuple[str, ...]
    already_done: bool
    resumed_units: int
    repaired: Mapping[str, str]
    dry_run: bool = False
    published: bool = True
    profile: Profile | None = field(default=None, compare=False)
    url: str | None = None
    left_units: int = 0
    left_bytes: int = 0

    @property
    def name(self) -> str:
        """Return where the result is."""
        return self.url or str(self.folder)


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
