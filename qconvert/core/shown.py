"""Text for people: foreign text made safe to show (names and values come from untrusted folders),
and counts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from qconvert.core.errors import UsageError

# --- Sizes in bytes, as people write and read them ------------------------------------------------


_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SPELT = {"KIB": "KiB", "MIB": "MiB", "GIB": "GiB", "TIB": "TiB"}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)")


def parse_size(text: str | int) -> int:
    """`5GB` (10^9), `512MiB` (2^20), `4096` -> bytes. Raises UsageError for anything else."""
    from fractions import Fraction

    match = _SIZE.fullmatch(str(text).strip())
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"{text!r} is not a valid size; write 5GB, 512MiB or a number of bytes")
    size = int(Fraction(match[1]) * _UNITS[match[2].upper()])  # exact, where a float is not
    if size < 1:
        raise UsageError(f"{text!r} is not a valid size: expected at least one byte")
    return size


def format_size(size: float) -> str:
    """Bytes in decimal units with about three figures, as disks and repos are sold: `688.6 GB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def exact_size(size: int) -> str:
    """Bytes in the largest unit, decimal or binary, that divides them, as a user probably wrote
    them: `1 KB`, `512 MiB`, `1234 B`."""
    fits = [name for name in _UNITS if name and size % _UNITS[name] == 0]
    unit = max(fits, key=_UNITS.__getitem__)
    return f"{size // _UNITS[unit]} {_SPELT.get(unit, unit)}"


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


def one_of(number: int, several: str) -> str:
    """A plural word, or the word for one: `matrices`, `tensors`."""
    if number != 1:
        return several
    return several.replace("matrices", "matrix") if "matrices" in several else several[:-1]


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
