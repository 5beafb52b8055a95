"""For code scanning: SARIF 2.1.0 (OASIS standard of 27 March 2020), as GitHub takes it.

GitHub shows results at lines of text files, tells them apart by the fingerprint
`primaryLocationLineHash`, and refuses a run with more than 25,000 results.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from qconvert import __version__
from qconvert.core.shown import printable
from qconvert.validation.findings import Finding, Rule
from qconvert.validation.reports.places import Place, places
from qconvert.validation.reports.words import by_rule, claims
from qconvert.validation.runner import Report

_MOST = 25_000
_KEYS = {"proved": "proved", "only read": "onlyRead", "not checked": "notChecked"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def render(report: Report, rules: Mapping[str, Rule]) -> str:
    """One run; its rules are those that were broken. What was proved, only read and not checked is in
    the run's properties."""
    broken = [rule for rule, _ in by_rule(report.findings, rules)]
    index = {rule.id: at for at, rule in enumerate(broken)}
    place = places(report)
    seen: Counter[tuple[str, str]] = Counter()
    results = [_result(finding, index, place, seen) for finding in report.findings[:_MOST]]
    more = len(report.findings) - len(results)
    notes = [f"not checked: {text}" for text in report.not_checked]
    notes += [f"{more} more findings are not listed: --format json lists all"] if more else []
    run = {
        "tool": {
            "driver": {
                "name": "qconvert",
                "version": __version__,
                "rules": [_rule(rule) for rule in broken],
            }
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": True,
                "exitCode": report.exit_code,
                "toolExecutionNotifications": [
                    {"level": "note", "message": {"text": printable(text)}} for text in notes
                ],
            }
        ],
        "results": results,
        "properties": {
            "about": {name: printable(value) for name, value in report.about.items()},
            **{_KEYS[label]: [printable(t) for t in texts] for label, texts in claims(report)},
        },
    }
    whole = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(whole, allow_nan=False)


def _rule(rule: Rule) -> dict[str, Any]:
    if not rule.title:
        return {"id": rule.id}
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.cause or rule.title},
        "help": {
            "text": f"Cause: {rule.cause}\nWhat to do: {rule.fix}",
            "markdown": f"**Cause.** {rule.cause}\n\n**What to do.** {rule.fix}",
        },
    }


def _result(
    finding: Finding,
    index: Mapping[str, int],
    place: Callable[[str], Place],
    seen: Counter[tuple[str, str]],
) -> dict[str, Any]:
    """Its message may change with the figures in it, so a fingerprint is made of the rule, the place,
    and its number among findings with the same rule and place."""
    key = finding.rule, finding.where
    seen[key] += 1
    digest = sha256("\0".join(key).encode("utf-8", "backslashreplace")).hexdigest()[:16]
    at = place(finding.where)
    location: dict[str, Any] = {
        "physicalLocation": {
            "artifactLocation": {
                "uri": quote(at.file, errors="backslashreplace"),
                "uriBaseId": "%SRCROOT%",
            },
            "region": {"startLine": 1},
        }
    }
    if at.inside:
        location["logicalLocations"] = [
            {"fullyQualifiedName": printable(at.inside), "kind": "resource"}
        ]
    return {
        "ruleId": finding.rule,
        "ruleIndex": index[finding.rule],
        "level": finding.severity,
        "message": {"text": printable(f"{finding.where}: {finding.message}", "\n")},
        "locations": [location],
        "partialFingerprints": {"primaryLocationLineHash": f"{digest}:{seen[key]}"},
    }
