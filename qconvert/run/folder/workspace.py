"""The output folder's life: claimed, filled out of sight, published by renames, tidied.

Until every byte is synced all work lives in `OUT/.qconvert/`, because runtimes glob for
`*.safetensors` and would load a half-written folder. Then everything is renamed into place, what
makes the folder a checkpoint last. Killed at any point, the same command goes on from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import IO, Any

import xxhash

from qconvert.checkpoint.checkpoint import MANIFEST, RECEIPT, WORK_DIR, Checkpoint
from qconvert.checkpoint.receipt import digest, read_receipt
from qconvert.core.errors import CheckpointError, OutputError
from qconvert.core.links import open_regular, read_regular, reading
from qconvert.core.shown import format_size
from qconvert.run.folder.journal import (
    Journal,
    JournalContent,
    first_difference,
    lines_of,
    read_journal,
    refuse_other_plan,
)
from qconvert.run.folder.leases import (
    SHARDS,
    FolderLock,
    ShardJournal,
    at_work,
    journals_in,
    merged,
    refuse_at_work,
    refuse_other_plans,
    take_lock,
)
from qconvert.run.work.file_layout import OutFile, ShardLayout
from qconvert.run.work.files import Files, existing_parent
from qconvert.run.work.upload_target import SentFile

JOURNAL = "journal.jsonl"
STAGE = "stage"
# What a calibration remembers between its layers.
CALIBRATION = "calibration"
LOCK = "lock"
_COPY = 4 << 20
_LINES = 4096


def check_apart(out: Path, checkpoint: Checkpoint) -> None:
    """Raise OutputError where the output would lie in, on or around its own source."""
    # A GGUF file is a source by itself, whatever lies beside it.
    files = (s.path if s.path.suffix == ".gguf" else s.path.parent for s in checkpoint.shards)
    for folder in dict.fromkeys([checkpoint.root, *files]):
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
            f"{out}: the result needs {format_size(needed)} more ({needed} bytes), the disk has "
            f"{format_size(free)} free ({free}); nothing was written. Free some space, or choose "
            "another disk"
        )


class Workspace:
    """A claimed output folder. `finished` says that it holds this very result, whole or damaged, and
    that nobody is at work there; `remembered` is what an interrupted run of the same plan left behind;
    `in_sight` that of it all is published, or nothing withdrawn yet. `journals` are those of shards that
    worked there, if no other journal is: what they remember is then one run's. `notice` is given a line
    where looking at them takes time.

    `identity` is what the journal's first line and the manifest say of the run, `manifest` the bytes
    that the manifest has in the end, `tensors` how many are read or written. Raises OutputError for a
    folder of somebody else, and for a work folder whose parts are symbolic links: it may have come with
    a folder that is anyone's.
    """

    # Whether others may work on the same plan in the folder.
    _shared = False
    # How long shards of other machines are observed, None for as long as it takes to be sure.
    _observing: float | None = None
    # Whether all files are made when a run begins, at full size.
    _reserves = True

    def __init__(
        self,
        out: Path,
        identity: Mapping[str, Any],
        manifest: bytes,
        tensors: int,
        files: Files,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self.out = out
        self.work = out / WORK_DIR
        self.stage = self.work / STAGE
        self.finished = False
        self.in_sight = False
        self.remembered: JournalContent | None = None
        self.journals: tuple[ShardJournal, ...] = ()
        self.notice: Callable[[str], None] = notice or (lambda _: None)
        self._lock: FolderLock | None = None
        self._files = files
        self._identity = identity
        self._manifest = manifest
        self._tensors = tensors
        if out.exists() and not out.is_dir():
            raise OutputError(f"{out} is not a folder")
        check_own(out)
        self._open()

    def _open(self) -> None:
        """Learn what is there, and take the lock unless it is a finished result. Raises OutputError
        where it cannot be ours."""
        if not self.work.is_dir():
            self._refuse_foreign()
            if self.finished:
                return
        self.claim()
        if self.finished:  # and nobody had tidied up
            self.tidy()

    def claim(self) -> None:
        """Make the work folder, lock it, and learn what an earlier run left. Raises OutputError where
        another run holds it, or the folder is not ours to go on with."""
        while True:
            claimed = self.work.is_dir()
            _make_safely(self.work.absolute(), self._files)
            lock = take_lock(self.work / LOCK, shared=self._shared)
            if lock is not None:
                break  # else whoever held it has finished, and removed the folder
        self._lock = lock
        try:
            check_own(self.out)
            self._files.restrict(self.work, 0o700)
            self._look_around(claimed)
        except BaseException:
            self.release()
            raise

    def _look_around(self, claimed: bool) -> None:
        """Learn what an earlier run left. Raises OutputError where it is not ours to go on with."""
        self.finished = False
        found = read_journal(self.work / JOURNAL) or self._of_shards()
        if found is not None:
            refuse_other_plan(self.out, found.header, self._identity)
            staged = _staged(self.stage, found.names)
            self.in_sight = bool(found.names) and not staged and self._is_ours()
        if found is None or not found.names:
            try:
                self._refuse_foreign()
            except OutputError:
                if found is None and not claimed:
                    with suppress(
                        OSError, OutputError
                    ):  # the refusal is what the user must hear of
                        _discard(self.work, self._files)
                raise
        self.remembered = found

    def _of_shards(self) -> JournalContent | None:
        """Return what shards did, if any were here. Raises OutputError where one is at work, or for
        another plan."""
        self.journals = tuple(journals_in(self.work))
        if not self.journals:
            return None
        refuse_other_plans(self.out, self.journals, self._identity)
        busy = at_work(self.journals, self.notice, self._observing)
        refuse_at_work(self.out, busy, "a run without --shard cannot begin")
        return merged(self.journals, self._identity)

    def _refuse_foreign(self) -> None:
        """Raise OutputError if OUT holds anything but our work; note it if that is this result."""
        entries = sorted(set(os.listdir(self.out)) - {WORK_DIR}) if self.out.exists() else []
        if not entries:
            return
        if self._is_ours():
            self.finished = True
            return
        made = identity_in(self.out / MANIFEST)
        if made is not None:
            known = (
                first_difference(made, lasting(self._identity)) if isinstance(made, dict) else None
            )
            raise OutputError(
                f"{self.out} already holds the finished result of another plan"
                f"{f' ({known})' if known else ''}; choose another folder"
            )
        raise OutputError(
            f"{self.out} is not empty ({entries[0]}) and is not a folder of qconvert's; choose an "
            "empty or new folder"
        )

    def _is_ours(self) -> bool:
        """Return whether OUT holds this result, if not whole: its manifest says so, or the receipt has
        the hash of the manifest that it must have."""
        if identity_in(self.out / MANIFEST) == lasting(self._identity):
            return True
        try:
            found = read_receipt(self.out / RECEIPT, self._tensors, error=OutputError)
        except OutputError:
            return False
        wanted = {"file": MANIFEST, "nbytes": len(self._manifest), "xxh3": digest(self._manifest)}
        return found is not None and any(wanted.items() <= line.items() for line in found.lines)

    @property
    def lock_fd(self) -> int:
        assert self._lock is not None, "a finished folder is not locked"
        return self._lock.fd

    @property
    def away(self) -> Mapping[str, SentFile]:
        """Files of the result that are elsewhere, and not here any more."""
        return {}

    @property
    def withdrawals(self) -> int:
        """Return how often the result was taken out of sight again."""
        return self.remembered.withdrawals if self.remembered is not None else 0

    def find(self, name: str) -> Path:
        """Return where a file is: staged, or in sight."""
        staged = self.stage / name
        return staged if is_there(staged) else self.out / name

    def begin(self, layout: ShardLayout, run: str) -> Journal:
        """Create every shard at full size with its header, then the journal. Once the journal's
        first line can be read, the shards are known to be there. `run` names this beginning: the same
        plan may be begun again, with another folder beside it."""
        for left in (self.stage, *(self.work / one for one in (CALIBRATION, SHARDS))):
            if left.exists():
                self._files.remove_tree(left)
        self._files.make_folder(self.stage)
        for file in layout.files if self._reserves else ():
            self._place(file)
        self._files.sync_folder(self.stage)
        path = self.work / JOURNAL
        self._remove_if_there(path)
        self._files.create(path, 0)
        journal = Journal(path, self._files, 0)
        journal.append([{**self._identity, "run": run}])
        self._files.sync_folder(self.work)
        return journal

    def begin_repair(
        self,
        names: Sequence[str],
        edited: Iterable[str],
        units: Mapping[int, Sequence[str]],
        run: str,
    ) -> Journal:
        """A journal for a finished folder that is to be repaired: it knows the units whose bytes are
        vouched for, and that these names go back out of sight. It appears whole or not at all; nothing
        has been moved yet when this returns."""
        withdraw = {"withdraw": list(names), "edited": sorted(edited)}
        finished = ({"unit": n, "records": list(r), "remarks": []} for n, r in units.items())
        data = lines_of([{**self._identity, "run": run}, *finished, withdraw])
        new, path = self.work / f"{JOURNAL}.new", self.work / JOURNAL
        for left in (self.stage, self.work / CALIBRATION):
            if left.exists():
                self._files.remove_tree(left)
        self._files.make_folder(self.stage)
        self._remove_if_there(new)
        self.write_file(new, memoryview(data))
        self._files.rename(new, path)
        self._files.sync_folder(self.work)
        self.finished = False
        self.remembered = read_journal(path)
        assert self.remembered is not None
        return Journal(path, self._files, self.remembered.length)

    def withdraw_again(self, journal: Journal) -> None:
        """Note that what was published, or about to be, goes back out of sight."""
        found = self.remembered
        assert found is not None
        names = list(found.names)
        journal.append([{"withdraw": names, "edited": sorted(found.edited)}])
        found.withdrawn, found.publish, found.withdrawals = names, None, found.withdrawals + 1

    def move_back(self) -> None:
        """Rename what was published back into the work folder, what makes the folder a checkpoint
        first. What is there already, or nowhere, is passed over."""
        assert self.remembered is not None
        names = [n for n in self.remembered.withdrawn[::-1] if is_there(self.out / n)]
        for number, name in enumerate(names):
            check_way(self.out, name)
            if not is_there(self.stage / name):
                self._files.rename(self.out / name, self._room_for(name))
            else:  # made anew since
                self._files.remove(self.out / name)
            if not number:
                self._files.sync_folder(self.out)
        if names:
            for folder in (*_folders(self.out, names), *_folders(self.stage, names)):
                self._files.sync_folder(folder)

    def make_again(self, file: OutFile) -> None:
        """A staged shard anew, with its header and no data."""
        self._remove_if_there(self.stage / file.name)
        self._place(file)
        self._files.sync_folder(self.stage)

    def _place(self, file: OutFile) -> None:
        path = self.stage / file.name
        if file.link is not None:
            self._files.link(file.link.resolve(), path)
        else:
            self.write_file(path, memoryview(file.header), file.size)

    def _remove_if_there(self, path: Path) -> None:
        """Return what a path names is gone afterwards: writing into it could reach what it is a link
        to."""
        if is_there(path):
            if path.is_dir() and not path.is_symlink():
                self._files.remove_tree(path)
            else:
                self._files.remove(path)

    def _room_for(self, name: str) -> Path:
        """Return where a file is staged: nothing has that name yet, and its folder is there."""
        path = self.stage / name
        check_way(self.stage, name)
        self._remove_if_there(path)
        if path.parent != self.stage:
            self._files.make_folder(path.parent)
        return path

    def resume(self) -> Journal:
        """The journal of an interrupted run, its torn end cut off."""
        assert self.remembered is not None
        if self.journals:
            self._adopt(self.remembered)
        if is_there(self.work / SHARDS):
            self._files.remove_tree(self.work / SHARDS)
        return Journal(self.work / JOURNAL, self._files, self.remembered.length)

    def _adopt(self, found: JournalContent) -> None:
        """One journal of what shards did, which appears whole. Raises OutputError where another shard
        began meanwhile."""
        remarks = list(found.remarks)
        lines: list[dict[str, Any]] = [{**found.header, "seen": found.seen}]
        for number, records in found.units.items():
            lines.append({"unit": number, "records": list(records), "remarks": remarks})
            remarks = []
        data = lines_of(lines)
        new, path = self.work / f"{JOURNAL}.new", self.work / JOURNAL
        self._remove_if_there(new)
        self.write_file(new, memoryview(data))
        self._files.rename(new, path)
        self._files.sync_folder(self.work)
        known = {journal.path for journal in self.journals}
        others = journals_in(self.work, known)
        if others:
            self._files.remove(path)
            refuse_at_work(self.out, others, "its work cannot be finished")
        found.length, self.journals = len(data), ()

    def write_file(self, path: Path, data: memoryview, size: int | None = None) -> None:
        """Create a file with `data` at its start, `size` bytes in all, and sync it."""
        self._files.create(path, data.nbytes if size is None else size)
        fd = self._files.open(path)
        try:
            self._files.write(fd, path, data, 0)
            self._files.sync(fd, path)
        finally:
            self._files.close(fd)

    def stage_file(self, name: str, data: bytes) -> None:
        """Stage a small file."""
        self.write_file(self._room_for(name), memoryview(data))

    def stage_lines(self, name: str, lines: Sequence[str]) -> None:
        """Stage a file of ASCII lines and sync it. Whole, a large model's receipt would be a
        sizeable piece of memory."""
        path = self._room_for(name)
        self._files.create(path, sum(len(line) + 1 for line in lines))
        fd = self._files.open(path)
        try:
            at = 0
            for first in range(0, len(lines), _LINES):
                text = "\n".join([*lines[first : first + _LINES], ""]).encode()
                self._files.write(fd, path, memoryview(text), at)
                at += len(text)
            self._files.sync(fd, path)
        finally:
            self._files.close(fd)

    def copy_file(self, source: Path, name: str) -> str:
        """Stage a side file byte for byte, with no more permissions than it has there. Returns xxh3-128
        of what was copied. Raises CheckpointError where it cannot be read, OutputError where it cannot
        be written."""
        target = self._room_for(name)
        copied = xxhash.xxh3_128()
        try:
            # Links were resolved: what is one now was put there since.
            fd = open_regular(source, follow=False)
        except FileNotFoundError:
            raise CheckpointError(f"{source}: is gone since the conversion began") from None
        with os.fdopen(fd, "rb") as stream:
            status = os.fstat(stream.fileno())
            self._files.create(target, status.st_size)
            out = self._files.open(target)
            try:
                at = 0
                while chunk := _read(stream, source):
                    self._files.write(out, target, memoryview(chunk), at)
                    copied.update(chunk)
                    at += len(chunk)
                if at < status.st_size:
                    self._files.truncate(out, target, at)
                self._files.sync(out, target)
            finally:
                self._files.close(out)
        self._files.restrict(target, _without_execution(status.st_mode))
        return copied.hexdigest()

    def restrict(self, names: Iterable[str], mode: int) -> None:
        """Take permissions away from staged files, as far as their source has none."""
        for name in names:
            self._files.restrict(self.stage / name, _without_execution(mode))

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
        check_way(self.out, name)
        if is_there(staged):
            if final.parent != self.out:
                self._files.make_folder(final.parent)
            self._files.rename(staged, final)
        elif not is_there(final):
            raise OutputError(
                f"{final}: was staged and is missing now; run qconvert clean {self.out}"
            )

    def forget(self) -> None:
        """Drop what an interrupted run left, for good: its journal must not speak of files that are
        about to be made anew. What of it was published already is taken back."""
        found, self.remembered = self.remembered, None
        if found is None:
            return
        if found.names:
            _take_back(self.out, found.names, _staged(self.stage, found.names), self._files)
        for left in (self.work / JOURNAL, self.work / SHARDS):
            self._remove_if_there(left)
        self.journals = ()
        self._files.sync_folder(self.work)

    def withdraw(self) -> None:
        """Give up a folder that a refusal met right after it was claimed: nothing of ours stays. Work
        that was begun is left to be resumed."""
        begun = any(is_there(self.work / name) for name in (JOURNAL, STAGE, SHARDS))
        if self._lock is not None and not begun:
            with suppress(OSError, OutputError):  # the refusal is what the user must hear of
                _discard(self.work, self._files)
        self.release()

    def mark_finished(self) -> None:
        """Take a folder whose files are all in sight for a finished one."""
        self.tidy()
        self.finished, self.in_sight, self.remembered = True, False, None

    def tidy(self) -> None:
        """Remove the work folder of a finished conversion and give up the lock."""
        _discard(self.work, self._files)
        self.release()

    def release(self) -> None:
        """Give up the lock, where it is held, leaving unfinished work to be resumed."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()


