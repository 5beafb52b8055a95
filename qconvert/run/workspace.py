"""The output folder's life: claimed, filled out of sight, published by renames, tidied.

Until every byte is synced all work lives in `OUT/.qconvert/`, because runtimes glob for
`*.safetensors` and would load a half-written folder. Then everything is renamed into place, what
makes the folder a checkpoint last. Killed at any point, the same command goes on from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qconvert.checkpoint import MANIFEST, WORK_DIR, Checkpoint
from qconvert.errors import OutputError
from qconvert.run.files import Files
from qconvert.run.journal import Journal, Remembered, read_journal, refuse_other_plan
from qconvert.run.lock import Lock
from qconvert.run.shards import Layout

JOURNAL = "journal.jsonl"
STAGE = "stage"
LOCK = "lock"
_COPY = 4 << 20


def check_apart(out: Path, checkpoint: Checkpoint) -> None:
    """Raise OutputError where the output would lie in, on or around its own source."""
    target, source = out.resolve(), checkpoint.root.resolve()
    if target == source or source in target.parents or target in source.parents:
        raise OutputError(
            f"{out}: the output folder must lie apart from the source {checkpoint.root}"
        )


def check_disk(out: Path, needed: int) -> None:
    """Raise OutputError if `needed` more bytes do not fit on the output's disk."""
    folder = out.absolute()
    while not folder.exists():
        folder = folder.parent
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if free < needed:
        raise OutputError(
            f"{out}: the result needs {needed} more bytes, the disk has {free} free; nothing was "
            "written"
        )


