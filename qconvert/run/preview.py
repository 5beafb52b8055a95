"""An output folder as a run would find it, looked at without a write: what a dry run has to say."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qconvert.core.errors import OutputError
from qconvert.run.files import existing_parent
from qconvert.run.lock import refuse_locked
from qconvert.run.workspace import LOCK, Workspace

State = Literal["new", "unfinished", "finished"]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a run would meet in the folder `out`, and why it would refuse to begin; `done` of `units`
    units are finished there; `damaged` are files of a finished result that a run would make again. A
    state of None: the refusals left nothing to be said of it."""

    out: Path
    state: State | None
    done: int
    units: int
    refusals: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()


class Onlooker(Workspace):
    """A workspace that is not claimed: no lock is kept, and nothing is made or removed. Raises what
    claiming it would."""

    def _open(self) -> None:
        if self.work.is_dir():
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


def check_writable(out: Path) -> None:
    """Raise OutputError where the folder, or the first one that exists above it, takes no new file."""
    folder = existing_parent(out)
    if not folder.is_dir():
        raise OutputError(f"{folder} is not a folder, so {out} cannot be made")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise OutputError(f"{folder}: cannot be written to; choose another folder for {out.name}")
