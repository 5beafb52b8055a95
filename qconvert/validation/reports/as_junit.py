"""For CI servers: JUnit's XML as Jenkins, GitLab and others take it (schema junit-10 of Jenkins'
xUnit plugin). A claim is a test case: proved passes, only read and not checked are skipped. A broken
rule is a failing one; a rule with only warnings passes and has them as its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree import ElementTree as ET

from qconvert.core.shown import printable
from qconvert.validation.findings import Finding, Rule
from qconvert.validation.reports.words import by_rule, split_reason
from qconvert.validation.runner import Report

_SUITE = "qconvert validate"


def render(report: Report, rules: Mapping[str, Rule]) -> str:
    """A file of one suite. Characters that XML cannot hold are escaped (`\\x00`)."""
    suite = ET.Element("testsuite", name=_SUITE)
    if report.about:
        properties = ET.SubElement(suite, "properties")
        for name, value in report.about.items():
            ET.SubElement(properties, "property", name=printable(name), value=printable(value))
    for rule, found in by_rule(report.findings, rules):
        _broken(suite, rule, found)
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


def _broken(suite: ET.Element, rule: Rule, found: Sequence[Finding]) -> None:
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
