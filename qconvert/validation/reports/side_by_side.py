"""Two folders that were made from one source, role by role."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isinf, isnan

from qconvert.validation.findings import Table
from qconvert.validation.reports.figures import Group, decibel, groups
from qconvert.validation.runner import Report

_COLUMNS = ("role", "this", "median dB", "worst dB", "the other", "median dB", "worst dB", "closer")
_SAME = 0.05  # dB: less is shown as 0.0


def name_of(report: Report) -> str:
    return report.about.get("folder", "")


def side_by_side(report: Report, other: Report) -> Table:
    """A row a role that one of the two changes: format, median and worst SQNR of each, and which of them
    is closer to the source by how much. Where they differ most comes first."""
    ours, theirs = _by_role(report), _by_role(other)
    rows = []
    for role in dict.fromkeys((*ours, *theirs)):
        mine, yours = ours.get(role), theirs.get(role)
        if all(one is None or one.worst == inf for one in (mine, yours)):
            continue
        apart, word = _closer(mine, yours)
        rows.append((-apart, (role, *_cells(mine), *_cells(yours), word)))
    listed = tuple(row for _, row in sorted(rows, key=lambda row: (row[0], row[1])))
    note = "roles that are exact in both are left out; SQNR against the source, higher is closer"
    return Table("side by side", _COLUMNS, listed, note)


def _by_role(report: Report) -> Mapping[str, Group]:
    """A role's group; of one that is stored in two formats, the worse."""
    found: dict[str, Group] = {}
    for group in groups(report.measures):
        known = found.get(group.role)
        if known is None or not group.worst > known.worst:
            found[group.role] = group
    return found


def _cells(group: Group | None) -> tuple[str, str, str]:
    if group is None:
        return "not there", "", ""
    return group.format, decibel(group.median), decibel(group.worst)


def _closer(mine: Group | None, yours: Group | None) -> tuple[float, str]:
    if mine is None or yours is None or isnan(mine.median) or isnan(yours.median):
        return 0.0, "unknown"
    apart = 0.0 if mine.median == yours.median else mine.median - yours.median
    if abs(apart) < _SAME:
        return abs(apart), "equal"
    word = "this" if apart > 0 else "the other"
    return abs(apart), word if isinf(apart) else f"{word}, {abs(apart):.1f} dB"