def is_there(path: Path) -> bool:
    """Return whether a name stands for anything, a broken link included."""
    return os.path.lexists(path)


def check_own(out: Path) -> None:
    """Raise OutputError where the work folder or a part of it is not a folder or file of its own: what
    is done there would be done to whatever a symbolic link leads to."""
    work = out / WORK_DIR
    parts = {
        work: S_ISDIR, work / STAGE: S_ISDIR, work / CALIBRATION: S_ISDIR,
        work / JOURNAL: S_ISREG, work / LOCK: S_ISREG, work / SHARDS: S_ISDIR,
    }  # fmt: skip
    for path, is_right in parts.items():
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise OutputError(f"{path}: cannot be read: {error.strerror or error}") from error
        if not is_right(mode):
            kind = "a folder" if is_right is S_ISDIR else "a regular file"
            raise OutputError(
                f"{path}: expected {kind}, found something else (a symbolic link?); remove it, or "
                "choose another folder"
            )


def check_way(root: Path, name: str) -> None:
    """Raise OutputError where a folder between `root` and a name below it is a symbolic link."""
    for parent in Path(name).parents:
        if parent.parts and (root / parent).is_symlink():
            raise OutputError(
                f"{root / parent}: expected a folder, found a symbolic link, and {name!r} is written "
                "below it; remove the link"
            )


