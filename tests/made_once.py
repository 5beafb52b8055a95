"""What several tests read and what takes seconds to make: the first test that asks makes it, for all of
xdist's processes, which take tests of a file from one another."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

VARIABLE = "QCONVERT_TEST_MADE"  # where; conftest.py sets it


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder, or file, of this name, which `make` makes at a path where nothing is. Nobody may write
    to it later. One name, one content."""
    root = Path(os.environ[VARIABLE])
    folder, made = root / name, root / f"{name}.made"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(root / f"{name}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # what one left that failed
                make(folder)
                made.touch()
        finally:
            # Not by closing alone: a process that was forked meanwhile holds the file open.
            fcntl.flock(lock, fcntl.LOCK_UN)
    return folder
