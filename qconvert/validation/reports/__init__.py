"""Reports of a validation: one `qconvert.validation.runner.Report`, written for its readers.

Each form is made by a function of the report and the rules, which is pure except for `places` (which
checks which text files the folder has). A format that drops a finding, a claim or a gap says how many.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from qconvert.core.errors import UsageError
from qconvert.validation.reports import as_html, as_markdown, as_text, for_programs
from qconvert.validation.runner import Report, rules

_RENDER = {
    "text": as_text.render,
    "json": for_programs.json_text,
    "junit": for_programs.junit,
    "sarif": for_programs.sarif,
    "markdown": as_markdown.render,
    "github": for_programs.github,
    "html": as_html.render,
}
_SUFFIX = {
    ".txt": "text", ".json": "json", ".xml": "junit", ".sarif": "sarif", ".md": "markdown",
    ".html": "html",
}  # fmt: skip

FORMATS = tuple(_RENDER)


def render(report: Report, format: str, *, terminal: bool = False, brief: bool = False) -> str:
    """The report in one of FORMATS, without a newline at its end. Text has colours and keeps to the
    terminal's width if it is for a `terminal`, and counts what was not checked if it is `brief`. Raises
    UsageError for any other format."""
    if format not in _RENDER:
        raise UsageError(f"unknown report format {format!r}; known: {', '.join(FORMATS)}")
    if format == "text":
        return as_text.render(report, rules(), terminal=terminal, brief=brief)
    return _RENDER[format](report, rules())


def as_object(report: Report) -> dict[str, Any]:
    """The report as what its JSON form holds."""
    return for_programs.to_json(report, rules())


def suffix_format(path: str | Path) -> str:
    """The format that a report file's suffix asks for. Raises UsageError for an unknown suffix."""
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIX:
        known = ", ".join(f"{end} ({name})" for end, name in _SUFFIX.items())
        raise UsageError(f"{path}: unknown report suffix {suffix!r}; known: {known}")
    return _SUFFIX[suffix]


def append_step_summary(report: Report) -> None:
    """Add the report to the summary page of a GitHub Actions job, if this runs in one: the file
    that GITHUB_STEP_SUMMARY names, which earlier steps may have written to."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        with Path(path).open("a", encoding="utf-8") as stream:
            stream.write(render(report, "markdown") + "\n")
