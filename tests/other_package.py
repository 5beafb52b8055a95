"""A package of someone else's, as pip would install it: modules and a dist-info with entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from checkpoints import Result

_ROOT = Path(__file__).parent.parent


def installed(site: Path, name: str, modules: Mapping[str, str], points: Mapping[str, str]) -> Path:
    """The folder to put on the path. `modules` are texts by file name; `points` name a module of the
    package by group."""
    package, info = site / name, site / f"{name}-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    for file, text in {"__init__": "", **modules}.items():
        (package / f"{file}.py").write_text(text)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]\n{name} = {name}.{module}\n" for group, module in points.items()]
    (info / "entry_points.txt").write_text("".join(lines))
    return site


def run_beside(site: Path, *words: str | Path, **environment: str) -> Result:
    """A command in a process of its own, which finds the package."""
    return _run(site, ["-m", "qconvert", *map(str, words)], environment)


def python_beside(site: Path, code: str, *words: object) -> Result:
    """Code in such a process, which finds modules of the tests, too."""
    return _run(site, ["-c", code, *map(str, words)], {})


def _run(site: Path, words: list[str], environment: Mapping[str, str]) -> Result:
    path = os.pathsep.join([str(site), str(_ROOT), str(_ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, **environment}, check=False, timeout=120,
    )  # fmt: skip
    return Result(done.returncode, done.stdout, done.stderr)