def _read(stream: IO[bytes], source: Path) -> bytes:
    with reading(source):
        return stream.read(_COPY)


def _without_execution(mode: int) -> int:
    """Permissions a copy may have: those to read and write, and whoever owns it has both."""
    return (mode & 0o666) | 0o600


def _staged(stage: Path, names: Sequence[str]) -> set[str]:
    return {name for name in names if is_there(stage / name)}


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
    if is_there(work / JOURNAL):
        files.remove(work / JOURNAL)
        files.sync_folder(work)
    if is_there(work / SHARDS):
        files.remove_tree(work / SHARDS)
        files.sync_folder(work)
    files.remove_tree(work)
    files.sync_folder(work.parent)


def identity_in(manifest: Path) -> Any:
    """The identity a manifest holds; None where there is none, or it is not one of ours."""
    try:
        found = json.loads(read_regular(manifest, follow=False, error=OutputError))
    except (FileNotFoundError, OutputError, ValueError, RecursionError):
        return None
    return found.get("identity") if isinstance(found, dict) else None


# Of a run's identity: what files are like on this machine, and where they were read.
_HERE = ("stat", "seen", "stores")


def lasting(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a run's identity the manifest keeps: all but what this machine's files are like."""
    return {key: value for key, value in identity.items() if key not in _HERE}


def _folders(root: Path, names: Sequence[str]) -> list[Path]:
    """`root` and every folder below it that one of the names lies in, deepest first."""
    found = {root}
    for name in names:
        found.update(root / parent for parent in Path(name).parents)
    return sorted(found, key=lambda folder: -len(folder.parts))


def clean(out: Path, files: Files) -> bool:
    """Drop unfinished work in OUT, and in the folders of pipeline stages in it; published parts of it
    too. False if there was none. Nothing is removed through a symbolic link.

    Raises OutputError if another run holds it, or where its work folder is not as qconvert makes it.
    """
    stages = [folder for folder in sorted(out.glob("stage-*-of-*")) if not folder.is_symlink()]
    cleaned = [_clean(folder, files) for folder in (out, *stages)]
    return any(cleaned)


def _clean(out: Path, files: Files) -> bool:
    work = out / WORK_DIR
    check_own(out)
    if not work.is_dir():
        return False
    lock = take_lock(work / LOCK)
    if lock is None:
        return False
    try:
        refuse_at_work(out, at_work(journals_in(work), lambda _: None), "it cannot be cleaned")
        found = read_journal(work / JOURNAL)
        names = found.names if found is not None else ()
        staged = _staged(work / STAGE, names)
        if staged:  # publishing was interrupted: take back what had already been moved
            _take_back(out, names, staged, files)
        _discard(work, files)
    finally:
        lock.close()
    return True


def _take_back(out: Path, names: Sequence[str], staged: Set[str], files: Files) -> None:
    """Remove those of the names that had been published, and the folders made for any of them."""
    for name in names:
        check_way(out, name)
    for name in names:
        if name not in staged and is_there(out / name):
            files.remove(out / name)
    for folder in _folders(out, names):
        if folder != out and folder.is_dir() and not os.listdir(folder):
            files.remove(folder)
    files.sync_folder(out)
