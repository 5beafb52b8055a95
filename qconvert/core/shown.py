"""Text for people: foreign text made safe to show (names and values come from untrusted folders),
and counts."""

from __future__ import annotations

from collections.abc import Sequence

MOST_SHOWN = 1500  # characters of one message; more is a name or a value, not something to read


def printable(text: str, keep: str = "") -> str:
    """The text with every invisible character escaped as Python does (`\\x1b`): control codes, newlines,
    direction marks, halves of surrogate pairs. Foreign names must neither control a terminal, nor start
    a line of their own in a CI log, nor break a file. Characters in `keep` are left unchanged."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def count(number: int, what: str, several: str | None = None) -> str:
    """`1 error`, `1,536 tensors`; `several` is the plural if it is not `what` with an s."""
    return f"{number:,} {what if number == 1 else several or what + 's'}"


def several(names: Sequence[str], most: int = 4) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def shortened(text: str, most: int = MOST_SHOWN) -> str:
    """At most `most` characters: beginning and end are kept, what is left out is counted."""
    if len(text) <= most:
        return text
    note = f" ... ({len(text) - most} characters left out) ... "
    half = max(0, most - len(note)) // 2
    return text[:half] + note + text[len(text) - half :]


def message(text: str) -> str:
    """A message of one line: printable, and of a length that a person reads."""
    return shortened(printable(text))
