"""Every write to disk goes through here, so that tests can kill the process, or cut the power,
between any two of them.

What survives a power cut: file data after `sync`, names after `sync_folder` of their folder. The
rest of this package assumes nothing more.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qconvert.core.errors import OutputError
from qconvert.core.own_process import make_folder

_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
PARTIAL = ".partial"  # the end of a file's name while it is written
_TMPFS = 0x01021994  # linux/magic.h
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
# What is written to must be a file of our own: a symlink under its name would lead anywhere, and
# opening a pipe would wait.
_OWN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def _naming(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = ""
        if error.errno == errno.ENOSPC:
            hint = "; free some space and run the same command again: finished work is kept"
        raise OutputError(f"{path}: cannot {what}: {error.strerror or error}{hint}") from error


def existing_parent(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists: the disk it is, or will be, on."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def can_link(path: Path, folder: Path) -> bool:
    """Return whether a file can get a second name in a folder: tried, because another disk, a bind
    mount, a file of another owner or a full link count all forbid it. Leaves nothing behind."""
    probe = folder / f".qconvert-link-{os.getpid()}"
    try:
        os.link(path.resolve(), probe)
    except OSError:
        return False
    probe.unlink()
    return True


class Files:
    """The operating system's file calls, with errors that name the file."""

    # Whether writes may go on in a thread beside the caller's. Tests that stop a process
    # at a certain operation say no: those must come in the same order every time.
    beside = True

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents; one that exists is fine."""
        with _naming(path, "create the folder"):
            make_folder(path)

    def create(self, path: Path, size: int) -> None:
        """Create a file of exactly `size` bytes with its disk blocks reserved, so that a full disk
        shows now. File systems that cannot reserve get a sparse file of that size."""
        with _naming(path, f"reserve {size} bytes"):
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC | _OWN, 0o666)
            try:
                if size and not reserve(fd, size):
                    os.ftruncate(fd, size)
            finally:
                os.close(fd)

    def open(self, path: Path) -> int:
        """A descriptor for reading and writing in place."""
        with _naming(path, "open"):
            return os.open(path, os.O_RDWR | _OWN)

    def write(self, fd: int, path: Path, data: memoryview, offset: int) -> None:
        """Write all of `data` at byte `offset`."""
        with _naming(path, "write"):
            while data.nbytes:
                done = os.pwrite(fd, data, offset)
                data, offset = data[done:], offset + done

    def open_direct(self, path: Path) -> int:
        """A descriptor that writes past the page cache; an ordinary one where there is no such
        thing (tmpfs, some network file systems)."""
        if hasattr(os, "O_DIRECT"):
            try:
                return os.open(path, os.O_WRONLY | os.O_DIRECT | _OWN)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise OutputError(f"{path}: cannot open: {error.strerror}") from error
        return self.open(path)

    def write_direct(self, fd: int, path: Path, data: memoryview, offset: int) -> int:
        """Write past the page cache; memory, offset and size must be whole blocks. Returns how many
        bytes were written: 0 where the file system wants no such thing."""
        with _naming(path, "write"):
            try:
                return os.pwrite(fd, data, offset)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
        return 0

    def append(self, fd: int, path: Path, data: bytes) -> None:
        """Write all of `data` at the end."""
        with _naming(path, "write"):
            rest = memoryview(data)
            os.lseek(fd, 0, os.SEEK_END)
            while rest.nbytes:
                rest = rest[os.write(fd, rest) :]

    def truncate(self, fd: int, path: Path, size: int) -> None:
        with _naming(path, "shorten"):
            os.ftruncate(fd, size)

    def sync(self, fd: int, path: Path) -> None:
        """Make the file's data and size survive a power cut."""
        with _naming(path, "sync"):
            os.fdatasync(fd)

    def sync_folder(self, path: Path) -> None:
        """Make names created, renamed or removed in a folder survive a power cut."""
        with _naming(path, "sync the folder"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            except PermissionError:  # a parent that may be entered and not listed
                os.sync()
                return
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        with _naming(old, f"rename to {new}"):
            old.rename(new)

    def restrict(self, path: Path, mode: int) -> None:
        """Take permissions away: those that are not in `mode`. None are given."""
        with _naming(path, "set permissions of"):
            now = path.stat(follow_symlinks=False).st_mode & 0o777
            if now & mode != now:
                path.chmod(now & mode)

    def remove(self, path: Path) -> None:
        """Remove a file, a symbolic link or an empty folder."""
        with _naming(path, "remove"):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name. Raises OutputError where the system forbids it."""
        with _naming(old, f"hard-link to {new} (--copy would copy it)"):
            os.link(old, new)

    def link_once(self, old: Path, new: Path) -> bool:
        """Give a file of one name a second one; False where something has that name already."""
        with _naming(old, f"hard-link to {new}"):
            try:
                os.link(old, new)
            except FileExistsError:
                # NFS: an answer was lost, and the second try met the first one's link.
                return old.stat().st_nlink == 2
        return True

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and all in it. Symbolic links are removed, never gone through."""
        with _naming(path, "remove"):
            shutil.rmtree(path)

    def close(self, fd: int) -> None:
        os.close(fd)


def _in_memory(system: ctypes.CDLL, fd: int) -> bool:
    """Return whether a file is on tmpfs (statfs(2): the first word says what a file system is)."""
    found = (ctypes.c_long * 64)()
    return system.fstatfs(fd, found) == 0 and found[0] == _TMPFS


def reserve(fd: int, size: int) -> bool:
    """Reserve blocks, `size` bytes of them; False where the file system cannot, or where its blocks
    are memory: taking that page by page here would hold up everybody who could do it beside others.

    Not os.posix_fallocate: where the file system lacks the call, the C library imitates it by
    writing a byte into every block.
    """
    system = ctypes.CDLL(None, use_errno=True)
    call = getattr(system, "fallocate64", None)
    if call is None or _in_memory(system, fd):
        return False
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(fd, 0, 0, size) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_FALLOCATE:
        return False
    raise OSError(number, os.strerror(number))


class OpenFiles:
    """Descriptors by file number, opened when first asked for: models have hundreds of files, and
    processes may open a thousand. Of more than `limit`, the one unused
    for longest is closed."""

    def __init__(
        self, opens: Callable[[int], int], closes: Callable[[int], None], limit: int
    ) -> None:
        self._opens = opens
        self._closes = closes
        self._limit = limit
        self._open: OrderedDict[int, int] = OrderedDict()

    def __getitem__(self, number: int) -> int:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if len(self._open) >= self._limit:
            _, oldest = self._open.popitem(last=False)
            self._closes(oldest)
        self._open[number] = self._opens(number)
        return self._open[number]

    def close(self) -> None:
        while self._open:
            _, descriptor = self._open.popitem()
            self._closes(descriptor)


def write_whole(file: Path, parts: Sequence[bytes], files: Files) -> None:
    """Write a file that is there whole, after a power cut too, or not at all. Raises OutputError."""
    beside = file.with_name(f".{file.name}{PARTIAL}")
    files.create(beside, sum(map(len, parts)))
    fd, at = files.open(beside), 0
    try:
        for part in parts:
            files.write(fd, beside, memoryview(part), at)
            at += len(part)
        files.sync(fd, beside)
    finally:
        files.close(fd)
    files.rename(beside, file)
    files.sync_folder(file.parent)
