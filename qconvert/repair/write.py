"""A planned repair carried out: all files are staged and synced, then renamed, so that an interrupted
repair is finished, or leaves no trace, when the command is run again.

What is staged names the hashes of what it replaces and of what it puts there. A stage that does not
match its folder (it came with the folder, or the folder has changed) is removed, not carried out, and
no stage touches other files than metadata.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from qconvert.checkpoint.checkpoint import INDEX, REPAIR_DIR
from qconvert.core.errors import OutputError
from qconvert.core.json_text import parse_object
from qconvert.core.links import SMALL, read_regular
from qconvert.repair.repair import METADATA, MOST, Change
from qconvert.repair.sealed import hash_of

_COMMIT = "commit.json"


def write(folder: Path, changes: Sequence[Change]) -> None:
    """Write changed files into the folder they are for. Raises OutputError where that fails."""
    assert METADATA.issuperset(change.file for change in changes)
    finish(folder)
    stage = folder / REPAIR_DIR
    with _writing(stage):
        stage.mkdir()
        for change in changes:
            if change.after is not None:
                _synced(stage / change.file, change.after)
        # Hashes before and after; of a file that is not there, None.
        files = {
            change.file: (hash_of(_read(folder / change.file)), hash_of(change.after))
            for change in changes
        }
        # It appears whole: without it nothing was replaced yet.
        _synced(stage / f"{_COMMIT}.new", json.dumps({"files": files}).encode())
        os.replace(stage / f"{_COMMIT}.new", stage / _COMMIT)
        _sync(stage)
    finish(folder)


def finish(folder: Path, notice: Callable[[str], None] | None = None) -> bool:
    """Carry an interrupted repair to its end, or remove what was staged: before it was complete, or for
    other files than are here, which `notice` is told. Returns whether one was carried to its end. Raises
    OutputError where the folder cannot be written."""
    stage = folder / REPAIR_DIR
    if not os.path.lexists(stage):
        return False
    with _writing(folder):
        if stage.is_symlink() or not stage.is_dir():
            stage.unlink()
            return False
        files: Mapping[str, str | None] | None = None
        if os.path.lexists(stage / _COMMIT):
            try:
                files = _to_do(folder, stage)
                _publish(folder, stage, files)
            except _NotOfThisFolder as reason:
                if notice is not None:
                    notice(f"{stage}: is removed, not carried out: {reason}")
        shutil.rmtree(stage)
        _sync(folder)
    return files is not None


class _NotOfThisFolder(Exception):
    """A stage does not match what lies in its folder."""


def _to_do(folder: Path, stage: Path) -> dict[str, str | None]:
    """Hashes, by name, of the files that are still to be replaced; None: to be removed."""
    try:
        data = read_regular(stage / _COMMIT, SMALL, follow=False, error=OutputError)
        said = parse_object(data, stage / _COMMIT, error=OutputError).get("files")
    except OutputError as error:
        raise _NotOfThisFolder(str(error)) from error
    if not isinstance(said, Mapping) or not METADATA.issuperset(said):
        raise _NotOfThisFolder(f"{_COMMIT} names other files than a repair writes")
    found: dict[str, str | None] = {}
    for name, hashes in said.items():
        match hashes:
            case [str() | None as before, str() | None as after]:
                here = hash_of(_read(folder / name))
            case _:
                raise _NotOfThisFolder(f"{_COMMIT} has no hashes of {name}")
        if here == after:
            continue
        if here != before or (after is not None and hash_of(_read(stage / name)) != after):
            raise _NotOfThisFolder(f"{name} is not what {_COMMIT} says that it replaces")
        found[name] = after
    return found


def _publish(folder: Path, stage: Path, files: Mapping[str, str | None]) -> None:
    # The index last: it makes the folder a checkpoint.
    for name in sorted(files, key=lambda name: (files[name] is None, name == INDEX)):
        if files[name] is None:
            (folder / name).unlink(missing_ok=True)
        else:
            os.replace(stage / name, folder / name)
    _sync(folder)


def _read(file: Path) -> bytes | None:
    """The bytes of a file, or of what its link leads to (a Hub cache's blob); None if there is none."""
    try:
        return read_regular(file, MOST, error=OutputError)
    except FileNotFoundError:
        return None


@contextmanager
def _writing(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        at = error.filename or where
        raise OutputError(f"{at}: cannot be written: {error.strerror or error}") from error


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
