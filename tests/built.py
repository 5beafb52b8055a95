"""Distributions built from a copy of the checkout: building in it would leave build/ behind, which then
shadows sources."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def tracked() -> list[str]:
    """Files that are committed or would be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in listed.stdout.splitlines() if os.path.lexists(ROOT / name)]


def from_checkout(tree: Path) -> None:
    """The checkout as it is, links as links."""
    for name in tracked():
        file = tree / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            file.symlink_to((ROOT / name).readlink())
        else:
            file.write_bytes((ROOT / name).read_bytes())


def built(make: Callable[[Path], None], folder: Path, *what: str) -> list[Path]:
    """Distributions (`what` are options of `python -m build`) of the tree that `make` makes."""
    tree = folder / "tree"
    tree.mkdir()
    make(tree)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", str(folder), str(tree)],
        check=True, capture_output=True,
    )  # fmt: skip
    return sorted(file for file in folder.iterdir() if file.is_file())
