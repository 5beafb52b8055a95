"""Reports for programs: JSON, JUnit's XML for CI servers, SARIF for code scanning, and commands that a
log of GitHub Actions shows as annotations.

JSON has everything and is strict: values that it has no number for are strings that Python's `float`
accepts: "inf", "-inf", "nan".
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as ET

from qconvert import __version__
from qconvert.checkpoint.checkpoint import INDEX
from qconvert.core.shown import printable
from qconvert.validation.findings import Finding, Measure, Rule
from qconvert.validation.reports.words import by_rule, claims, split_reason, totals, verdict
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


def json_text(report: Report, rules: Mapping[str, Rule]) -> str:
    """One measure per line: there may be 50,000 of them."""
    body = to_json(report, rules)
    lines = [json.dumps(measure, allow_nan=False) for measure in body.pop("measures")]
    rest = json.dumps(body, indent=2, allow_nan=False).removesuffix("\n}")
    listed = "[\n    " + ",\n    ".join(lines) + "\n  ]" if lines else "[]"
    return f'{rest},\n  "measures": {listed}\n}}'


def _measure(measure: Measure) -> dict[str, Any]:
    every = {**asdict(measure), "sqnr": measure.sqnr}
    return {k: str(v) if isinstance(v, float) and not isfinite(v) else v for k, v in every.items()}


# For CI servers: JUnit's XML as Jenkins, GitLab and others take it (schema junit-10 of Jenkins' xUnit
# plugin). A claim is a test case: proved passes, only read and not checked are skipped. A broken rule
# is a failing one; a rule with only warnings passes and has them as its output.

_SUITE = "qconvert validate"


def junit(report: Report, rules: Mapping[str, Rule]) -> str:
    """A file of one suite. Characters that XML cannot hold are escaped (`\\x00`)."""
    suite = ET.Element("testsuite", name=_SUITE)
    if report.about:
        properties = ET.SubElement(suite, "properties")
        for name, value in report.about.items():
            ET.SubElement(properties, "property", name=printable(name), value=printable(value))
    for rule, found in by_rule(report.findings, rules):
        _broken_rule(suite, rule, found)
    for text in report.proved:
        _case(suite, "proved", text)
    for text in report.read:
        _skipped(suite, "only read", text, f"only read: {text}")
    for text in report.not_checked:
        claim, reason = split_reason(text)
        _skipped(suite, "not checked", claim, reason)
    counts = {
        "tests": len(suite.findall("testcase")),
        "failures": len(suite.findall("testcase/failure")),
        "skipped": len(suite.findall("testcase/skipped")),
        "errors": 0,
    }
    root = ET.Element("testsuites", name=_SUITE)
    root.append(suite)
    for element in (root, suite):
        element.attrib |= {name: str(value) for name, value in counts.items()}
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode")


def _case(suite: ET.Element, kind: str, name: str) -> ET.Element:
    return ET.SubElement(
        suite, "testcase", classname=f"{_SUITE}.{kind}", name=printable(name)
    )  # fmt: skip


def _skipped(suite: ET.Element, kind: str, name: str, why: str) -> None:
    ET.SubElement(_case(suite, kind, name), "skipped", message=printable(why))


def _broken_rule(suite: ET.Element, rule: Rule, found: Sequence[Finding]) -> None:
    case = _case(suite, "rules", f"{rule.id} {rule.title}".rstrip())
    errors = [finding for finding in found if finding.severity == "error"]
    warnings = [finding for finding in found if finding.severity == "warning"]
    if errors:
        first = f"{errors[0].where}: {errors[0].message}"
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        failure = ET.SubElement(case, "failure", type=rule.id, message=printable(first) + more)
        told = (("Cause", rule.cause), ("What to do", rule.fix))
        failure.text = "\n".join([_lines(errors), *(f"{k}: {v}" for k, v in told if v)])
    if warnings:
        ET.SubElement(case, "system-out").text = _lines(warnings)


def _lines(found: Sequence[Finding]) -> str:
    return "\n".join(printable(f"{f.severity} {f.where}: {f.message}", "\n") for f in found)


# Places in a repository to which findings point: weights are not text, so their findings point to the
# file that lists them.

_CONFIG = "config.json"
_TEXT = (".json", ".jsonl", ".md", ".txt", ".jinja", ".yaml", ".yml", ".py")


@dataclass(frozen=True, slots=True)
class Place:
    """`file` is a text file, relative to the current folder if the validated one is in it, else
    to the validated one; `inside` the tensor, shard or key that is meant (empty: the file itself)."""

    file: str
    inside: str


def places(report: Report) -> Callable[[str], Place]:
    """Place of each finding's `where`. Tensors point to the index, or to the config of a folder that
    has no index; so does a `where` that is not a file of the folder."""
    folder = Path(report.about.get("folder", "."))
    try:
        prefix = folder.resolve().relative_to(Path.cwd().resolve())
    except ValueError:
        prefix = Path()
    listing = (prefix / (INDEX if (folder / INDEX).is_file() else _CONFIG)).as_posix()

    def place(where: str) -> Place:
        if where == str(folder):
            return Place((prefix / _CONFIG).as_posix(), "")
        head, _, rest = where.partition(": ")
        inside = not head.startswith("/") and ".." not in head.split("/")
        if head.endswith(_TEXT) and inside:
            return Place((prefix / head).as_posix(), where if rest else "")
        return Place(listing, where)

    return place


# For the log of a GitHub Actions job: workflow commands, which become annotations. GitHub shows ten of
# each level per step, so the first finding of every rule comes before the second of any. What was
# proved follows, as in the text report.

_MOST = 20


def github(report: Report, rules: Mapping[str, Rule]) -> str:
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


# For code scanning: SARIF 2.1.0 (OASIS standard of 27 March 2020), as GitHub takes it. GitHub shows
# results at lines of text files, tells them apart by the fingerprint `primaryLocationLineHash`, and
# refuses a run with more than 25,000 results.

_MOST_RESULTS = 25_000
_KEYS = {"proved": "proved", "only read": "onlyRead", "not checked": "notChecked"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(report: Report, rules: Mapping[str, Rule]) -> str:
    """One run; its rules are those that were broken. What was proved, only read and not checked is in
    the run's properties."""
    broken = [rule for rule, _ in by_rule(report.findings, rules)]
    index = {rule.id: at for at, rule in enumerate(broken)}
    place = places(report)
    seen: Counter[tuple[str, str]] = Counter()
    results = [_result(finding, index, place, seen) for finding in report.findings[:_MOST_RESULTS]]
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
