"""Texts that every report needs: names made printable, the verdict, rules with what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from qconvert.core.shown import count
from qconvert.validation.findings import Finding, Rule
from qconvert.validation.runner import Report

_NOT_READ = {
    "headers": "bytes of weights were not checked (--level full reads them)",
    "sample": "only a sample of the weights was read (--level full reads all)",
}
_NOT_COMPARED = (
    "weights are numbers, compared with no source and no receipt (--against SRC compares them)"
)


def verdict(report: Report) -> str:
    """`passed` or `failed`, as only errors fail a folder; or `not known`, if that is the answer to
    `--for`."""
    return "failed" if report.errors else "not known" if report.not_known else "passed"


def totals(report: Report) -> str:
    """Last line of the text report: `1 error, 0 warnings`, and that what `--for` asked is not known.
    Scripts read --format json instead."""
    said = f"{count(report.errors, 'error')}, {count(report.warnings, 'warning')}"
    return f"{said}; whether it loads is {report.not_known}" if report.not_known else said


def headline(report: Report) -> str:
    """First line of reports for people: the verdict, the level unless every weight was read, and what of
    the weights was not read, or was compared with nothing."""
    level = report.about.get("level", "")
    unread = _NOT_READ.get(level)
    if unread is None:
        said = f"{verdict(report)}: {totals(report)}"
        return said if report.compared else f"{said}; {_NOT_COMPARED}"
    return f"{verdict(report)} at level {level}: {totals(report)}; {unread}"


def claims(report: Report) -> Iterator[tuple[str, Sequence[str]]]:
    """Texts of what was proved, only read and not checked, each with its label."""
    yield "proved", report.proved
    yield "only read", report.read
    yield "not checked", report.not_checked


def by_rule(
    findings: Sequence[Finding], rules: Mapping[str, Rule]
) -> list[tuple[Rule, list[Finding]]]:
    """Findings of each rule, rules in the order of their ids. An undocumented id keeps
    its findings and has a rule without texts."""
    ordered = sorted(findings, key=lambda finding: finding.rule)
    return [
        (rules.get(id, Rule(id, "", "", "")), list(found))
        for id, found in groupby(ordered, key=lambda finding: finding.rule)
    ]


def split_reason(text: str) -> tuple[str, str]:
    """`claim (reason)` as two texts; a text that does not end in parentheses is both."""
    depth = 0
    for at in range(len(text) - 1, 0, -1):
        depth += {")": 1, "(": -1}.get(text[at], 0)
        if depth == 0:
            break
    if depth or not text.endswith(")") or text[at - 1] != " ":
        return text, text
    return text[: at - 1], text[at + 1 : -1]


def is_figure(cell: str) -> bool:
    """Tell whether a table's cell is a figure, with or without a unit: its column is then
    right-aligned."""
    return cell.lstrip("+-<>~")[:1].isdigit() or cell in ("", "exact", "unknown", "nan", "inf")
