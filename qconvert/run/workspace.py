"""The output folder's life: claimed, filled out of sight, published by renames, tidied.

Until every byte is synced all work lives in `OUT/.qconvert/`, because runtimes glob for
`*.safetensors` and would load a half-written folder. Then everything is renamed into place, what
makes the folder a checkpoint last. Killed at any point, the same command goes on from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from qconvert.checkpoint.checkpoint import MANIFEST, WORK_DIR, Checkpoint
from qconvert.core.errors import OutputError
from qconvert.run.files import Files, existing_parent
from qconvert.run.journal import Journal, Remembered, read_journal, refuse_other_plan
from qconvert.run.lock import Lock, take_lock
from qconvert.run.shards import Layout

JOURNAL = "journal.jsonl"
STAGE = "stage"
# What a calibration remembers between its layers.
CALIBRATION = "calibration"
LOCK = "lock"
_COPY = 4 << 20
_LINES = 4096


def check_apart(out: Path, checkpoint: Checkpoint) -> None:
    """Raise OutputError where the output would lie in, on or around its own source."""
    for folder in dict.fromkeys([checkpoint.root, *(s.path.parent for s in checkpoint.shards)]):
        if _overlap(out, folder):
            raise OutputError(f"{out}: the output folder must lie apart from the source {folder}")


def check_folders_apart(out: Path, other: Path) -> None:
    """Raise OutputError where two output folders lie in one another."""
    if _overlap(out, other):
        raise OutputError(f"{out}: must lie apart from the other output folder {other}")


def _overlap(a: Path, b: Path) -> bool:
    # realpath, not resolve(): a link to itself is for mkdir to refuse, by name.
    first, second = Path(os.path.realpath(a)), Path(os.path.realpath(b))
    return first == second or first in second.parents or second in first.parents


def check_disk(out: Path, needed: int) -> None:
    """Raise OutputError if `needed` more bytes do not fit on the output's disk."""
    stat = os.statvfs(existing_parent(out))
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
        self._lock: Lock | None = None
        self._files = files
        self._identity = identity
        if out.exists() and not out.is_dir():
            raise OutputError(f"{out} is not a folder")
        while True:
            claimed = self.work.is_dir()
            if not claimed:
                self._refuse_foreign(commit)
                if self.done:
                    return
            _make_safely(self.work.absolute(), files)
            lock = take_lock(self.work / LOCK)
            if lock is not None:
                break  # else whoever held it has finished, and removed the folder
        self._lock = lock
        try:
            self._look_around(commit, claimed)
        except BaseException:
            self.release()
            raise
        if self.done:
            self.tidy()

    def _look_around(self, commit: str, claimed: bool) -> None:
        """Learn what an earlier run left. Raises OutputError where it is not ours to go on with."""
        found = read_journal(self.work / JOURNAL)
        if found is not None:
            refuse_other_plan(self.out, found.header, self._identity)
        if found is None or found.publish is None:
            try:
                self._refuse_foreign(commit)
            except OutputError:
                if found is None and not claimed:
                    _discard(self.work, self._files)
                raise
        self.remembered = found

    def _refuse_foreign(self, commit: str) -> None:
        """Raise OutputError if OUT holds anything but our work; note it if that is this result."""
        entries = sorted(set(os.listdir(self.out)) - {WORK_DIR}) if self.out.exists() else []
        if not entries:
            return
        manifest = self.out / MANIFEST
        if manifest.is_file() and (self.out / commit).is_file():
            if _identity_in(manifest) == _lasting(self._identity):
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
        assert self._lock is not None, "a finished folder is not locked"
        return self._lock.fd

    def begin(self, layout: Layout, run: str) -> Journal:
        """Create every shard at full size with its header, then the journal. Once the journal's
        first line can be read, the shards are known to be there. `run` names this beginning: the same
        plan may be begun again, with another folder beside it."""
        for left in (self.stage, self.work / CALIBRATION):
            if left.exists():
                self._files.remove_tree(left)
        self._files.make_folder(self.stage)
        for file in layout.files:
            if file.link is not None:
                self._files.link(file.link.resolve(), self.stage / file.name)
                continue
            self.write_file(self.stage / file.name, memoryview(file.header), file.size)
        self._files.sync_folder(self.stage)
        path = self.work / JOURNAL
        self._files.create(path, 0)
        journal = Journal(path, self._files, 0)
        journal.append([{**self._identity, "run": run}])
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

    def write_lines(self, path: Path, lines: Sequence[str]) -> None:
        """Create a file of ASCII lines and sync it. Whole, a large model's receipt would be a
        sizeable piece of memory."""
        self._files.create(path, sum(len(line) + 1 for line in lines))
        fd = self._files.open(path)
        try:
            at = 0
            for first in range(0, len(lines), _LINES):
                text = "\n".join([*lines[first : first + _LINES], ""]).encode("ascii")
                self._files.write(fd, path, memoryview(text), at)
                at += len(text)
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
            for folder in _folders(self.stage, names):
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

    def forget(self) -> None:
        """Drop what an interrupted run left, for good: its journal must not speak of files that are
        about to be made anew. What of it was published already is taken back."""
        found, self.remembered = self.remembered, None
        if found is None:
            return
        names = found.publish or ()
        staged = {name for name in names if (self.stage / name).exists()}
        if names:
            _take_back(self.out, names, staged, self._files)
        self._files.remove(self.work / JOURNAL)
        self._files.sync_folder(self.work)

    def withdraw(self) -> None:
        """Give up a folder that a refusal met right after it was claimed: nothing of ours stays. Work
        that was begun is left to be resumed."""
        begun = (self.work / JOURNAL).exists() or self.stage.exists()
        if self._lock is not None and not begun:
            with suppress(OSError):  # the refusal is what the user must hear of
                _discard(self.work, self._files)
        self.release()

    def tidy(self) -> None:
        """Remove the work folder of a finished conversion and give up the lock."""
        _discard(self.work, self._files)
        self.release()

    def release(self) -> None:
        """Give up the lock, where it is held, leaving unfinished work to be resumed."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()


def _make_safely(folder: Path, files: Files) -> None:
    """Create a folder and its parents, each name synced before anything is made below it. The first
    one that exists is synced too: a killed run may have made it and not come to that."""
    if not folder.exists():
        _make_safely(folder.parent, files)
        files.make_folder(folder)
    files.sync_folder(folder.parent)


def _discard(work: Path, files: Files) -> None:
    """Remove a work folder. Its journal goes first and for good: what is left of a removal that was
    itself interrupted must not be taken for finished work."""
    if (work / JOURNAL).exists():
        files.remove(work / JOURNAL)
        files.sync_folder(work)
    files.remove_tree(work)
    files.sync_folder(work.parent)


def _identity_in(manifest: Path) -> Any:
    """The identity a manifest holds; None where it is not one of ours."""
    try:
        found = json.loads(manifest.read_bytes())
    except ValueError:
        return None
    return found.get("identity") if isinstance(found, dict) else None


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
    """Drop unfinished work in OUT, and in the folders of pipeline stages in it; published parts of it
    too. False if there was none.

    Raises OutputError if another run holds it.
    """
    folders = [out, *sorted(out.glob("stage-*-of-*"))]
    cleaned = [_clean(folder, files) for folder in folders]
    return any(cleaned)


def _clean(out: Path, files: Files) -> bool:
    work = out / WORK_DIR
    if not work.is_dir():
        return False
    lock = take_lock(work / LOCK)
    if lock is None:
        return False
    try:
        found = read_journal(work / JOURNAL)
        names = (found.publish or ()) if found is not None else ()
        staged = {name for name in names if (work / STAGE / name).exists()}
        if staged:  # publishing was interrupted: take back what had already been moved
            _take_back(out, names, staged, files)
        _discard(work, files)
    finally:
        lock.close()
    return True


def _take_back(out: Path, names: Sequence[str], staged: Set[str], files: Files) -> None:
    """Remove those of the names that had been published, and the folders made for any of them."""
    for name in names:
        if name not in staged and (out / name).exists():
            files.remove(out / name)
    for folder in _folders(out, names):
        if folder != out and folder.is_dir() and not os.listdir(folder):
            files.remove(folder)
    files.sync_folder(out)
