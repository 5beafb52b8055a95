"""Journals of shards, which are their leases: who is at work in a folder that many machines share.

Each start of a shard makes a journal of its own, `shards/2-of-8.1.jsonl`, with its whole first line at
once and only if there is none of that name (link(2), atomic on NFS): no two processes write to one.
While the shard works its journal grows, by a line at least every BEAT_SECONDS. A shard whose last
line says that it ended is not at work; one of this machine is asked for by its process; of another
machine, it is observed for STALE_SECONDS by this machine's clock alone whether its journal grows.
Clocks that differ, and flock that does not hold, do not matter.

A process that was taken for dead and is not does no harm: it writes the same bytes to the same
places, and its journal stays true. It stops when it finds that the shard was started again."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG
from threading import Event, Lock, Thread
from typing import Any

from qconvert.core.errors import OutputError, QConvertError, RunError
from qconvert.core.shown import count
from qconvert.run.folder.journal import (
    Journal,
    JournalContent,
    lines_of,
    read_journal,
    refuse_other_plan,
)
from qconvert.run.work.division import MOST_SHARDS, Shard
from qconvert.run.work.files import Files

# One run at a time in an output folder.

# Workers of a killed run die with it, but not in the same instant: on a busy machine in seconds.
_TRIES, _TRIES_OF_THE_DEAD, _PAUSE_SECONDS = 20, 300, 0.1


def _patiently(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    for attempt in range(1, _TRIES_OF_THE_DEAD + 1):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt >= _TRIES and not _names_the_dead(fd):
                break
            time.sleep(_PAUSE_SECONDS)
        else:
            return True
    return False


def _names_the_dead(fd: int) -> bool:
    """Return whether the process that took a lock is no more, and its workers alone hold it."""
    name = os.pread(fd, 32, 0)
    if not name.isdigit() or not 0 < int(name) < 1 << 31:
        return False
    try:
        os.kill(int(name), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


class FolderLock:
    """An flock on a file of the work folder. Workers inherit the descriptor, so that the lock
    outlives a killed parent for as long as any worker may still write."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)


def take_lock(path: Path, *, shared: bool = False) -> FolderLock | None:
    """Lock the file `path`; `shared`, with others that take it so. None if its folder is gone, or went
    while we waited: the run that held it has finished and tidied up. Raises OutputError if another run
    holds it, and where it cannot be written."""
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o666)
    except FileNotFoundError:
        return None
    except OSError as error:
        if path.is_symlink():
            raise OutputError(
                f"{path}: expected a regular file, found a symbolic link; remove it"
            ) from error
        raise OutputError(f"{path}: cannot lock: {error.strerror or error}") from error
    status = os.fstat(fd)
    if not S_ISREG(status.st_mode) or status.st_nlink > 1:
        # It is written to: what has another name may be anyone's.
        os.close(fd)
        raise OutputError(
            f"{path}: expected a regular file with one name; remove it if no run uses it"
        )
    if not _patiently(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
        raise _held(fd, path)
    if not _is(fd, path):
        os.close(fd)
        return None
    if shared:
        return FolderLock(fd)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    except OSError as error:
        os.close(fd)
        raise OutputError(
            f"{path}: cannot write: {error.strerror or error}; free some space and run the same "
            "command again"
        ) from error
    return FolderLock(fd)


def _held(fd: int, path: Path) -> OutputError:
    """The refusal of a lock that another run holds, by the process it names. Closes `fd`."""
    holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
    os.close(fd)
    return OutputError(
        f"{path.parent.parent}: another qconvert (process {holder or 'of a shard'}) is "
        "running there; wait for it, or choose another folder"
    )


def refuse_locked(path: Path) -> None:
    """Raise OutputError if another run holds the lock `path`. Leaves the lock and its file as they
    are."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(f"{path}: cannot lock: {error.strerror or error}") from error
    if not _patiently(fd, fcntl.LOCK_SH):
        raise _held(fd, path)
    os.close(fd)


def _is(fd: int, path: Path) -> bool:
    """Return whether the file opened as `fd` is still the one that `path` names."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


SHARDS = "shards"
BEAT_SECONDS = 5.0
# NFS clients may see another's write only when they open the file again, as is done here; a server may
# take some seconds to fail over.
STALE_SECONDS = 40.0
_POLL_SECONDS = 0.5
_NAME = re.compile(r"([0-9]{1,5})-of-([0-9]{1,5})\.([0-9]{1,6})\.jsonl")
_MOST_STARTS = 999_999  # what names have digits for
# Differ on machines that work on one folder.
_OF_MACHINE = ("stat",)


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a machine. `machine` is the same for processes that see one another's numbers, and
    empty where that cannot be known; `began` tells processes of one number apart."""

    host: str
    machine: str
    pid: int
    began: str


@dataclass(frozen=True, slots=True)
class ShardJournal:
    """A journal read back: which shard's, which start of it, and by whom."""

    path: Path
    shard: Shard
    start: int
    by: Process
    command: tuple[str, ...]
    folder: str
    remembered: JournalContent

    @property
    def shares(self) -> Sequence[Sequence[int]]:
        """Units and bytes of each shard, then those that are left to `finish`, as its header says."""
        found = self.remembered.header.get("shares")
        sound = isinstance(found, list) and len(found) == self.shard.count + 1
        pairs = found if sound and isinstance(found, list) else []
        if not pairs or not all(_is_pair(pair) for pair in pairs):
            raise OutputError(f"{self.path}: its first line was not written by qconvert")
        return pairs

    @property
    def label(self) -> str:
        return f"shard {self.shard} (process {self.by.pid} on {self.by.host})"


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value)


