"""Measures as the HTML page's plots take them: few bytes each, since there may be 50,000."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isnan
from typing import Any

from qconvert.core.names import natural_key
from qconvert.core.shown import printable
from qconvert.validation.findings import Measure

# SQNR in tenths of a dB; no format can reach these two levels.
EXACT, UNKNOWN = 99999, -99999

Key = tuple[int | None, int | None]


def plot_data(measures: Sequence[Measure]) -> list[dict[str, Any]]:
    """A dict for each role and format of a kind: `grid` (SQNR by layer and expert), `series` (by
    layer) or `alone` (neither). `layers` and `experts` are the rows and columns; `values`
    go row by row, null if nothing was measured. Of two matrices in one place (stored halves)
    the worse is kept, and `matrices` counts both."""
    members: dict[tuple[str, str, str], list[Measure]] = {}
    for measure in measures:
        members.setdefault((measure.role, measure.format, _kind(measure)), []).append(measure)
    ordered = sorted(members, key=lambda key: [natural_key(part) for part in key])
    return [_plot(*key, members[key]) for key in ordered]


def _kind(measure: Measure) -> str:
    if measure.layer is None:
        return "alone"
    return "series" if measure.expert is None else "grid"


def _plot(role: str, format: str, kind: str, members: Sequence[Measure]) -> dict[str, Any]:
    at: dict[Key, int] = {}
    for measure in members:
        key, value = (measure.layer, measure.expert), tenths(measure.sqnr)
        at[key] = min(at.get(key, EXACT), value)
    layers = sorted({m.layer for m in members if m.layer is not None})
    experts = sorted({m.expert for m in members if m.expert is not None})
    rows: Sequence[int | None] = layers or [None]
    columns: Sequence[int | None] = experts if kind == "grid" else [None]
    values: Sequence[int | None] = [at.get((row, column)) for row in rows for column in columns]
    if kind == "alone":
        values = sorted(tenths(m.sqnr) for m in members)
    return {
        "role": printable(role), "format": printable(format), "kind": kind, "matrices": len(members),
        "layers": layers, "experts": experts, "values": values,
    }  # fmt: skip


def tenths(sqnr: float) -> int:
    if isnan(sqnr):
        return UNKNOWN
    return EXACT if sqnr == inf else round(sqnr * 10)
