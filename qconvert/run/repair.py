"""A finished folder that is not as it was made becomes an unfinished run again."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from qconvert.core.errors import OutputError
from qconvert.models.calibrated import calibrated_in
from qconvert.plan.units import Unit
from qconvert.run.events import Events
from qconvert.run.finished import look_over
from qconvert.run.preflight import check_all_finished, check_backend
from qconvert.run.staging import publish_order
from qconvert.run.target import Target
from qconvert.run.workspace import check_disk

if TYPE_CHECKING:
    from qconvert.run.backend import Backend


def look_over_all(targets: Sequence[Target], told: Events) -> list[Target]:
    """Finished folders with how they are. Raises OutputError where one of them is not finished."""
    check_all_finished(targets)
    told.phase("checking the finished folder")
    return [
        replace(target, state=look_over(target.ready, target.out, verify=_verify(target)))
        for target in targets
    ]


def _verify(target: Target) -> bool:
    return target.ready.options.verify


def claim_damaged(targets: Sequence[Target], told: Events) -> list[Target]:
    """Finished folders with how they are; where any is damaged all are locked, and looked over again
    now that nobody else is at work there. Raises OutputError where another run came first."""
    found = look_over_all(targets, told)
    if not any(target.faults for target in found):
        return found
    for target in targets:
        target.space.claim()
        if not target.space.finished:
            raise OutputError(
                f"{target.out}: another run began a repair first; run the same command again"
            )
    return look_over_all(targets, told)


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