def this_process() -> Process:
    """This process, and the machine it sees processes of: one boot, one namespace of numbers."""
    import socket

    host = socket.gethostname()
    pid = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        machine = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        machine = ""
    return Process(host, machine, pid, _state_of(pid)[1])


def _state_of(pid: int) -> tuple[str, str]:
    """State and start of a process, as /proc tells; empty where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return "", ""
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")


def journals_in(work: Path, known: Collection[Path] = ()) -> list[ShardJournal]:
    """All journals of shards but the `known` ones, by shard and start. Raises OutputError for one that
    qconvert did not write, and where the folder of them is a link."""
    folder = work / SHARDS
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise OutputError(f"{folder}: cannot be read: {error.strerror or error}") from error
    if folder.is_symlink():
        raise OutputError(f"{folder}: expected a folder, found a symbolic link; remove it")
    found = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or folder / name in known:
            continue
        index, count, start = map(int, match.groups())
        remembered = read_journal(folder / name)
        if remembered is None:  # it appears with its first line
            raise OutputError(f"{folder / name}: its first line is damaged; remove the file")
        if not index < count <= MOST_SHARDS:
            raise OutputError(f"{folder / name}: there is no such shard; remove the file")
        by, command, at = _maker(folder / name, remembered.header)
        found.append(
            ShardJournal(folder / name, Shard(index, count), start, by, command, at, remembered)
        )
    return sorted(found, key=lambda journal: (journal.shard.count, journal.shard, journal.start))


def _maker(path: Path, header: Mapping[str, Any]) -> tuple[Process, tuple[str, ...], str]:
    by, command, at = header.get("by"), header.get("command", []), header.get("folder", "")
    fields = {"host": str, "machine": str, "pid": int, "began": str}
    sound = isinstance(by, dict) and all(type(by.get(key)) is kind for key, kind in fields.items())
    sound = sound and isinstance(command, list) and all(isinstance(word, str) for word in command)
    if not sound or not isinstance(at, str):
        raise OutputError(f"{path}: its first line was not written by qconvert; remove the file")
    assert isinstance(by, dict)
    return Process(by["host"], by["machine"], by["pid"], by["began"]), tuple(command), at


def refuse_other_plans(
    out: Path, journals: Sequence[ShardJournal], identity: Mapping[str, Any]
) -> None:
    """Raise OutputError where a shard works on another plan, with another version or source. The
    times of the source's files are compared on one machine alone: others may have copies of their
    own."""
    machine = this_process().machine
    for journal in journals:
        then = dict(journal.remembered.header)
        if journal.by.machine != machine:
            then.update({key: identity.get(key) for key in _OF_MACHINE})
        refuse_other_plan(out, then, identity)


def merged(journals: Sequence[ShardJournal], identity: Mapping[str, Any]) -> JournalContent:
    """Return what all shards have done, as one journal. `seen` is how the source is now if any shard saw
    it so."""
    newest = max(journals, key=lambda journal: journal.path.stat().st_mtime_ns)
    by = {"command": list(newest.command), "folder": newest.folder}
    found = JournalContent({**identity, "run": SHARDS, **by})
    known = []
    last: dict[int, int] = {}
    for journal in journals:
        found.units.update(journal.remembered.units)
        last |= {number: at for at, number in enumerate(reversed(journal.remembered.units))}
        for number in journal.remembered.forgotten - journal.remembered.units.keys():
            found.units.pop(number, None)
        found.remarks.update(journal.remembered.remarks)
        known.append(journal.remembered.seen)
    now = identity.get("seen")
    found.seen = now if now in known or not known else known[-1]
    # What each shard finished last comes last: that is what is looked at again.
    found.units = {n: found.units[n] for n in sorted(found.units, key=lambda n: -last[n])}
    return found


# --- who is at work -------------------------------------------------------------------------------


def at_work(
    journals: Sequence[ShardJournal],
    notice: Callable[[str], None],
    seconds: float | None = None,
) -> list[ShardJournal]:
    """Those of the journals whose shards are at work. Shards of other machines are observed; `notice` is
    given a line to show before that."""
    here, unsure = [], []
    for journal in journals:
        state = state_of(journal)
        if state == "running":
            here.append(journal)
        elif state == "unknown":
            unsure.append(journal)
    if here or not unsure:
        return here
    wait = STALE_SECONDS if seconds is None else seconds
    notice(f"observing {unsure[0].label} for {wait:.0f} s: is it at work?")
    sizes = {journal.path: size_of(journal.path) for journal in unsure}
    until = time.monotonic() + wait
    while time.monotonic() < until:
        time.sleep(min(_POLL_SECONDS, wait))
        grown = [journal for journal in unsure if size_of(journal.path) != sizes[journal.path]]
        # One that ended meanwhile has grown, too.
        ended = {path for path in map(_ended, grown) if path is not None}
        unsure = [journal for journal in unsure if journal.path not in ended]
        if here := [journal for journal in grown if journal.path not in ended]:
            return here
        if not unsure:
            return []
    return []


def state_of(journal: ShardJournal) -> str:
    """`ended` as its last line says, `running` or `stopped` for a process of this machine, else
    `unknown`."""
    if journal.remembered.ended is not None:
        return "ended"
    me = this_process()
    if not me.machine or journal.by.machine != me.machine:
        return "unknown"
    state, began = _state_of(journal.by.pid)
    return "running" if began == journal.by.began and state not in ("", "Z", "X") else "stopped"


def _ended(journal: ShardJournal) -> Path | None:
    found = read_journal(journal.path)
    return journal.path if found is not None and found.ended is not None else None


def size_of(path: Path) -> int:
    """The size of a file as the server has it: opening asks there, on NFS."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def refuse_at_work(out: Path, busy: Sequence[ShardJournal], what: str) -> None:
    """Raise OutputError naming who is at work."""
    if busy:
        raise OutputError(
            f"{out}: {busy[0].label} is at work there, so {what}; wait for it, or stop it"
        )


