"""The folders that a run writes, from the first look at them to the last rename."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from qconvert.core.profiling import phase
from qconvert.run.files import Files
from qconvert.run.finished import State
from qconvert.run.journal import Journal
from qconvert.run.prepare import Prepared
from qconvert.run.staging import identity_of, manifest_bytes
from qconvert.run.workspace import Workspace

Parts = Sequence[tuple[Prepared, Path]]
Space = TypeVar("Space", bound=Workspace)


@dataclass(frozen=True, eq=False)
class Target:
    """One folder of a run: the plan it is for, and the workspace claimed in it. `journal` is there while
    the folder is unfinished; `state` is how a finished one was found.

    Targets of one run are always in the same order. The first one's journal speaks of the units of all,
    so that it is begun after the others' and its folder is published last.
    """

    ready: Prepared
    space: Workspace
    journal: Journal | None = None
    state: State | None = None

    @property
    def out(self) -> Path:
        return self.space.out

    @property
    def publishing(self) -> bool:
        """Return whether renaming has begun, as the journal says."""
        return self.space.remembered is not None and self.space.remembered.publish is not None

    @property
    def faults(self) -> Mapping[str, str]:
        """Files of a finished folder that were not as they had been made, with what was wrong."""
        return self.state.faults if self.state is not None else {}


@phase("stage")
def opened(
    ready: Prepared,
    out: Path,
    files: Files,
    kind: type[Space],
    told: Callable[[str], None] | None = None,
) -> Space:
    """The workspace of a plan's folder. Raises OutputError as Workspace does."""
    tensors = max(len(ready.plan.checkpoint), len(ready.plan.tensors))
    return kind(out, identity_of(ready), manifest_bytes(ready), tensors, files, told)


@contextmanager
def claimed(
    parts: Parts,
    files: Files,
    told: Callable[[str], None] | None = None,
    kind: type[Workspace] = Workspace,
) -> Iterator[list[Target]]:
    """Claim all folders. At the end locks are given up, and folders that nothing was begun in are as
    they were before."""
    targets: list[Target] = []
    try:
        for ready, out in parts:
            targets.append(Target(ready, opened(ready, out, files, kind, told)))
        yield targets
    finally:
        for target in targets:
            target.space.withdraw()
