"""The engine that needs nothing: worker processes of this machine, or this process alone."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from qconvert.run.engine import Begun, Work
from qconvert.run.events import Events
from qconvert.run.files import Files
from qconvert.run.pool import run_local
from qconvert.run.resume import open_journals, progress_of
from qconvert.run.target import Target
from qconvert.run.worker import Told
from qconvert.run.workspace import Workspace

if TYPE_CHECKING:
    from qconvert.run.backend import Backend


class LocalEngine:
    """All units of a run, on this machine."""

    space = Workspace
    publishes = True

    @contextmanager
    def begin(
        self, targets: Sequence[Target], told: Events, files: Files, backend: Backend | None
    ) -> Iterator[Begun | None]:
        with whole_run(targets, told, backend) as begun:
            yield begun

    def settle(self, begun: Begun, told: Events) -> Sequence[int]:
        return ()

    def run(self, work: Work) -> Generator[Told]:
        return run_local(work)


@contextmanager
def whole_run(
    targets: Sequence[Target], told: Events, backend: Backend | None
) -> Iterator[Begun | None]:
    """One run's journals in folders that it has claimed alone: begun, gone on with, or made for a
    repair."""
    _settle(targets)
    if targets[0].ready.options.finish:
        from qconvert.run.sharing import check_complete

        check_complete(targets)
    if targets[0].space.finished:
        from qconvert.run.repair import begin_repair, claim_damaged

        targets = claim_damaged(targets, told)
        if not any(target.faults for target in targets):
            yield None
            return
        targets = begin_repair(targets, backend)
    else:
        targets = open_journals(targets)
    try:
        progress = progress_of(targets, told)
        yield Begun(targets, progress, len(progress.kept))
    finally:
        for target in targets:
            if target.journal is not None:
                target.journal.close()


def _settle(targets: Sequence[Target]) -> None:
    """Take folders for finished ones where a run was stopped after its last rename, in all of them."""
    if all(target.space.finished or target.space.in_sight for target in targets):
        for target in targets:
            if target.space.in_sight:
                target.space.settle()
