"""Folders handed to a runtime's own loader, which runs in an environment of its own (`make loaders`)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parent.parent
PYTHON = _TESTS.parent / ".venv-loaders" / "bin" / "python"


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
    """What a loader did with a folder. `unwritten`: parameters that no byte came to, or not to all of;
    `unused`: tensors of the folder that reached no parameter; `schemes`: the quantization method of
    each module; `parameters`: type, shape and digest by name, right after the load."""

    error: str | None
    step: str
    architecture: str = ""
    quantization: str | None = None
    unwritten: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    schemes: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    at: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it loaded, and every parameter was written."""
        return self.error is None and not self.unwritten and not self.empty


class Server:
    """A runtime's loader in a process of its own; folders are loaded one after another."""

    def __init__(self, runtime: str, capability: str = "9.0") -> None:
        self._process = subprocess.Popen(
            [PYTHON, "-m", f"loaders.serve_{runtime}", "--capability", capability], cwd=_TESTS,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True,
        )  # fmt: skip
        self._read("ready")

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
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        said = json.loads(self._read())
        tuples = ("unwritten", "unused", "empty", "warnings", "at")
        said |= {key: tuple(said[key]) for key in tuples if key in said}
        held = said.get("parameters", {})
        said["parameters"] = {name: tuple(map(str, value)) for name, value in held.items()}
        return Loaded(**said)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self, expected: str = "") -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line or (expected and line.strip() != expected):
            raise RuntimeError(f"the loader's process ended: {self._process.wait()}, said {line!r}")
        return line
