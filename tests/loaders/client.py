"""Folders handed to a runtime's own loader, which runs in a process of the runtime's own interpreter
(`make loaders`); what `--loader` asks it with is runtimes/loader/process.py."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from qconvert.core.versions import RELEASES
from qconvert.runtimes.loader import process

# Of the runtimes; QCONVERT_LOADERS names that of earlier releases (make older).
PYTHON = Path(
    os.environ.get("QCONVERT_LOADERS")
    or Path(__file__).parent.parent.parent / ".venv-loaders" / "bin" / "python"
).absolute()
_SERVER = Path(process.__file__).parent / "server" / "__main__.py"


@cache
def version_of(runtime: str) -> str:
    """The version of a runtime that is compared with, and the newest where none is there."""
    return (process.versions_in(PYTHON, process.DEFAULT) if PYTHON.exists() else {}).get(
        runtime, RELEASES[runtime].version
    )


@dataclass(frozen=True)
class Rank:
    """One process of a runtime: its place among tensor-parallel and pipeline ranks."""

    tp: int = 1
    rank: int = 0
    pp: int = 1
    stage: int = 0

    def __str__(self) -> str:
        stage = f" pp{self.pp}s{self.stage}" if self.pp > 1 else ""
        return f"tp{self.tp}r{self.rank}{stage}"


@dataclass(frozen=True)
class Loaded:
    """Report of a loader on a folder. `unwritten`: parameters that no byte came to, or not to all of;
    `unused`: tensors of the folder that reached no parameter; `dropped`: parameters that the runtime
    takes away after the load where no byte came to them; `schemes`: the quantization method of each
    module; `parameters`: type, shape and digest by name, right after the load."""

    error: str | None
    step: str
    architecture: str = ""
    quantization: str | None = None
    unwritten: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    schemes: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    at: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Tell whether it loaded, and every parameter was written."""
        return self.error is None and not self.unwritten and not self.empty


# Not waited for: they end once nobody is connected.
_STARTED: list[subprocess.Popen[str]] = []


class Server:
    """A runtime's loader in a process of `python`, its interpreter, which all that name the same `room`
    share; folders are loaded one after another."""

    def __init__(self, python: Path, room: Path, runtime: str, capability: str = "9.0") -> None:
        at = room / f"{runtime}-{capability}.socket"
        self._socket = socket.socket(socket.AF_UNIX)
        with at.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # while one starts it, others wait
            try:
                self._socket.connect(str(at))
            except OSError:
                at.unlink(missing_ok=True)
                _start(python, runtime, capability, at)
                self._socket.connect(str(at))
        self._lines = self._socket.makefile("rw")

    def load(
        self,
        folder: Path,
        rank: Rank | None = None,
        *,
        draft: bool = False,
        flags: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Loaded:
        """Load a folder as one rank; `flags` are the runtime's own arguments, `draft` asks for its class
        of the draft model."""
        at = rank or Rank()
        job = {
            "folder": str(folder), "tp": at.tp, "rank": at.rank, "pp": at.pp, "stage": at.stage,
            "draft": draft, "flags": dict(flags or {}), "environment": dict(environment or {}),
        }  # fmt: skip
        said = self._asked(job)
        tuples = ("unwritten", "unused", "empty", "dropped", "warnings", "at")
        said |= {key: tuple(said[key]) for key in tuples if key in said}
        held = said.get("parameters", {})
        said["parameters"] = {name: tuple(map(str, value)) for name, value in held.items()}
        return Loaded(**said)

    def recorded(
        self,
        folder: Path,
        rank: Rank | None = None,
        *,
        load: bool = True,
        probes: bool = False,
        draft: bool = False,
        flags: Mapping[str, Any] | None = None,
        method: str = "recorded",
        packed: Sequence[str] = (),
        hidden: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Record the class of a folder at one rank (server/record.py), of which only headers are read;
        with `load` also which tensors its parameters hold, with `probes` what its loader does with
        names that lead nowhere. `method`: the name of the quantization that it is told; `packed`:
        patterns of names of linears that hold no `weight`, `hidden`: of those that hold none once all is
        loaded."""
        at = rank or Rank()
        return self._asked({
            "folder": str(folder), "tp": at.tp, "rank": at.rank, "pp": at.pp, "stage": at.stage,
            "draft": draft, "flags": dict(flags or {}), "probes": probes,
            "environment": dict(environment or {}),
            "load": load, "method": method, "packed": [*packed], "hidden": [*hidden],
        })  # fmt: skip

    def parsed(self, lines: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Ask the runtime's own parser about serving lines (parse_lines.py)."""
        found: list[dict[str, Any]] = self._asked({"lines": [*map(list, lines)]})["parsed"]
        return found

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def _asked(self, job: Mapping[str, Any]) -> dict[str, Any]:
        self._lines.write(json.dumps(job) + "\n")
        self._lines.flush()
        line = self._lines.readline()
        if not line:
            raise RuntimeError("the loader's process ended")
        said: dict[str, Any] = json.loads(line)
        return said


def _start(python: Path, runtime: str, capability: str, at: Path) -> None:
    """A server, once it listens."""
    words = ("--capability", capability, "--at", str(at))
    started = subprocess.Popen(
        [python, _SERVER, runtime, *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=sys.stderr, text=True,
    )  # fmt: skip
    _STARTED.append(started)
    assert started.stdout is not None
    line = started.stdout.readline()
    if line.strip() != "ready":
        raise RuntimeError(f"the loader's process ended: {started.wait()}, said {line!r}")
