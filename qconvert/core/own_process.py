"""This process, and the interpreters that it starts.

A command is often run inside a model's folder, which may be anyone's. Python imports from the current
folder first where it runs `-c` or `-m`, and where PYTHONPATH has an empty or relative entry: a `json.py`
of the folder would be run. So every interpreter is started by `python` below, and what a library starts
by itself (multiprocessing, ray) is started within `without_current_folder`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

_own: list[bool] = []
# As -P, for every interpreter that inherits it (Python 3.11, sys.flags.safe_path).
_SAFE = "PYTHONSAFEPATH"
# Where this package lies: needed even if it is the current folder, as in a checkout.
_PACKAGES = str(Path(__file__).resolve().parents[2])


def declare() -> None:
    """Of the installed command, before it runs: this process runs a command of qconvert and nothing
    else. What it imports may then lack what no command uses, nothing is imported from the current
    folder, and whatever it starts keeps to that. A process that calls the API is somebody else's."""
    _own.append(True)
    sys.path[:] = _import_path()
    os.environ.update(_environment())


def is_own() -> bool:
    return bool(_own)


class Start(TypedDict):
    """What `subprocess` starts an interpreter by."""

    args: list[str]
    env: dict[str, str]


def python(*words: str, **variables: str) -> Start:
    """How an interpreter is started that imports what this one imports, and nothing from the current
    folder; `variables` are set in its environment."""
    path = os.pathsep.join(_import_path())
    env = {**os.environ, "PYTHONPATH": path, _SAFE: "1", **variables}
    return {"args": [sys.executable, "-P", *words], "env": env}


@contextmanager
def without_current_folder() -> Iterator[None]:
    """Within this, interpreters that a library starts do not import from the current folder."""
    before = {name: os.environ.get(name) for name in (_SAFE, "PYTHONPATH")}
    os.environ.update(_environment())
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _environment() -> dict[str, str]:
    """What interpreters inherit: PYTHONPATH without entries that mean the current folder."""
    entries = os.environ.get("PYTHONPATH")
    if entries is None:
        return {_SAFE: "1"}
    kept = [one for one in entries.split(os.pathsep) if Path(one).is_absolute() or _is_needed(one)]
    return {_SAFE: "1", "PYTHONPATH": os.pathsep.join(kept)}


def _import_path() -> list[str]:
    """sys.path without the current folder, which `-c`, `-m` and relative entries of PYTHONPATH put there
    (Python makes the latter absolute)."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed: nothing can be imported from it
        here = ""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    foreign = {
        os.path.normpath(os.path.join(here, one)) for one in entries if not Path(one).is_absolute()
    }
    if not any(entries):
        foreign.clear()
    first = 1 if sys.path and sys.path[0] in ("", here) and not _is_needed(sys.path[0]) else 0
    return [
        one
        for one in sys.path[first:]
        if _is_needed(one) or (Path(one).is_absolute() and one not in foreign)
    ]


def _is_needed(entry: str) -> bool:
    return os.path.realpath(entry) == _PACKAGES
