"""For the log of a GitHub Actions job: workflow commands, which become annotations.

GitHub shows ten of each level per step, so the first finding of every rule comes before the second of
any. What was proved follows, as in the text report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from qconvert.core.shown import printable
from qconvert.validation.findings import Rule
from qconvert.validation.reports.places import places
from qconvert.validation.reports.words import claims, totals
from qconvert.validation.runner import Report

_MOST = 20


def render(report: Report, rules: Mapping[str, Rule]) -> str:
    """At most 20 findings of one rule, then how many more."""
    of = Counter(finding.rule for finding in report.findings)
    shown: Counter[str] = Counter()
    turns: list[list[str]] = [[] for _ in range(_MOST)]
    place = places(report)
    for finding in report.findings:
        turn = shown[finding.rule]
        shown[finding.rule] += 1
        if turn < _MOST:
            file, rule = place(finding.where).file, rules.get(finding.rule)
            fix = f"\nWhat to do: {rule.fix}" if rule and rule.fix else ""
            turns[turn].append(
                f"::{finding.severity} file={_property(file)},title={_property(finding.rule)}::"
                + _data(f"{finding.where}: {finding.message}{fix}")
            )
    lines = [line for turn in turns for line in turn]
    for rule_id, number in of.items():
        if number > _MOST:
            more = f"... and {number - _MOST} more of {rule_id} (--format json lists all)"
            lines.append(f"::notice title={_property(rule_id)}::{_data(more)}")
    lines += [f"{label}: {printable(text)}" for label, texts in claims(report) for text in texts]
    return "\n".join([*lines, totals(report)])


def _data(text: str) -> str:
    """As @actions/core 1.11 escapes a command's data; other control characters are escaped too."""
    text = printable(text, "\r\n").replace("%", "%25")
    return text.replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
