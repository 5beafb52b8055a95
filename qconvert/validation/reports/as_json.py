"""For programs: everything, as strict JSON. Values that JSON has no number for are strings that Python's
`float` accepts: "inf", "-inf", "nan"."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from qconvert.validation.findings import Measure, Rule
from qconvert.validation.reports.words import by_rule, verdict
from qconvert.validation.runner import Report


def to_json(report: Report, rules: Mapping[str, Rule]) -> dict[str, Any]:
    """`rules` are those that were broken. Measures come with their `sqnr` in dB."""
    return {
        "verdict": verdict(report),
        "errors": report.errors,
        "warnings": report.warnings,
        "not_known": report.not_known,
        "exit_code": report.exit_code,
        "about": report.about,
        "findings": [asdict(finding) for finding in report.findings],
        "rules": {
            rule.id: {"title": rule.title, "cause": rule.cause, "fix": rule.fix}
            for rule, _ in by_rule(report.findings, rules)
        },
        "proved": report.proved,
        "read": report.read,
        "not_checked": report.not_checked,
        "tables": [
            {**asdict(table), "columns": list(table.columns), "rows": [list(r) for r in table.rows]}
            for table in report.tables
        ],
        **({} if report.beside is None else {"beside": to_json(report.beside, rules)}),
        "measures": [_measure(measure) for measure in report.measures],
    }


def render(report: Report, rules: Mapping[str, Rule]) -> str:
    """One measure per line: there may be 50,000 of them."""
    body = to_json(report, rules)
    lines = [json.dumps(measure, allow_nan=False) for measure in body.pop("measures")]
    rest = json.dumps(body, indent=2, allow_nan=False).removesuffix("\n}")
    listed = "[\n    " + ",\n    ".join(lines) + "\n  ]" if lines else "[]"
    return f'{rest},\n  "measures": {listed}\n}}'


def _measure(measure: Measure) -> dict[str, Any]:
    every = {**asdict(measure), "sqnr": measure.sqnr}
    return {k: str(v) if isinstance(v, float) and not isfinite(v) else v for k, v in every.items()}
