"""For people at a terminal, and for scripts that read lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING

from qconvert.core.shown import count, printable
from qconvert.validation.findings import Rule, Table
from qconvert.validation.reports.figures import (
    COLUMNS,
    Group,
    cells,
    compared,
    decibel,
    groups,
    name_of,
    remark_on,
    side_by_side,
    worst,
)
from qconvert.validation.reports.words import by_rule, claims, headline, is_figure, totals
from qconvert.validation.runner import Report

if TYPE_CHECKING:
    from rich.console import Console

_MOST = 20
_WORST = 5
_WIDE = 80  # columns of a terminal; in less, columns of zeros are left out
_SHORT = 12
_STYLES = {"error": "bold red", "warning": "bold yellow"}
_LABELS = {"proved": "green", "only read": "yellow", "not checked": "bright_black"}


def render(
    report: Report, rules: Mapping[str, Rule], *, terminal: bool = False, brief: bool = False
) -> str:
    """The verdict, tables, measures, findings (of one rule at most 20), what to do about each rule,
    what was proved, only read and not checked (in `brief` how much), and the totals. One thing a line;
    nothing wraps a line but the terminal."""
    from rich.console import Console

    stream = StringIO()
    console = Console(
        file=stream, force_terminal=terminal, force_jupyter=False, markup=False, highlight=False,
        emoji=False, soft_wrap=True, legacy_windows=False, width=None if terminal else 100_000,
    )  # fmt: skip
    style = {3: "bold red", 5: "bold yellow"}.get(report.exit_code, "bold green")
    _line(console, (headline(report), style))
    for table in report.tables:
        _table(console, table)
    if report.measures:
        _measures(console, report)
    if report.beside is not None:
        _table(console, beside_table(report, report.beside))
    if report.measures or report.tables:
        console.print()
    _findings(console, report, rules)
    for label, texts in claims(report):
        if brief and label == "not checked" and texts:
            texts = [f"{count(len(texts), 'claim')}, which -v lists"]
        for text in texts:
            _line(console, (f"{label}:", _LABELS[label]), (f" {printable(text)}", ""))
    _line(console, (totals(report), style))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _line(console: Console, *parts: tuple[str, str]) -> None:
    from rich.text import Text

    console.print(Text.assemble(*parts), soft_wrap=True)


def _findings(console: Console, report: Report, rules: Mapping[str, Rule]) -> None:
    of = Counter(finding.rule for finding in report.findings)
    shown: Counter[str] = Counter()
    for finding in report.findings:
        shown[finding.rule] += 1
        if shown[finding.rule] <= _MOST:
            _line(
                console,
                (f"{finding.severity:<7}", _STYLES[finding.severity]),
                (f" {finding.rule} ", "bold"),
                (printable(finding.where), "cyan"),
                (f": {printable(finding.message)}", ""),
            )
        elif shown[finding.rule] == of[finding.rule]:
            more = of[finding.rule] - _MOST
            _line(console, (f"... and {more} more of {finding.rule} (--format json lists all)", ""))
    for rule, _ in by_rule(report.findings, rules):
        if rule.fix:
            _line(console, (f"        {rule.id} ", "bold"), (f"what to do: {rule.fix}", "italic"))


def _measures(console: Console, report: Report) -> None:
    """One row per role; roles of which all matrices are exact share one line."""
    found = groups(report.measures)
    exact = [group for group in found if group.exact == group.matrices]
    rows = tuple(cells(group) for group in found if group not in exact)
    number, roles = sum(group.matrices for group in exact), len({g.role for g in exact})
    what = count(number, "matrix or vector", "matrices and vectors")
    be = "is" if number == 1 else "are"
    text = f"against the source: {what} of {count(roles, 'role')} {be} exact"
    if rows:
        note = "SQNR: signal to quantization noise, higher is closer to the source"
        _table(console, Table("measured against the source", COLUMNS, rows, note))
        for word, names in _in_words(found).items():
            who = ", ".join(names) if len(names) < 4 else count(len(names), "role")
            _line(console, (f"{who}: {word}", ""))
        if remark := remark_on(found):
            _line(console, (remark, "bright_black"))
        text = f"{what} of {count(roles, 'other role')} {be} exact"
    if exact:
        _line(console, (text, ""))
    furthest = worst(report.measures, _WORST)
    if furthest:
        listed = tuple((decibel(m.sqnr), f"{m.rms:.3g}", m.format, m.tensor) for m in furthest)
        columns = ("SQNR dB", "rel. RMS", "format", "tensor")
        _table(console, Table(f"the worst {len(listed)}", columns, listed))


def _in_words(found: Sequence[Group]) -> Mapping[str, Sequence[str]]:
    """Roles by how they compare with what their format usually loses."""
    said: dict[str, list[str]] = {}
    for group in found:
        if word := compared(group):
            said.setdefault(printable(word), []).append(printable(group.role))
    return said


def beside_table(report: Report, other: Report) -> Table:
    """`side_by_side` under a title with both names."""
    told = f"{count(other.errors, 'error')}, {count(other.warnings, 'warning')}"
    title = f"{name_of(report)} (this) beside {name_of(other)} (the other: {told})"
    return replace(side_by_side(report, other), title=title)


def _table(console: Console, table: Table) -> None:
    from rich.table import Table as Grid
    from rich.text import Text

    console.print()
    _line(console, (printable(table.title), "bold"))
    narrow = console.is_terminal and console.width < _WIDE
    grid = Grid(box=None, padding=(0, 1 if narrow else 2, 0, 0), header_style="underline")
    shown = [
        at for at in range(len(table.columns))
        if not narrow or not table.rows or {row[at] for row in table.rows} != {"0"}
    ]  # fmt: skip
    for at in shown:
        right = all(is_figure(row[at]) for row in table.rows)
        # A figure or a short name that is cut says nothing; headings and long names fold.
        least = max((len(row[at]) for row in table.rows), default=0)
        grid.add_column(
            Text(printable(table.columns[at])), justify="right" if right else "left",
            overflow="fold", min_width=least if narrow and least <= _SHORT else None,
        )  # fmt: skip
    for row in table.rows:
        grid.add_row(*(Text(printable(row[at])) for at in shown))
    console.print(grid, soft_wrap=not console.is_terminal)
    if table.note:
        _line(console, (printable(table.note), "bright_black"))
