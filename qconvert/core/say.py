"""The only output of text: everything shown goes to a terminal or a CI log line by line.

Names and values in it come from untrusted folders. So a line stays one line, invisible characters
are escaped (core/shown.py), and no line is a command to the CI that keeps the log.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from qconvert.core.own_process import unheard
from qconvert.core.shown import message, printable

# GitHub's runner takes `::error::` at the start of a line, after white space, and `##[error]` anywhere
# in it (actions/runner 2.330, ActionCommand.cs, TryParseV2 and TryParse); Azure Pipelines takes
# `##vso[...]`, TeamCity `##teamcity[...]`.
_AT_START = re.compile(r"^( *):(?=:)")
_ANYWHERE = re.compile(r"#(?=#[A-Za-z]*\[)")
_LINES = 2048  # lines that are written at a time: a dump has as many as a model has tensors


def shown_line(text: str) -> str:
    """One line, made safe to show. The first character of what CI would take for a command is
    escaped."""
    text = _AT_START.sub(r"\1\\x3a", printable(text)) if "::" in text else printable(text)
    return _ANYWHERE.sub(r"\\x23", text) if "##" in text else text


def say(*lines: str, err: bool = False) -> None:
    """Show lines on stdout, or on stderr. A newline within a line is escaped."""
    say_all(lines, err=err)


def say_all(lines: Iterable[str], *, err: bool = False) -> None:
    """Show many lines."""
    batch: list[str] = []
    for line in lines:
        batch.append(shown_line(line))
        if len(batch) == _LINES:
            _write("\n".join([*batch, ""]), err=err)
            batch.clear()
    if batch:
        _write("\n".join([*batch, ""]), err=err)


def say_error(text: str, command: str = "qconvert") -> None:
    """Show why a command fails, in one line on stderr of readable length."""
    _write(shown_line(message(f"{command}: error: {text}")) + "\n", err=True)


def say_json(value: Any) -> None:
    """Show JSON on stdout, in ASCII, so that a program that reads it gets every name unchanged."""
    _write(_safe_json(json.dumps(value, indent=2)) + "\n", err=False)


def say_log(value: Any) -> None:
    """Show an object as one line of JSON on stderr."""
    _write(log_line(value), err=True)


def log_line(value: Any) -> str:
    """An object as one line of JSON, in ASCII."""
    return _safe_json(json.dumps(value)) + "\n"


def say_report(text: str, form: str, *, styled: bool = False) -> None:
    """Show a rendered report, whose format has escaped foreign text in its own way. `styled` says
    that it is for a terminal and contains our colours; `github` consists of commands."""
    if form in ("json", "sarif"):
        text = _safe_json(text)
    elif form == "junit" and "##" in text:
        text = _ANYWHERE.sub("&#35;", text)
    elif form in ("text", "markdown") and not styled:
        say(*text.split("\n"))
        return
    _write(text + "\n", err=False)


def _safe_json(text: str) -> str:
    """JSON has `##[` only in strings, and there an escape is equivalent."""
    return _ANYWHERE.sub(r"\\u0023", text) if "##" in text else text


def _write(text: str, *, err: bool) -> None:
    stream: TextIO = sys.stderr if err else sys.stdout
    encoding = stream.encoding or "utf-8"
    # A log in ASCII shows an escape for a character that it cannot encode.
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError:
        # What a command makes does not hang on who hears how far it is; a result on stdout does.
        if not err:
            raise
        unheard()
