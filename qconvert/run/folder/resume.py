"""Resuming of an interrupted run: which folders can go on, and what of the work in them is still good.

Work of another plan is refused before: run/folder/journal.py, `refuse_other_plan`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.core.errors import OutputError
from qconvert.core.profiling import phase
from qconvert.models.calibrated import calibrated_in
from qconvert.plan.units import Unit
from qconvert.run.folder.staging import (
    check_staged,
    identity_of,
    lost_shards,
    planned_places,
    publish_order,
)
from qconvert.run.folder.target import Target, check_all_finished, check_backend, look_over
from qconvert.run.folder.verify import LOOK_BACK, check_units, wrong_units
from qconvert.run.folder.workspace import JOURNAL, Workspace, check_disk
from qconvert.run.work.events import Events
from qconvert.run.work.file_layout import OutFile

if TYPE_CHECKING:
    from qconvert.run.work.backend import Backend


Records = Sequence[str]
# A planned file and the folder it is for.
_Shard = tuple[Workspace, str]


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run, and where its units add what they leave. `kept` are the receipt lines of
    finished units, by number; `before` those of units that were finished once and must be done again;
    `remarks` are for the user; `seen` is how the source's shards were when the units were made.
    `mine` are the units of this run, None for all."""

    kept: dict[int, Records]
    before: Mapping[int, Records]
    remarks: list[str]
    seen: Any
    mine: frozenset[int] | None = None

    def left(self, units: int) -> list[int]:
        """Return which of all units this run has still to do."""
        mine = range(units) if self.mine is None else sorted(self.mine)
        return [number for number in mine if number not in self.kept]


@phase("stage")
def open_journals(targets: Sequence[Target]) -> list[Target]:
    """Go on where all folders can; else begin all of them anew. A folder that is finished needs no
    journal. Raises as `is_resumable` does."""
    resumable = is_resumable(targets)
    if not resumable:
        # The first folder's journal goes first: it speaks of files in all of them.
        for target in targets:
            target.space.forget()
    run = os.urandom(8).hex()
    found: list[Target] = []
    # It also comes last, when all files it may speak of are there.
    for target in reversed(targets):
        space = target.space
        if space.finished:
            found.append(target)
        elif resumable:
            found.append(replace(target, journal=space.resume()))
        else:
            found.append(replace(target, journal=space.begin(target.ready.layout, run)))
    return found[::-1]


def is_resumable(targets: Sequence[Target]) -> bool:
    """Return whether all folders can be gone on with. Raises OutputError where one is finished that
    another begun anew would write to."""
    first = targets[0].space
    unfinished = [target.space.remembered for target in targets if not target.space.finished]
    runs = {None if left is None else left.run for left in unfinished}
    resumable = None not in runs and len(runs) == 1
    finished = [target.out for target in targets if target.space.finished]
    kept = len(first.remembered.units) if first.remembered is not None else None
    if finished and not (resumable and kept == len(targets[0].ready.units)):
        raise OutputError(
            f"{finished[0]} is finished, and the other folder of its run, {first.out}, is not; remove "
            f"{finished[0]} to write both again"
        )
    return resumable


@phase("stage")
def progress_of(targets: Sequence[Target], events: Events) -> RunProgress:
    """Return what of the work that was left can be built on. Files that are not as planned are made
    anew; where some had been published, all are taken out of sight first.

    Raises OutputError for records that are not this plan's, and where another folder of the run is
    finished and would have to be written to.
    """
    first = targets[0]
    remembered = first.space.remembered
    if remembered is None:
        return RunProgress({}, {}, [], identity_of(first.ready)["seen"])
    events.phase("checking what was done before")
    kept, units = remembered.units, first.ready.units
    at = _places(targets)
    names = {name: place for name, (_, place) in at.items()}
    check_units(kept, units, names, first.space.work / JOURNAL)

    @cache
    def found(space: Workspace, file: str) -> Path:
        return space.find(file)

    def where(name: str) -> tuple[Path, int] | None:
        space, (file, offset) = at[name]
        return None if file in space.away else (found(space, file), offset)

    verify = first.ready.options.verify
    wrong = wrong_units(kept, units, where, None if verify else LOOK_BACK)
    begun = [target for target in targets if target.journal is not None]
    _withdraw(begun, damaged=bool(wrong))
    before: dict[int, Records] = {}
    if not any(target.publishing for target in begun):
        before = _forget_damaged(targets, begun, kept, set(wrong), at)
    return RunProgress(kept, before, list(remembered.remarks), remembered.seen)


def _places(targets: Sequence[Target]) -> dict[str, tuple[Workspace, tuple[str, int]]]:
    """Of each output its folder, and file name and offset there."""
    return {
        name: (target.space, place)
        for target in targets
        for name, place in planned_places(target.ready.layout.files).items()
    }


def _withdraw(begun: Sequence[Target], *, damaged: bool) -> None:
    """Take all folders out of sight again where some are, and any of them is not fit to be published."""
    rounds = max(target.space.withdrawals for target in begun)
    if any(target.publishing for target in begun) and (damaged or not all(map(_is_sound, begun))):
        rounds += 1
    for target in begun:
        assert target.journal is not None
        if target.space.withdrawals < rounds:
            target.space.withdraw_again(target.journal)
    for target in begun:
        target.space.move_back()


def _is_sound(target: Target) -> bool:
    """Return whether a folder that is being published, or about to be, can be."""
    try:
        if target.publishing:
            check_staged(target.ready, target.space)
    except OutputError:
        return False
    return target.publishing or not _lost(target)


