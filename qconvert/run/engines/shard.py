"""One part of a run whose folder many machines fill, and what must be there to publish the whole.

There is no coordinator: each shard works in OUT/.qconvert/ as a run of its own, with a journal of
its own (run/folder/leases.py), on units that the plan gives it (run/work/division.py). Staged files are
made by whichever shard needs one first. `finish`, and the same command without --shard, take all
journals for that of one interrupted run and go on from there: with nothing left to do, that
publishes."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.core.errors import OutputError
from qconvert.core.shown import count, format_size
from qconvert.run.engines.base import ClaimedRun, UnitBatches
from qconvert.run.engines.local import run_local
from qconvert.run.folder.journal import read_journal, refuse_other_plan
from qconvert.run.folder.leases import (
    SHARDS,
    Lease,
    ShardJournal,
    at_work,
    begin_lease,
    create_atomically,
    journals_in,
    merged,
    refuse_at_work,
    refuse_other_plans,
    remove_unfinished,
    unfinished,
)
from qconvert.run.folder.prepare import Prepared
from qconvert.run.folder.resume import RunProgress
from qconvert.run.folder.staging import identity_of, planned_places
from qconvert.run.folder.target import Target
from qconvert.run.folder.verify import (
    LOOK_BACK,
    check_units,
    shard_fault,
    wrong_units,
)
from qconvert.run.folder.workspace import JOURNAL, Workspace
from qconvert.run.work.division import LEFT_TO_FINISH, Division, Shard, divide
from qconvert.run.work.events import Events
from qconvert.run.work.file_layout import OutFile
from qconvert.run.work.files import Files
from qconvert.run.work.worker import WorkerEvent

if TYPE_CHECKING:
    from qconvert.run.work.backend import Backend


_SHOWN_SHARDS = 5

_LISTED_AFTER = 90  # seconds: NFS clients keep the names of a folder for up to 60


class SharedWorkspace(Workspace):
    """A folder that shards of one plan work in at the same time. Raises OutputError as Workspace
    does, and where a run without --shard has begun in it."""

    _shared = True

    def _open(self) -> None:
        if not self.work.is_dir():
            self._refuse_foreign()
            if self.finished:
                return
        self.claim()
        if self.finished:
            self.release()

    def _look_around(self, claimed: bool) -> None:
        found = read_journal(self.work / JOURNAL)
        if found is not None:
            refuse_other_plan(self.out, found.header, self._identity)
            raise OutputError(
                f"{self.out} holds the unfinished work of a run without --shard, or of `qconvert "
                "finish`: go on with the same command without --shard"
            )
        self.journals = tuple(journals_in(self.work))
        refuse_other_plans(self.out, self.journals, self._identity)
        self._refuse_foreign()
        self.remembered = merged(self.journals, self._identity) if self.journals else None


def division_of(targets: Sequence[Target], count: int) -> Division:
    return divide(targets[0].ready.units, [target.ready.layout for target in targets], count)


@dataclass(frozen=True)
class ShardEngine:
    """One part of a run's units, on this machine, in folders that others fill too. Nothing is
    published."""

    shard: Shard
    space = SharedWorkspace
    publishes = False

    @contextmanager
    def begin(
        self, targets: Sequence[Target], events: Events, files: Files, backend: Backend | None
    ) -> Iterator[ClaimedRun | None]:
        """Raises OutputError where the same shard is at work, or one of another number of shards, and
        where staged files are not as planned."""
        finished = [target for target in targets if target.space.finished]
        if len(finished) == len(targets):
            yield None
            return
        if finished:
            raise OutputError(
                f"{targets[0].out}: one folder of this run is finished, and the others are not; run the "
                "same command without --shard"
            )
        known = targets[0].space.remembered
        before = frozenset() if known is None else known.units.keys()
        division = division_of(targets, self.shard.count)
        leases: list[Lease] = []
        how = "stopped"
        try:
            # As in any run, the journal that speaks of the units comes last.
            for target in reversed(targets):
                leases.append(_lease(target, self.shard, division, events, files))
            lease = leases[-1]
            begun = [replace(target, journal=lease) for target in targets[:1]] + list(targets[1:])
            mine = division.of(self.shard)
            progress = _progress(begun, self.shard, mine, lease, events, files)
            yield ClaimedRun(begun, progress, len(mine & before))
            if not progress.left(0):
                how = "done"  # of all units its own count alone
        finally:
            for each in leases:
                each.end(how)

    def finish_units(self, begun: ClaimedRun, events: Events) -> Sequence[int]:
        return ()

    def run(self, work: UnitBatches) -> Generator[WorkerEvent]:
        return run_local(work)


def _lease(target: Target, shard: Shard, division: Division, events: Events, files: Files) -> Lease:
    """The journal of this start of a shard in a folder."""
    space = target.space
    header = {
        **identity_of(target.ready), "run": SHARDS,
        "command": list(target.ready.options.command), "folder": str(Path.cwd()),
        "shares": [list(pair) for pair in (*division.shares, division.rest)],
    }  # fmt: skip
    taken: list[int] = []
    while True:
        journals = journals_in(space.work)
        _refuse_busy(target, shard, journals, events)
        start = 1 + max((j.start for j in journals if j.shard == shard), default=0)
        if start in taken:  # a file server may list another process's journal later
            if taken.count(start) > _LISTED_AFTER:
                raise OutputError(
                    f"{space.work / SHARDS}: what has the name of start {start} of shard {shard} is no "
                    "journal; remove it"
                )
            time.sleep(1)
        taken.append(start)
        lease = begin_lease(space.work, shard, start, header, files)
        if lease is not None:
            break
    known = {journal.path for journal in journals}
    later = [j for j in journals_in(space.work, known) if j.shard != shard]
    try:
        if os.path.lexists(space.work / JOURNAL):
            raise OutputError(f"{space.out}: is being finished; there is nothing to do for a shard")
        refuse_other_plans(space.out, later, identity_of(target.ready))
        _refuse_busy(target, shard, later, events)
        remove_unfinished(space.work, shard, files)
        files.make_folder(space.stage)
    except BaseException:
        lease.end("stopped")
        raise
    return lease


def _refuse_busy(
    target: Target, shard: Shard, journals: Sequence[ShardJournal], events: Events
) -> None:
    """Raise OutputError where this shard is at work, or one of another division."""
    rivals = [j for j in journals if j.shard == shard or j.shard.count != shard.count]
    # Of each shard only the last start can be at work; an earlier one would have stopped.
    latest = {journal.shard: journal for journal in rivals}
    busy = at_work(list(latest.values()), events.phase)
    refuse_at_work(target.out, busy, f"shard {shard} cannot begin")


def _progress(
    targets: Sequence[Target],
    shard: Shard,
    mine: frozenset[int],
    lease: Lease,
    events: Events,
    files: Files,
) -> RunProgress:
    """Return what is done of the run, after the files that this shard writes to are there."""
    first = targets[0]
    units = first.ready.units
    journals = journals_in(first.space.work)
    found = merged(journals, identity_of(first.ready))
    at = {
        name: (target.space.stage / file, offset)
        for target in targets
        for name, (file, offset) in planned_places(target.ready.layout.files).items()
    }
    names = {name: (path.name, offset) for name, (path, offset) in at.items()}
    check_units(found.units, units, names, first.space.work / JOURNAL)
    needed = {at[name][0] for number in mine for name in units[number].names}
    filled = {at[name][0] for number in found.units for name in units[number].names}
    for target in targets:
        for file in target.ready.layout.files:
            path = target.space.stage / file.name
            if path in needed:
                _stage(target, file, shard, path in filled, files)
        files.sync_folder(target.space.stage)
    own = {n: records for n, records in found.units.items() if n in mine}
    if own:
        events.phase("checking what was done before")

    def where(name: str) -> tuple[Path, int]:
        return at[name]

    wrong = wrong_units(own, units, where, None if first.ready.options.verify else LOOK_BACK)
    before = {number: found.units.pop(number) for number in wrong}
    if before:
        lease.append([{"forget": sorted(before)}])
    seen_then = [j.remembered.seen for j in journals if j.shard == shard]
    seen_then = seen_then[:-1] or seen_then  # the last is this start's
    return RunProgress(found.units, before, [], seen_then[-1], mine)


def _stage(target: Target, file: OutFile, shard: Shard, filled: bool, files: Files) -> None:
    """Make a file that this shard writes to, unless it is there. Raises OutputError where it is not as
    planned, or lost with work in it: only a run that knows of all shards makes it again."""
    space = target.space
    path = space.stage / file.name
    if not (filled or os.path.lexists(path)):
        if file.link is not None:
            files.link_once(file.link.resolve(), path)
        else:
            create_atomically(path, unfinished(space.work, shard), file.header, file.size, files)
    fault = shard_fault(path, file)
    if fault is not None:
        raise OutputError(
            f"{path}: {fault}, and finished work in it may be lost; run the same command without "
            "--shard, which does that work again"
        )


@dataclass(frozen=True)
class Share:
    """Share of a run that a shard does: units and bytes to write; of those that are left to `finish`,
    too; `least` and `most` are the bytes of the smallest and the largest share."""

    shard: str
    units: int
    nbytes: int
    of_units: int
    rest_units: int
    rest_bytes: int
    least: int
    most: int


def share_of(parts: Sequence[Prepared]) -> Share | None:
    """The share of a run of one shard, None for a whole run. `parts` are run together."""
    shard = parts[0].options.shard
    if shard is None:
        return None
    units = parts[0].units
    division = divide(units, [ready.layout for ready in parts], shard.count)
    sizes = [nbytes for _, nbytes in division.shares]
    return Share(
        str(shard),
        *division.shares[shard.index],
        len(units),
        *division.rest,
        min(sizes),
        max(sizes),
    )


# --- the whole ------------------------------------------------------------------------------------


def check_complete(targets: Sequence[Target]) -> None:
    """Raise OutputError where `finish` would have to do the work of shards, naming what misses and the
    commands to run."""
    first = targets[0]
    if first.space.finished:
        return
    if first.space.remembered is None:
        raise OutputError(f"{first.out}: there is nothing to finish; run the conversion first")
    journals = first.space.journals
    if not journals:
        return  # all was there when it was taken over
    for target in targets[1:]:
        if not target.space.finished and target.space.remembered is None:
            raise OutputError(
                f"{target.out}: what shards left there is lost; run the same command without --shard"
            )
    newest = max(journals, key=lambda journal: journal.path.stat().st_mtime_ns)
    division = division_of(targets, newest.shard.count)
    done = first.space.remembered.units
    missing: dict[int, list[int]] = {}
    for number, owner in enumerate(division.owner):
        if owner != LEFT_TO_FINISH and number not in done:
            missing.setdefault(owner, []).append(number)
    begun = {journal.shard for journal in journals}
    if not missing:
        return
    said = []
    for index, numbers in sorted(missing.items())[:_SHOWN_SHARDS]:
        shard = Shard(index, newest.shard.count)
        left = format_size(sum(first.ready.units[number].write for number in numbers))
        said.append(
            f"shard {shard} lacks {len(numbers)} of {count(division.shares[index][0], 'unit')} ({left})"
            if shard in begun
            else f"shard {shard} has not begun"
        )
    more = f" and {len(missing) - _SHOWN_SHARDS} more" if len(missing) > _SHOWN_SHARDS else ""
    example = command_of(newest, Shard(min(missing), newest.shard.count))
    raise OutputError(
        f"{first.out}: not all is done: {'; '.join(said)}{more}. Run each of them again: {example}; or "
        "the same command without --shard, to do the rest here"
    )


def command_of(journal: ShardJournal, shard: Shard) -> str:
    """The command line of another shard of the same run."""
    if not journal.command:
        return f"the same call with shard {shard}"
    words = without_shard(journal.command)
    return shlex.join(["qconvert", *words, "--shard", str(shard)])


def without_shard(command: Sequence[str]) -> list[str]:
    """A command line without its option --shard."""
    return without_option(command, "--shard")


def without_option(command: Sequence[str], name: str) -> list[str]:
    """A command line without an option and its value."""
    words: list[str] = []
    skip = False
    for word in command:
        if not skip and word != name and not word.startswith(f"{name}="):
            words.append(word)
        skip = not skip and word == name
    return words