class Workspace:
    """A claimed output folder. `done` says it already holds this very result; `remembered` is what
    an interrupted run of the same plan left behind."""

    def __init__(self, out: Path, identity: Mapping[str, Any], commit: str, files: Files) -> None:
        self.out = out
        self.work = out / WORK_DIR
        self.stage = self.work / STAGE
        self.done = False
        self.remembered: Remembered | None = None
        self._files = files
        self._identity = identity
        if out.exists() and not out.is_dir():
            raise OutputError(f"{out} is not a folder")
        claimed = self.work.is_dir()
        if not claimed:
            self._refuse_foreign(commit)
            if self.done:
                return
        files.make_folder(self.work)
        files.sync_folder(out.parent)
        files.sync_folder(out)
        self._lock = Lock(self.work / LOCK)
        try:
            found = read_journal(self.work / JOURNAL)
            if found is None:
                self._refuse_foreign(commit)
            else:
                refuse_other_plan(out, found.header, identity)
                if found.publish is None:
                    self._refuse_foreign(commit)
                self.remembered = found
        except OutputError:
            if not claimed:
                files.remove_tree(self.work)
            self._lock.close()
            raise
        if self.done:
            self.tidy()

    def _refuse_foreign(self, commit: str) -> None:
        """Raise OutputError if OUT holds anything but our work; note it if that is this result."""
        entries = sorted(set(os.listdir(self.out)) - {WORK_DIR}) if self.out.exists() else []
        if not entries:
            return
        manifest = self.out / MANIFEST
        if manifest.is_file() and (self.out / commit).is_file():
            found = json.loads(manifest.read_bytes())
            if found.get("identity") == _lasting(self._identity):
                self.done = True
                return
            raise OutputError(
                f"{self.out} already holds the finished result of another plan; choose another "
                "folder"
            )
        raise OutputError(
            f"{self.out} is not empty ({entries[0]}) and was not begun by qconvert; choose an "
            "empty or new folder"
        )

    @property
    def lock_fd(self) -> int:
        return self._lock.fd

    def begin(self, layout: Layout) -> Journal:
        """Create every shard at full size with its header, then the journal. Once the journal's
        first line can be read, the shards are known to be there."""
        if self.stage.exists():
            self._files.remove_tree(self.stage)
        self._files.make_folder(self.stage)
        for file in layout.files:
            self.write_file(self.stage / file.name, memoryview(file.header), file.size)
        self._files.sync_folder(self.stage)
        path = self.work / JOURNAL
        self._files.create(path, 0)
        journal = Journal(path, self._files, 0)
        journal.append([self._identity])
        self._files.sync_folder(self.work)
        return journal

    def resume(self) -> Journal:
        """The journal of an interrupted run, its torn end cut off."""
        assert self.remembered is not None
        return Journal(self.work / JOURNAL, self._files, self.remembered.length)

    def write_file(self, path: Path, data: memoryview, size: int | None = None) -> None:
        """Create a file with `data` at its start, `size` bytes in all, and sync it."""
        self._files.create(path, data.nbytes if size is None else size)
        fd = self._files.open(path)
        try:
            self._files.write(fd, path, data, 0)
            self._files.sync(fd, path)
        finally:
            self._files.close(fd)

    def copy_file(self, source: Path, name: str) -> None:
        """Stage a side file byte for byte. Raises OutputError if it cannot be read."""
        target = self.stage / name
        self._files.make_folder(target.parent)
        try:
            with source.open("rb") as stream:
                self._files.create(target, os.fstat(stream.fileno()).st_size)
                fd = self._files.open(target)
                try:
                    at = 0
                    while chunk := stream.read(_COPY):
                        self._files.write(fd, target, memoryview(chunk), at)
                        at += len(chunk)
                    self._files.sync(fd, target)
                finally:
                    self._files.close(fd)
        except OSError as error:
            raise OutputError(f"{source}: cannot be copied: {error.strerror or error}") from error

    def publish(self, names: Sequence[str], journal: Journal) -> None:
        """Rename staged files into place, in order; the last one makes the folder a checkpoint.

        A file that is no longer staged was renamed before a crash.
        """
        if self.remembered is None or self.remembered.publish is None:
            for folder in {self.stage, *((self.stage / name).parent for name in names)}:
                self._files.sync_folder(folder)
            journal.append([{"publish": list(names)}])
        for name in names[:-1]:
            self._move(name)
        for folder in _folders(self.out, names):
            self._files.sync_folder(folder)
        self._move(names[-1])
        self._files.sync_folder(self.out)
        self._files.sync_folder(self.stage)

    def _move(self, name: str) -> None:
        staged, final = self.stage / name, self.out / name
        if staged.exists():
            if final.parent != self.out:
                self._files.make_folder(final.parent)
            self._files.rename(staged, final)
        elif not final.exists():
            raise OutputError(f"{final}: was staged, and is gone; run qconvert clean {self.out}")

    def tidy(self) -> None:
        """Remove the work folder of a finished conversion and give up the lock."""
        self._files.remove_tree(self.work)
        self._files.sync_folder(self.out)
        self._lock.close()

    def release(self) -> None:
        """Give up the lock, leaving unfinished work to be resumed."""
        self._lock.close()


def _lasting(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What of a run's identity the manifest keeps: all but the times of this machine's files."""
    return {key: value for key, value in identity.items() if key != "stat"}


def _folders(root: Path, names: Sequence[str]) -> list[Path]:
    """`root` and every folder below it that one of the names lies in, deepest first."""
    found = {root}
    for name in names:
        found.update(root / parent for parent in Path(name).parents)
    return sorted(found, key=lambda folder: -len(folder.parts))


def clean(out: Path, files: Files) -> bool:
    """Drop unfinished work in OUT, published parts of it too. False if there was none.

    Raises OutputError if another run holds it.
    """
    work = out / WORK_DIR
    if not work.is_dir():
        return False
    lock = Lock(work / LOCK)
    try:
        found = read_journal(work / JOURNAL)
        names = (found.publish or ()) if found is not None else ()
        staged = {name for name in names if (work / STAGE / name).exists()}
        if staged:  # publishing was interrupted: take back what had already been moved
            for name in names:
                if name not in staged:
                    (out / name).unlink(missing_ok=True)
        files.remove_tree(work)
    finally:
        lock.close()
    return True

