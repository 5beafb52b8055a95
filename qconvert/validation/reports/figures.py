"""Measures in few figures: one line per format and role, and the worst matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf, isnan, nan
from statistics import median_low

from qconvert.validation.findings import Measure, Table
from qconvert.validation.runner import Report

# --- Usual losses of formats, in words beside a role's SQNR ---------------------------------------


# Least and most SQNR in dB, by the format that a measure names.
USUAL: Mapping[str, tuple[float, float]] = {
    "fp8": (31.4, 31.6),  # blocks of 128, or of 32 with scales that are exponents
    "w4a16": (16.0, 20.6),  # a scale a row .. groups of 32
    "w8a16": (40.5, 43.1),
    "w8a8": (40.5, 41.7),
    "nvfp4": (20.3, 20.6),
    "mxfp4": (18.9, 19.1),
    "amxint4": (15.5, 17.0),  # a scale a row
    "amxint8": (40.5, 42.2),
}
CALIBRATED = (
    "calibrated codes lie further from the weights than rounded ones; whether what they compute is "
    "nearer, `qconvert eval` measures"
)
ROUNDED = (
    "weights with outliers lose more than is usual, and so do codes that another tool calibrated; what "
    "it costs, `qconvert eval` measures"
)
_SLACK = 3.0  # dB: trained weights beside normal ones
_APART = 6.0  # dB: twice the error


def compared(group: Group) -> str:
    """Compare a role's median, and its worst matrix, with what rounding to the format usually loses; ""
    for what is exact, unknown or of a format without a usual loss. Codes that a calibration found are
    not judged by their distance."""
    usual = USUAL.get(group.format)
    if usual is None or isnan(group.median) or group.worst == inf:
        return ""
    low, high = usual
    rounding = f"rounding to {group.format} usually gives"
    band = f"{low:g} to {high:g} dB"
    if group.median == inf:
        word = "most are exact"
    elif group.calibrated:
        word = f"codes of a calibration; {rounding} {band}"
    elif group.median > high + _SLACK:
        word = f"better than what {rounding} ({band}) by more than {_SLACK:g} dB"
    elif group.median < low - _SLACK:
        word = f"worse than what {rounding} ({band}) by more than {_SLACK:g} dB"
    else:
        word = f"within {_SLACK:g} dB of what {rounding} ({band})"
    if group.worst < min(low, group.median) - _APART:
        word += f"; its worst matrix is lower by more than {_APART:g} dB"
    return word


def remark_on(found: Sequence[Group]) -> str:
    """Remark on codes that a calibration found, or else of codes further from the weights than
    rounded ones usually are; "" of others."""
    if any(group.calibrated for group in found):
        return CALIBRATED
    return ROUNDED if any("worse than" in compared(group) for group in found) else ""


@dataclass(frozen=True, slots=True)
class Group:
    """All matrices of a format and role. `worst` and `median` are SQNR in dB of those that have one
    (inf: equal to the source; nan: none has one); `rms` is the largest relative one. `calibrated`: codes
    of any were found by a calibration."""

    format: str
    role: str
    matrices: int
    exact: int
    unknown: int
    worst: float
    median: float
    rms: float
    calibrated: bool = False


def groups(measures: Sequence[Measure]) -> list[Group]:
    """By format, then role."""
    members: dict[tuple[str, str], list[Measure]] = {}
    for measure in measures:
        members.setdefault((measure.format, measure.role), []).append(measure)
    return [_group(*key, members[key]) for key in sorted(members)]


def _group(format: str, role: str, members: Sequence[Measure]) -> Group:
    every = [measure.sqnr for measure in members]
    known = [sqnr for sqnr in every if not isnan(sqnr)]
    return Group(
        format, role, len(every), known.count(inf), len(every) - len(known),
        min(known, default=nan), median_low(known) if known else nan,
        max(measure.rms for measure in members), any(measure.calibrated for measure in members),
    )  # fmt: skip


def worst(measures: Sequence[Measure], most: int) -> list[Measure]:
    """Those furthest from the source, worst first; one without a figure (its source is all
    zero, and it is not) comes first. Matrices equal to the source are not among them."""
    unequal = [measure for measure in measures if measure.sqnr != inf]
    return sorted(unequal, key=lambda m: -inf if isnan(m.sqnr) else m.sqnr)[:most]


def decibel(sqnr: float) -> str:
    """SQNR as people read it, to a tenth of a dB."""
    if isnan(sqnr):
        return "unknown"
    return "exact" if sqnr == inf else f"{sqnr:.1f}"


def cells(group: Group) -> tuple[str, ...]:
    """A group's line, as COLUMNS."""
    return (
        group.format, group.role, f"{group.matrices:,}", f"{group.exact:,}", f"{group.unknown:,}",
        decibel(group.worst), decibel(group.median), f"{group.rms:.3g}",
    )  # fmt: skip


# The first two are words, the rest figures.
COLUMNS = (
    "format", "role", "matrices", "exact", "unknown", "worst SQNR dB", "median SQNR dB",
    "largest rel. RMS",
)  # fmt: skip


# Two folders that were made from one source, role by role.

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
