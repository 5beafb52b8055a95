"""Whether this process runs a command of qconvert and nothing else: what it imports may then lack what
no command uses. A process that calls the API is somebody else's."""

from __future__ import annotations

_own: list[bool] = []


def declare() -> None:
    """Of the installed command, before it runs."""
    _own.append(True)


def is_own() -> bool:
    return bool(_own)
