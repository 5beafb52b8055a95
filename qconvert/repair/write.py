"""A planned repair carried out: all files are staged and synced, then renamed, so that an interrupted
repair is finished, or leaves no trace, when the command is run again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qconvert.checkpoint.checkpoint import INDEX
from qconvert.core.errors import OutputError
from qconvert.core.json_text import parse_object
from qconvert.core.links import is_inside
from qconvert.core.regular import SMALL, read_regular
from qconvert.repair.repair import Change

STAGE = ".qconvert-repair"
_COMMIT = "commit.json"


def write(folder: Path, changes: Sequence[Change]) -> None:
    """Write changed files into the folder they are for. Raises OutputError where that fails."""
    stage = folder / STAGE
    try:
        stage.mkdir()
        for change in changes:
            if change.after is not None:
                _synced(stage / change.file, change.after)
        written = [change.file for change in changes if change.after is not None]
        removed = [change.file for change in changes if change.after is None]
        _synced(stage / _COMMIT, json.dumps({"written": written, "removed": removed}).encode())
        _sync(stage)
    except OSError as error:
        raise OutputError(f"{stage}: cannot be written: {error.strerror or error}") from error
    finish(folder)


def finish(folder: Path) -> bool:
    """Carry an interrupted repair to its end, or remove what it staged before it was complete. Returns
    whether there was one to carry to its end. Raises OutputError for what is not a repair's."""
    stage = folder / STAGE
    if not stage.is_dir() or stage.is_symlink():
        return False
    try:
        complete = (stage / _COMMIT).is_file()
        if complete:
            _publish(folder, stage)
        shutil.rmtree(stage)
        _sync(folder)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return complete


def _publish(folder: Path, stage: Path) -> None:
    said = parse_object(
        read_regular(stage / _COMMIT, SMALL, follow=False, error=OutputError), stage / _COMMIT,
        error=OutputError,
    )  # fmt: skip
    written, removed = (_names(said.get(key), stage) for key in ("written", "removed"))
    # The index last: it makes the folder a checkpoint.
    for name in sorted(written, key=lambda name: name == INDEX):
        if (stage / name).exists():
            os.replace(stage / name, folder / name)
    for name in removed:
        (folder / name).unlink(missing_ok=True)
    _sync(folder)


def _names(said: Any, stage: Path) -> list[str]:
    names = said if isinstance(said, list) else [None]
    found = [n for n in names if isinstance(n, str) and is_inside(n) and "/" not in n]
    if len(found) != len(names):
        raise OutputError(f"{stage / _COMMIT}: is not a repair's; remove {stage}")
    return found


def _synced(file: Path, data: bytes) -> None:
    with file.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
