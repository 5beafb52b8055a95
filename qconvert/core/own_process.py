"""This process, the interpreters that it starts, and the folder that it keeps things in.

A command is often run inside a model's folder, which may be anyone's. Python imports from the current
folder first where it runs `-c` or `-m`, and where PYTHONPATH has an empty or relative entry: a `json.py`
of the folder would be run. So every interpreter is started by `python` below, and what a library starts
by itself (multiprocessing, ray) is started within `without_current_folder`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def open_standard_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr (`2>&-`) what takes all and gives
    nothing: Python has None for them, and the next file that is opened, a shard, would have the number
    that libraries write their messages to."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - for good
            setattr(sys, name, stream)


def unheard() -> None:
    """Nobody reads stderr any more (a pipe whose reader went, a full disk): what is written to it from
    now on is dropped, and a run goes on."""
    if is_own():
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)


def cache_root() -> Path:
    """The folder of this user's cache that qconvert keeps things in. Raises RuntimeError where nobody
    knows the user's home."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "qconvert"


def make_private(folder: Path) -> None:
    """Create a folder, and those above it, for this user alone whatever the umask is (002 lets the group
    write): of some what lies in them is loaded as code."""
    for missing in [one for one in (folder, *folder.parents) if not one.exists()][::-1]:
        missing.mkdir(mode=0o700, exist_ok=True)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, those of the cache for this user alone."""
    with suppress(RuntimeError):
        if cache_root() in folder.parents:
            make_private(cache_root())
    folder.mkdir(parents=True, exist_ok=True)


class InterpreterArgs(TypedDict):
    """Arguments by which `subprocess` starts an interpreter."""

    args: list[str]
    env: dict[str, str]


def python(*words: str, **variables: str) -> InterpreterArgs:
    """Return how an interpreter is started that imports what this one imports, and nothing from the
    current folder; `variables` are set in its environment."""
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
    """Return what interpreters inherit: PYTHONPATH without entries that mean the current folder."""
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
