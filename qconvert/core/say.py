"""The only output of text: everything shown goes to a terminal or a CI log line by line.

Names and values in it come from untrusted folders. So a line stays one line, invisible characters
are escaped (core/shown.py), and no line is a command to the CI that keeps the log.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any, TextIO

from qconvert.core.own_process import unheard
from qconvert.core.shown import message, printable

# GitHub's runner takes `::error::` at the start of a line, after white space, and `##[error]` anywhere
# in it (actions/runner 2.330, ActionCommand.cs, TryParseV2 and TryParse); Azure Pipelines takes
# `##vso[...]`, TeamCity `##teamcity[...]`.
_AT_START = re.compile(r"^( *):(?=:)")
_ANYWHERE = re.compile(r"#(?=#[A-Za-z]*\[)")
_said = False  # since the command began
_LINES = 2048  # lines that are written at a time: a dump has as many as a model has tensors


@contextmanager
def sign_of_life(text: str, seconds: float = 0.8) -> Iterator[None]:
    """Within this a text is shown on a terminal's stderr if nothing else was by then: a large model is
    read for seconds. By a signal, since a thread would be there when workers are forked."""
    global _said
    _said = False
    ours = threading.current_thread() is threading.main_thread() and sys.stderr.isatty()
    if not ours:
        yield
        return
    before = signal.signal(signal.SIGALRM, lambda *_: None if _said else say(text, err=True))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def shown_line(text: str) -> str:
    """One line, made safe to show. The first character of what CI would take for a command is
    escaped."""
    text = _AT_START.sub(r"\1\\x3a", printable(text)) if "::" in text else printable(text)
    return _ANYWHERE.sub(r"\\x23", text) if "##" in text else text


def say(*lines: str, err: bool = False) -> None:
    """Show lines on stdout, or on stderr. A newline within a line is escaped."""
    say_all(lines, err=err)


def say_all(lines: Iterable[str], *, err: bool = False) -> None:
    """Show many lines: on a terminal at most as long as its own, broken between words; elsewhere as
    they are."""
    stream = sys.stderr if err else sys.stdout
    width = get_terminal_size().columns if stream.isatty() else 0
    batch: list[str] = []
    for line in lines:
        shown = shown_line(line)
        batch.extend(_wrapped(shown, width) if 0 < width < len(shown) else (shown,))
        if len(batch) == _LINES:
            _write("\n".join([*batch, ""]), err=err)
            batch.clear()
    if batch:
        _write("\n".join([*batch, ""]), err=err)


def _wrapped(line: str, width: int) -> list[str]:
    """Parts of a line, those after the first behind its label or two deeper than it begins."""
    label = re.match(r"(?:[a-z]+ {2,}| *)", line)
    assert label is not None
    indent = " " * (label.end() if line[:1].strip() else label.end() + 2)
    return wrap(
        line, max(width, 40), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
        drop_whitespace=True,
    ) or [line]  # fmt: skip


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
    global _said
    _said = True
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
