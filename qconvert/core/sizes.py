"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import re

from qconvert.core.errors import UsageError

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
