"""For people: one page with plots, that needs no network and loads nothing (see markup.py); its script
is `page.js`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import inf, isnan
from pathlib import Path
from typing import Any

from qconvert.core.names import natural_key
from qconvert.core.shown import count, printable
from qconvert.validation.findings import Finding, Measure, Rule, Table
from qconvert.validation.reports import markup
from qconvert.validation.reports.figures import (
    COLUMNS,
    cells,
    compared,
    decibel,
    groups,
    name_of,
    remark_on,
    side_by_side,
    worst,
)
from qconvert.validation.reports.words import by_rule, claims, headline, verdict
from qconvert.validation.runner import Report

# --- Measures as the HTML page's plots take them --------------------------------------------------


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


# For one rule, and rows of one table: the page must stay small enough to be mailed.
_MOST = 100
_TOLD = {
    "proved": ("Proved", "shown from the folder's content"),
    "only read": ("Only read", "stated by the folder itself, and not proved here"),
    "not checked": ("Not checked", "not checked, and why"),
}
_WORST_COLUMNS = (
    ("tensor", "tensor", ""), ("role", "role", ""), ("layer", "layer", "figure"),
    ("expert", "expert", "figure"), ("format", "format", ""), ("sqnr", "SQNR, dB", "figure"),
    ("rms", "rel. RMS", "figure"), ("worst", "largest error", "figure"),
    ("cosine", "1 - cosine", "figure"),
)  # fmt: skip


def render(report: Report, rules: Mapping[str, Rule]) -> str:
    """Verdict, findings by rule with cause and fix, claims, tables, and, if something was
    measured, figures, heat map, histogram, errors by layer and the worst 500 matrices."""
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    body = [*_top(report), *_findings(report, rules)]
    if report.beside is not None:
        body += _beside(report, report.beside)
    # What is lossy comes before what was proved: that is what one opens the page for.
    if report.measures:
        body += _measures(report.measures)
    body += _claims(report)
    body += [
        markup.section(markup.text(table.title), markup.table(table)) for table in report.tables
    ]
    title = f"Validation {verdict(report)}: {Path(report.about.get('folder', '')).name}"
    return markup.document(title, body, script, _data(report.measures))


_IN_SCRIPT = str.maketrans({"<": "\\u003c", "#": "\\u0023"})


def _data(measures: Sequence[Measure]) -> str:
    """JSON inside a script element: `<` is escaped, so that no name can end it, and `#`: a CI that keeps
    the page in its log takes `##[` for a command."""
    plots: dict[str, Any] = {"exact": EXACT, "unknown": UNKNOWN, "plots": plot_data(measures)}
    return json.dumps(plots, separators=(",", ":"), allow_nan=False).translate(_IN_SCRIPT)


def _top(report: Report) -> Iterator[str]:
    yield f'<header class="{verdict(report)}">\n<h1>Validation {verdict(report)}</h1>'
    yield f'<p class="tally">{markup.text(name_of(report))}: {markup.text(headline(report))}</p>'
    if report.measures:
        yield _large(report.measures)
    yield "<dl>"
    yield from (
        f"<dt>{markup.text(k)}</dt><dd>{markup.text(v)}</dd>" for k, v in report.about.items()
    )
    yield "</dl>\n</header>"


def _large(measures: Sequence[Measure]) -> str:
    """The figures that people quote."""
    known = sorted(m.sqnr for m in measures if m.sqnr != inf and not isnan(m.sqnr))
    equal = sum(m.sqnr == inf for m in measures)
    shown = [("matrices equal the source", f"{equal:,} of {len(measures):,}")]
    if known:
        shown.append(("median SQNR of the others", f"{known[(len(known) - 1) // 2]:.1f} dB"))
        shown.append(("worst SQNR", f"{known[0]:.1f} dB"))
    return markup.large(shown)


def _findings(report: Report, rules: Mapping[str, Rule]) -> Iterator[str]:
    """Rules with errors come before those with only warnings."""
    told = by_rule(report.findings, rules)
    told.sort(key=lambda one: all(finding.severity == "warning" for finding in one[1]))
    if told:
        yield markup.section(
            "Findings", *(_rule(rule, found) for rule, found in told), id="findings"
        )


def _rule(rule: Rule, found: Sequence[Finding]) -> str:
    severity = "error" if any(f.severity == "error" for f in found) else "warning"
    name = f"<b>{markup.text(rule.id)}</b> {markup.text(rule.title)}"
    opening = (
        f'<details open class="rule {severity}">\n'
        f'<summary><span class="badge">{severity}</span> {name} '
        f'<span class="quiet">{len(found):,}</span></summary>'
    )
    told = (("Cause", rule.cause), ("What to do", rule.fix))
    parts = [
        opening,
        *(f"<p><b>{label}.</b> {markup.text(text)}</p>" for label, text in told if text),
    ]
    rows = "".join(
        f"<tr><td>{f.severity}</td><td><code>{markup.text(f.where)}</code></td>"
        f"<td>{markup.text(f.message)}</td></tr>"
        for f in found[:_MOST]
    )
    head = "<tr><th>level</th><th>where</th><th>what</th></tr>"
    parts.append(
        f'<div class="wide"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    )
    more = len(found) - _MOST
    parts += [f'<p class="quiet">... and {more:,} more (--format json lists all)</p>'] * (more > 0)
    return "\n".join([*parts, "</details>"])


def _claims(report: Report) -> Iterator[str]:
    yield '<div class="claims">'
    for label, texts in claims(report):
        title, gloss = _TOLD[label]
        items = (
            "".join(f"<li>{markup.text(text)}</li>" for text in texts)
            or '<li class="none">nothing</li>'
        )
        kind = label.replace(" ", "-")
        yield markup.section(
            f'{title} <span class="quiet">{len(texts)}</span>',
            f'<p class="quiet">{gloss}</p>\n<ul class="{kind}">{items}</ul>',
        )
    yield "</div>"


def _measures(measures: Sequence[Measure]) -> Iterator[str]:
    found = groups(measures)
    lossy = [group for group in found if group.exact < group.matrices]
    lossy.sort(key=lambda group: -inf if isnan(group.worst) else group.worst)
    layered = [m for m in measures if m.layer is not None]
    if any(m.expert is not None for m in layered):
        yield markup.section("Layers and experts", _HEAT, id="experts")
    exact = tuple(cells(group) for group in found if group.exact == group.matrices)
    rows = tuple((*cells(group), compared(group)) for group in lossy)
    yield markup.section(
        f'Against the source <span class="quiet">{count(len(measures), "matrix", "matrices")}</span>',
        '<p class="quiet">SQNR is signal to quantization noise: the norm of the source\'s weights over '
        "the norm of the difference, in dB. Higher is closer; 20 dB more is a tenth of the error; "
        "<b>exact</b> is equal to the last bit, <b>unknown</b> means that the source is all zero. "
        f"{markup.text(remark_on(found))}</p>",
        markup.table(Table("", (*COLUMNS, "in words"), rows)) if rows else "",
        _exact(exact),
        id="against",
    )
    yield markup.section("How many matrices have which SQNR", _HISTOGRAM, id="distribution")
    if any(m.expert is None and m.sqnr != inf for m in layered):
        yield markup.section("Outside the experts, layer by layer", _SERIES, id="layers")
    yield _worst(measures)


def _exact(rows: tuple[tuple[str, ...], ...]) -> str:
    """Roles whose matrices all equal the source: a line, and the rows for who opens it."""
    if not rows:
        return ""
    number = sum(int(row[2].replace(",", "")) for row in rows)
    matrices = count(number, "matrix or vector", "matrices and vectors")
    be = "is" if number == 1 else "are"
    summary = f"{matrices} of {count(len(rows), 'role')} {be} exact"
    return (
        f'<details class="exact">\n<summary>{summary}</summary>\n'
        f"{markup.table(Table('', COLUMNS, rows))}\n</details>"
    )


def _beside(report: Report, other: Report) -> Iterator[str]:
    """Both folders in a box each, then role by role."""
    boxes = "".join(
        f'<div class="box {verdict(one)}"><b>{label}: {markup.text(name_of(one))}</b><br>'
        f"{verdict(one)}: {count(one.errors, 'error')}, {count(one.warnings, 'warning')}<br>"
        f'<span class="quiet">{markup.text(one.about.get("format", ""))}</span></div>'
        for label, one in (("this", report), ("the other", other))
    )
    yield markup.section(
        "Side by side",
        f'<div class="pair">{boxes}</div>',
        markup.table(side_by_side(report, other)),
        id="beside",
    )


_HEAT = """<div class="bar"><label>Projection <select id="heat-role"></select></label>
<div class="legend" id="heat-legend"></div></div>
<div class="plot"><canvas id="heat" role="img" aria-label="SQNR by layer and expert"></canvas>
<div class="tip" id="heat-tip" hidden></div></div>
<p class="quiet" id="heat-note"></p>"""
_HISTOGRAM = """<div class="bar"><label>Of <select id="histogram-role"></select></label></div>
<div class="plot" id="histogram"></div>
<p class="quiet" id="histogram-note"></p>"""
_SERIES = """<p class="quiet">SQNR in dB by layer, on one scale. A ring at the top edge is an exact
matrix, a cross at the bottom one of unknown SQNR.</p>
<div class="panels" id="series"></div>"""


def _worst(measures: Sequence[Measure]) -> str:
    furthest = worst(measures, markup.MOST_ROWS)
    if not furthest:
        return markup.section(
            "The worst matrices", "<p>None: all equal the source.</p>", id="worst-section"
        )
    head = "".join(
        f'<th data-key="{key}" class="{kind}"'
        + (' aria-sort="ascending"' if key == "sqnr" else "")
        + f'><button type="button">{title}</button></th>'
        for key, title, kind in _WORST_COLUMNS
    )
    rows = "".join(_row(measure) for measure in furthest)
    return markup.section(
        f'The worst matrices <span class="quiet">{len(furthest):,} of {len(measures):,}</span>',
        '<p class="quiet">Click a column name to sort by it, click again to reverse the order.</p>',
        '<div class="wide tall"><table id="worst" data-sorted="sqnr:ascending">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>",
        id="worst-section",
    )


def _row(measure: Measure) -> str:
    """Figures carry their sort key; one without (nan, or in no layer) sorts last. An unknown SQNR
    is worse than any other, as in `worst`."""
    m = measure

    def number(text: str, value: float | None) -> str:
        known = "" if value is None or isnan(value) else f' data-v="{value:.9g}"'
        return f'<td class="figure"{known}>{text}</td>'

    def place(value: int | None) -> str:
        return number("" if value is None else str(value), value)

    return (
        f"<tr><td><code>{markup.text(m.tensor)}</code></td><td>{markup.text(m.role)}</td>"
        + place(m.layer) + place(m.expert) + f"<td>{markup.text(m.format)}</td>"
        + number(decibel(m.sqnr), -inf if isnan(m.sqnr) else m.sqnr) + number(f"{m.rms:.3g}", m.rms)
        + number(f"{m.worst:.3g}", m.worst) + number(f"{1 - m.cosine:.2g}", 1 - m.cosine)
        + "</tr>"
    )  # fmt: skip