def _lost(target: Target) -> dict[str, str]:
    return lost_shards(target.ready, target.space.stage, target.space.away)


def _forget_damaged(
    targets: Sequence[Target],
    begun: Sequence[Target],
    kept: dict[int, Records],
    wrong: set[int],
    at: Mapping[str, tuple[Workspace, tuple[str, int]]],
) -> dict[int, Records]:
    """Take units out of `kept`, and out of the journal, that are wrong or in lost files, and make those
    files anew. Returns the units' records."""
    units = targets[0].ready.units
    files = [{(at[name][0], at[name][1][0]) for name in unit.names} for unit in units]
    lost = {
        (target.space, file.name): file
        for target in begun
        for faults in [_lost(target)]  # once: it reads all headers
        for file in target.ready.layout.files
        if file.name in faults
    }
    before = _take_out(kept, wrong, files, lost, _shared(begun, lost))
    if before:
        _check_none_finished(targets)
        assert targets[0].journal is not None
        targets[0].journal.append([{"forget": sorted(before)}])
    for (space, _), file in lost.items():
        space.make_again(file)
    return before


def _shared(begun: Sequence[Target], lost: Mapping[_Shard, OutFile]) -> dict[_Shard, OutFile]:
    """Files that cannot be written to: staged ones that have a second name, which may be anyone's, and
    those that are elsewhere already."""
    return {
        (target.space, file.name): file
        for target in begun
        for file in target.ready.layout.files
        if file.link is None
        and (target.space, file.name) not in lost
        and (file.name in target.space.away or (target.space.stage / file.name).stat().st_nlink > 1)
    }


def _take_out(
    kept: dict[int, Records],
    wrong: set[int],
    files: Sequence[set[_Shard]],
    lost: dict[_Shard, OutFile],
    shared: Mapping[_Shard, OutFile],
) -> dict[int, Records]:
    """Take units out of `kept` that are wrong or in lost files. `files` are those of each unit. A shared
    file that would be written to is lost too: it is added to `lost`."""
    before: dict[int, Records] = {}
    while True:
        for number in [n for n in kept if n in wrong or files[n] & lost.keys()]:
            before[number] = kept.pop(number)
        written = {file for n, unit in enumerate(files) if n not in kept for file in unit}
        more = {key: file for key, file in shared.items() if key in written and key not in lost}
        if not more:
            return before
        lost |= more


def _check_none_finished(targets: Sequence[Target]) -> None:
    first = targets[0].out
    for target in targets:
        if target.space.finished:
            raise OutputError(
                f"{first}: unfinished work in it is damaged, and the other folder of its run, "
                f"{target.out}, is finished; remove the latter, and run qconvert clean {first}"
            )


# A finished folder that is not as it was made becomes an unfinished run again.


def look_over_all(targets: Sequence[Target], events: Events) -> list[Target]:
    """Finished folders with how they are. Raises OutputError where one of them is not finished."""
    check_all_finished(targets)
    events.phase("checking the finished folder")
    return [
        replace(target, state=look_over(target.ready, target.out, verify=_verify(target)))
        for target in targets
    ]


def _verify(target: Target) -> bool:
    return target.ready.options.verify


def claim_damaged(targets: Sequence[Target], events: Events) -> list[Target]:
    """Finished folders with how they are; where any is damaged all are locked, and looked over again
    now that nobody else is at work there. Raises OutputError where another run came first."""
    found = look_over_all(targets, events)
    if not any(target.faults for target in found):
        return found
    for target in targets:
        target.space.claim()
        if not target.space.finished:
            raise OutputError(
                f"{target.out}: another run began a repair first; run the same command again"
            )
    return look_over_all(targets, events)


def begin_repair(targets: Sequence[Target], backend: Backend | None) -> list[Target]:
    """Make unfinished runs of finished folders: their journals know what is still good, and every file
    goes back out of sight. Folders that were made together are repaired together."""
    units = targets[0].ready.units
    kept, lost = _kept_and_lost(targets, units)
    if any(calibrated_in(unit) is not None for unit in lost):
        check_backend([(target.ready, target.out) for target in targets], backend)
    for target in targets:
        check_disk(target.out, _lost_bytes(target))
    run = secrets.token_hex(8)
    begun: list[Target] = []
    # As folders are begun: the first folder's journal, which speaks of all units, comes last.
    for target in reversed(targets):
        assert target.state is not None
        known = kept if target is targets[0] else {}
        journal = target.space.begin_repair(
            publish_order(target.ready), target.state.edited, known, run
        )
        begun.append(replace(target, journal=journal))
    return begun[::-1]


def _kept_and_lost(
    targets: Sequence[Target], units: Sequence[Unit]
) -> tuple[Mapping[int, Sequence[str]], list[Unit]]:
    """Records of the units that all receipts together tell of, and units that have to be done again."""
    states = [target.state for target in targets if target.state is not None]
    records = {name: text for state in states for name, text in state.records.items()}
    kept = {
        number: [records[name] for name in unit.names]
        for number, unit in enumerate(units)
        if all(name in records for name in unit.names)
    }
    wrong = {name for state in states for name in state.wrong}
    lost = [
        unit
        for number, unit in enumerate(units)
        if number not in kept or any(name in wrong for name in unit.names)
    ]
    return kept, lost


def _lost_bytes(target: Target) -> int:
    assert target.state is not None
    lost = target.state.lost
    return sum(f.size for f in target.ready.layout.files if f.name in lost and not f.link)
