"""For the summary page of a CI job and for model cards: GitHub flavoured Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from qconvert.core.shown import count, printable
from qconvert.validation.findings import Rule, Table
from qconvert.validation.reports.figures import COLUMNS, cells, decibel, groups, worst
from qconvert.validation.reports.words import by_rule, claims, headline
from qconvert.validation.runner import Report

_MOST = 100
_WORST = 5
# A job's summary may have 1 MiB, so a single message must not fill it.
_LONGEST = 1000
_PUNCTUATION = re.compile(r"([\\`*_{}\[\]<>|~&#$@!()])")
_LABELS = {"proved": "Proved", "only read": "Only read", "not checked": "Not checked"}


def render(report: Report, rules: Mapping[str, Rule]) -> str:
    """Verdict, findings (at most 100), what to do, claims, tables, measures."""
    return "\n\n".join(_blocks(report, rules))


def _blocks(report: Report, rules: Mapping[str, Rule]) -> Iterator[str]:
    yield f"## Validation {headline(report)}"
    if report.about:
        yield "\n".join(f"- {escape(k)}: {code(v)}" for k, v in report.about.items())
    if report.findings:
        yield _findings(report)
        told = by_rule(report.findings, rules)
        fixes = [f"- **{rule.id}** {_told(rule)}" for rule, _ in told if rule.title]
        if fixes:
            yield "\n".join(["### What to do", "", *fixes])
    for label, texts in claims(report):
        if texts:
            yield "\n".join([f"### {_LABELS[label]}", "", *(f"- {escape(t)}" for t in texts)])
    for table in report.tables:
        yield f"### {escape(table.title)}\n\n" + _table(table)
    if report.measures:
        rows = tuple(cells(group) for group in groups(report.measures))
        note = "SQNR: signal to quantization noise, higher is closer to the source."
        yield "### Measured against the source\n\n" + _table(Table("", COLUMNS, rows, note))
        furthest = worst(report.measures, _WORST)
        if furthest:
            lines = [f"- {decibel(m.sqnr)} dB, {code(m.tensor)}" for m in furthest]
            yield "\n".join([f"The worst {len(lines)}:", "", *lines])


def _findings(report: Report) -> str:
    """Errors before warnings, so that a hundred warnings hide none."""
    ordered = sorted(report.findings, key=lambda finding: finding.severity != "error")
    rows = [
        (f.severity, f.rule, code(f.where), escape(f.message)) for f in ordered[:_MOST]
    ]  # fmt: skip
    body = _grid(("", "rule", "where", "what"), rows)
    more = len(ordered) - len(rows)
    return f"{body}\n\n... and {more:,} more (`--format json` lists all)" if more else body


def _told(rule: Rule) -> str:
    return f"{escape(rule.title)}. {escape(rule.cause)} {escape(rule.fix)}"


def _table(table: Table) -> str:
    rows = [tuple(escape(cell) for cell in row) for row in table.rows[:_MOST]]
    more = len(table.rows) - len(rows)
    parts = [_grid([escape(column) for column in table.columns], rows)]
    parts += [f"... and {count(more, 'more row')}"] if more else []
    return "\n\n".join([*parts, escape(table.note)] if table.note else parts)


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    every = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in every)


def escape(text: str) -> str:
    """Text that is shown literally, also in a table's cell; newlines become spaces."""
    return _PUNCTUATION.sub(r"\\\1", printable(_short(text)))


def code(text: str) -> str:
    """A name as a code span; one that has a backtick or backslash as escaped text, because a span
    can escape only a table's pipe."""
    plain = printable(_short(text))
    if not plain.strip() or "`" in plain or "\\" in plain:
        return escape(text)
    return "`" + plain.replace("|", "\\|") + "`"


def _short(text: str) -> str:
    line = " ".join(text.splitlines())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " ..."