# --- one's own ------------------------------------------------------------------------------------


class Lease(Journal):
    """The journal of this process's shard, which grows for as long as the process works."""

    def __init__(self, path: Path, files: Files, length: int, next_start: Path) -> None:
        super().__init__(path, files, length)
        self._next = next_start
        self._writing = Lock()
        self._stop = Event()
        self._quiet = True
        self._failed: QConvertError | None = None
        self._beats = Thread(target=self._beat, daemon=True)
        self._beats.start()

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """As Journal's. Raises RunError where the shard was started again meanwhile."""
        if self._failed is not None:
            raise self._failed
        if os.path.lexists(self._next):
            raise RunError(
                f"{self._path}: this shard was started again by another process, since this one gave no "
                "sign of life; that one goes on"
            )
        with self._writing:
            super().append(records)
            self._quiet = False

    def end(self, how: str) -> None:
        """Say that this process works no more, and close the journal."""
        self._stop.set()
        self._beats.join()
        with suppress(QConvertError):  # what ended the run is what the user must hear of
            super().append([{"ended": how}])
        self.close()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with self._writing:
                quiet, self._quiet = self._quiet, True
                try:
                    if quiet:
                        super().append([{"beat": 1}])
                except QConvertError as error:
                    self._failed = error
                    return


def begin_lease(
    work: Path,
    shard: Shard,
    start: int,
    header: Mapping[str, Any],
    files: Files,
) -> Lease | None:
    """Make the journal of a start of a shard; None where there is one of that name already."""
    folder = work / SHARDS
    files.make_folder(folder)
    path = folder / f"{shard.index}-of-{shard.count}.{start}.jsonl"
    if start > _MOST_STARTS:
        raise OutputError(
            f"{folder}: shard {shard} was started {count(_MOST_STARTS, 'time')}, as its journals are "
            "named; run the same command without --shard, or remove the last one"
        )
    first = lines_of([{**header, "by": asdict(this_process())}])
    if not create_atomically(path, unfinished(work, shard), first, len(first), files):
        return None
    files.sync_folder(folder)
    files.sync_folder(work)
    following = folder / f"{shard.index}-of-{shard.count}.{start + 1}.jsonl"
    return Lease(path, files, len(first), following)


def unfinished(work: Path, shard: Shard) -> Path:
    """A name that nobody else uses, for a file that a shard makes."""
    return work / SHARDS / f"{shard.index}-of-{shard.count}.{os.urandom(8).hex()}.new"


def remove_unfinished(work: Path, shard: Shard, files: Files) -> None:
    """Remove files that an earlier start of the shard left under such names."""
    for path in (work / SHARDS).glob(f"{shard.index}-of-{shard.count}.*.new"):
        files.remove(path)


def create_atomically(path: Path, new: Path, data: bytes, size: int, files: Files) -> bool:
    """A file with `data` at its start and `size` bytes in all appears whole, once: False where something
    has that name already. `new` is its name until then."""
    files.create(new, size)
    try:
        fd = files.open(new)
        try:
            files.write(fd, new, memoryview(data), 0)
            files.sync(fd, new)
        finally:
            files.close(fd)
        return files.link_once(new, path)
    finally:
        files.remove(new)
