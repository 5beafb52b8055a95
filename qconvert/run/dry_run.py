"""Output folders as a run would find them, looked at without a write: what a dry run has to say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qconvert.checkpoint.checkpoint import WORK_DIR
from qconvert.core.errors import OutputError, QConvertError
from qconvert.run.engines.shard import SharedWorkspace
from qconvert.run.folder.leases import refuse_locked
from qconvert.run.folder.resume import is_resumable, look_over_all
from qconvert.run.folder.target import Parts, Target, check_backend, check_parts, opened
from qconvert.run.folder.workspace import LOCK, Workspace
from qconvert.run.work.events import NoEvents
from qconvert.run.work.files import Files, existing_parent

if TYPE_CHECKING:
    from qconvert.run.work.backend import Backend

State = Literal["new", "unfinished", "finished"]


@dataclass(frozen=True, slots=True)
class DryRun:
    """Findings of a dry run in the folder `out`, and why it would refuse to begin; `done` of `units`
    units are finished there; `damaged` are files of a finished result that a run would make again. A
    state of None: the refusals left nothing to be said of it. `url`: where in a store it is sent."""

    out: Path
    state: State | None
    done: int
    units: int
    refusals: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    url: str | None = None

    @property
    def name(self) -> str:
        """Return where the result is, or will be."""
        return self.url or str(self.out)


class Onlooker(Workspace):
    """A workspace that is not claimed: no lock is kept, and nothing is made or removed. Raises what
    claiming it would."""

    _observing = 0.0

    def _open(self) -> None:
        if self.work.is_dir():
            if not self._shared:
                refuse_locked(self.work / LOCK)
            self._look_around(claimed=True)
        else:
            self._refuse_foreign()
        if not self.finished:
            check_writable(self.out)

    @property
    def state(self) -> State:
        if self.finished:
            return "finished"
        return "new" if self.remembered is None else "unfinished"


class ShardOnlooker(Onlooker, SharedWorkspace):
    """As Onlooker, for a run of one shard."""


def check_writable(out: Path) -> None:
    """Raise OutputError where the folder, or the first one that exists above it, takes no new file."""
    folder = existing_parent(out)
    if not folder.is_dir():
        raise OutputError(f"{folder} is not a folder, so {out} cannot be made")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise OutputError(f"{folder}: cannot be written to; choose another folder for {out.name}")


def unfinished(out: Path) -> list[Path]:
    """Folders of a result, and of its pipeline stages, that hold unfinished work."""
    stages = [folder for folder in sorted(out.glob("stage-*-of-*")) if not folder.is_symlink()]
    return [folder for folder in (out, *stages) if (folder / WORK_DIR).is_dir()]


def dry_run(parts: Parts, *, backend: Backend | None = None) -> list[DryRun]:
    """Return what `run_together` would find in each folder and refuse to begin, by its own checks,
    without a write. Refusals of the folders as a whole are listed with the first one's."""
    common: list[str] = []
    with _noted(common):
        check_parts(parts, backend)
    own: list[list[str]] = [[] for _ in parts]
    spaces: list[Onlooker | None] = [None for _ in parts]
    if not common:  # of a folder on top of the source, say, what lies in it is no news
        for number, (ready, out) in enumerate(parts):
            with _noted(own[number]):
                kind = Onlooker if ready.options.shard is None else ShardOnlooker
                spaces[number] = opened(ready, out, Files(), kind)
    targets = [
        Target(ready, space) for (ready, _), space in zip(parts, spaces, strict=True) if space
    ]
    damaged: list[tuple[str, ...]] = [() for _ in parts]
    if len(targets) == len(parts):
        with _noted(common):
            if targets[0].space.finished:
                damaged = [tuple(target.faults) for target in look_over_all(targets, NoEvents())]
            else:
                is_resumable(targets)
            if not all(target.space.finished for target in targets):
                check_backend(parts, backend)
    own[0] = [*common, *own[0]]
    units = len(parts[0][0].units)
    left = spaces[0].remembered if spaces[0] is not None else None  # it speaks of all folders
    done = {"finished": units, "unfinished": 0 if left is None else len(left.units)}
    return [
        DryRun(out, None if space is None else space.state,
                0 if space is None else done.get(space.state, 0), units, tuple(refusals), faults)
        for (_, out), space, refusals, faults in zip(parts, spaces, own, damaged, strict=True)
    ]  # fmt: skip


@contextmanager
def _noted(refusals: list[str]) -> Iterator[None]:
    """Errors that a user is to see, kept as text."""
    try:
        yield
    except QConvertError as error:
        refusals.append(str(error))
