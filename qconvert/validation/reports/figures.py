"""Measures in few figures: one line per format and role, and the worst matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan, nan
from statistics import median_low

from qconvert.validation.findings import Measure

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
    "calibrated codes lie further from the weights than rounded ones, and nearer in what they compute: "
    "`qconvert eval` measures that"
)
_SLACK = 3.0  # dB: trained weights beside normal ones
_APART = 6.0  # dB: twice the error


def compared(group: Group) -> str:
    """Compare a role's median, and its worst matrix, with what the format usually loses; "" for what is
    exact, unknown or of a format without a usual loss."""
    usual = USUAL.get(group.format)
    if usual is None or isnan(group.median) or group.worst == inf:
        return ""
    low, high = usual
    said = f"usual for {group.format} that is rounded ({low:g} to {high:g} dB)"
    if group.median == inf:
        word = "most are exact"
    elif group.median > high + _SLACK:
        word = f"better than {said}"
    elif group.median < low - _SLACK:
        word = f"worse than {said}"
    else:
        word = f"as {said}"
    if group.worst < min(low, group.median) - _APART:
        word += "; its worst matrix stands apart"
    return word


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
