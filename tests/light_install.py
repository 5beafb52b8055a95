"""An environment as `pip install qconvert` makes it: the core requirements and what they require, and
nothing of what the extras bring."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
import venv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent

# Run by that environment's Python: command lines from stdin, each as its exit code, output and errors.
_COMMANDS = """
import contextlib, io, json, sys
from qconvert.cli.main import main
found = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
            code = 0
        except SystemExit as end:
            code = end.code or 0
    found.append([code, out.getvalue(), err.getvalue()])
json.dump([found, sorted({name.partition(".")[0] for name in sys.modules})], sys.stdout)
"""


@dataclass(frozen=True)
class Said:
    """What one command line gave."""

    code: int
    out: str
    err: str


def project() -> Mapping[str, Any]:
    """pyproject.toml's table of the project."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        table: Mapping[str, Any] = tomllib.load(file)["project"]
    return table


def closure(requirements: Iterable[str]) -> set[str]:
    """Names of the installed distributions that requirements lead to, with what those require."""
    found: set[str] = set()
    left = [Requirement(text) for text in requirements]
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        if name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        left += [Requirement(text) for text in metadata.requires(name) or ()]
    return found


def light_python(folder: Path) -> Path:
    """The Python of a new environment that sees the checkout, and of what is installed here only the
    core requirements' closure: by links, so nothing is fetched or copied."""
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in closure(project()["dependencies"]):
        dist = metadata.distribution(name)
        for top in {file.parts[0] for file in dist.files or ()}:
            target = Path(str(dist.locate_file(top))).resolve()
            if top not in ("..", "__pycache__") and target.exists():
                (site / top).symlink_to(target)
    (site / "qconvert-checkout.pth").write_text(f"{ROOT}\n")
    return folder / "bin" / "python"


def commands(
    python: Path, lines: Sequence[Sequence[str]], folder: Path
) -> tuple[list[Said], set[str]]:
    """What command lines give, one after another in one process that starts in `folder`, and what it
    imported."""
    done = subprocess.run(
        [python, "-P", "-c", _COMMANDS],
        input=json.dumps([*map(list, lines)]), cwd=folder,
        capture_output=True, text=True, check=False, env=clean(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said, imported = json.loads(done.stdout)
    return [Said(*one) for one in said], set(imported)


def clean(**more: str) -> dict[str, str]:
    """The environment without what would lead a Python to other packages."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"} | more
