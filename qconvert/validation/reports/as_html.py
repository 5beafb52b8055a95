"""For people: one page with plots, that needs no network and loads nothing.

Its style and script are `page.css` and `page.js`, whose hashes are in the page's policy, so a name from
the folder cannot run as a script even if it gets past the escaping.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from itertools import zip_longest
from math import inf, isnan
from pathlib import Path
from typing import Any

from qconvert import __version__
from qconvert.core.shown import count, printable
from qconvert.validation.findings import Finding, Measure, Rule, Table
from qconvert.validation.reports.figures import COLUMNS, cells, decibel, groups, worst
from qconvert.validation.reports.plots import EXACT, UNKNOWN, plot_data
from qconvert.validation.reports.words import by_rule, claims, is_figure, verdict
from qconvert.validation.runner import Report

# For one rule, and rows of one table: the page must stay small enough to be mailed.
_MOST = 100
_MOST_ROWS = 500
_LONGEST = 2000
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
    style, script = (
        Path(__file__).with_name(name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js")
    )
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    body = [*_top(report), *_findings(report, rules), *_claims(report)]
    if report.measures:
        body += _measures(report.measures)
    body += [_section(_text(table.title), _table(table)) for table in report.tables]
    title = _text(f"Validation {verdict(report)}: {Path(report.about.get('folder', '')).name}")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>",
            *body,
            f"</main>\n<footer>qconvert {_text(__version__)}</footer>",
            f'<script type="application/json" id="data">{_data(report.measures)}</script>',
            f"<script>{script}</script>\n</body>\n</html>",
        ]
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


_IN_SCRIPT = str.maketrans({"<": "\\u003c", "#": "\\u0023"})


def _data(measures: Sequence[Measure]) -> str:
    """JSON inside a script element: `<` is escaped, so that no name can end it, and `#`: a CI that keeps
    the page in its log takes `##[` for a command."""
    plots: dict[str, Any] = {"exact": EXACT, "unknown": UNKNOWN, "plots": plot_data(measures)}
    return json.dumps(plots, separators=(",", ":"), allow_nan=False).translate(_IN_SCRIPT)


def _text(text: str) -> str:
    """Text, or the value of an attribute in double quotes."""
    whole = text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."
    return escape(printable(whole, "\n")).replace("##", "&#35;#")


def _section(title: str, *parts: str, id: str = "") -> str:
    name = f' id="{id}"' if id else ""
    return "\n".join([f"<section{name}>\n<h2>{title}</h2>", *parts, "</section>"])


def _top(report: Report) -> Iterator[str]:
    tally = f"{count(report.errors, 'error')}, {count(report.warnings, 'warning')}"
    yield f'<header class="{verdict(report)}">\n<h1>Validation {verdict(report)}</h1>'
    yield f'<p class="tally">{tally}</p>\n<dl>'
    yield from (f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in report.about.items())
    yield "</dl>\n</header>"


def _findings(report: Report, rules: Mapping[str, Rule]) -> Iterator[str]:
    """Rules with errors come before those with only warnings."""
    told = by_rule(report.findings, rules)
    told.sort(key=lambda one: all(finding.severity == "warning" for finding in one[1]))
    if told:
        yield _section("Findings", *(_rule(rule, found) for rule, found in told), id="findings")


def _rule(rule: Rule, found: Sequence[Finding]) -> str:
    severity = "error" if any(f.severity == "error" for f in found) else "warning"
    name = f"<b>{_text(rule.id)}</b> {_text(rule.title)}"
    opening = (
        f'<details open class="rule {severity}">\n'
        f'<summary><span class="badge">{severity}</span> {name} '
        f'<span class="quiet">{len(found):,}</span></summary>'
    )
    told = (("Cause", rule.cause), ("What to do", rule.fix))
    parts = [opening, *(f"<p><b>{label}.</b> {_text(text)}</p>" for label, text in told if text)]
    rows = "".join(
        f"<tr><td>{f.severity}</td><td><code>{_text(f.where)}</code></td>"
        f"<td>{_text(f.message)}</td></tr>"
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
            "".join(f"<li>{_text(text)}</li>" for text in texts) or '<li class="none">nothing</li>'
        )
        kind = label.replace(" ", "-")
        yield _section(
            f'{title} <span class="quiet">{len(texts)}</span>',
            f'<p class="quiet">{gloss}</p>\n<ul class="{kind}">{items}</ul>',
        )
    yield "</div>"


def _table(table: Table) -> str:
    kinds = [
        "figure" if all(map(is_figure, column)) else "" for column in zip(*table.rows, strict=True)
    ]

    def line(tag: str, row: Sequence[str]) -> str:
        cells = (
            f'<{tag} class="{kind}">{_text(cell)}</{tag}>'
            for kind, cell in zip_longest(kinds, row, fillvalue="")
        )
        return f"<tr>{''.join(cells)}</tr>"

    rows = "".join(line("td", row) for row in table.rows[:_MOST_ROWS])
    more = len(table.rows) - _MOST_ROWS
    note = [f'<p class="quiet">{_text(table.note)}</p>'] if table.note else []
    note += [f'<p class="quiet">... and {more:,} more rows</p>'] if more > 0 else []
    head = f"<thead>{line('th', table.columns)}</thead>"
    body = f'<div class="wide"><table>{head}<tbody>{rows}</tbody></table></div>'
    return "\n".join([body, *note])


def _measures(measures: Sequence[Measure]) -> Iterator[str]:
    rows = tuple(cells(group) for group in groups(measures))
    yield _section(
        f'Against the source <span class="quiet">{count(len(measures), "matrix", "matrices")}</span>',
        '<p class="quiet">SQNR is signal to quantization noise: the norm of the source\'s weights over '
        "the norm of the difference, in dB. Higher is closer; 20 dB more is a tenth of the error; "
        "<b>exact</b> is equal to the last bit, <b>unknown</b> means that the source is all zero.</p>",
        _table(Table("", COLUMNS, rows)),
    )
    kinds = {
        ("grid" if m.expert is not None else "series") for m in measures if m.layer is not None
    }
    if "grid" in kinds:
        yield _section("Experts", _HEAT, id="experts")
    yield _section("How many matrices have which SQNR", _HISTOGRAM, id="distribution")
    if "series" in kinds:
        yield _section("Outside the experts, layer by layer", _SERIES, id="layers")
    yield _worst(measures)


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
    furthest = worst(measures, _MOST_ROWS)
    if not furthest:
        return _section(
            "The worst matrices", "<p>None: all equal the source.</p>", id="worst-section"
        )
    head = "".join(
        f'<th data-key="{key}" class="{kind}"'
        + (' aria-sort="ascending"' if key == "sqnr" else "")
        + f'><button type="button">{title}</button></th>'
        for key, title, kind in _WORST_COLUMNS
    )
    rows = "".join(_row(measure) for measure in furthest)
    return _section(
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
        f"<tr><td><code>{_text(m.tensor)}</code></td><td>{_text(m.role)}</td>"
        + place(m.layer) + place(m.expert) + f"<td>{_text(m.format)}</td>"
        + number(decibel(m.sqnr), -inf if isnan(m.sqnr) else m.sqnr) + number(f"{m.rms:.3g}", m.rms)
        + number(f"{m.worst:.3g}", m.worst) + number(f"{1 - m.cosine:.2g}", 1 - m.cosine)
        + "</tr>"
    )  # fmt: skip
