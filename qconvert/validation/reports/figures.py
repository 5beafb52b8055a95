"""Measures in few figures: one line per format and role, and the worst matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan, nan
from statistics import median_low

from qconvert.validation.findings import Measure


@dataclass(frozen=True, slots=True)
class Group:
    """All matrices of a format and role. `worst` and `median` are SQNR in dB of those that have one
    (inf: equal to the source; nan: none has one); `rms` is the largest relative one."""

    format: str
    role: str
    matrices: int
    exact: int
    unknown: int
    worst: float
    median: float
    rms: float


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
        max(measure.rms for measure in members),
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
