"""One run at a time in an output folder."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from stat import S_ISREG

from qconvert.core.errors import OutputError

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


class Lock:
    """An flock on a file of the work folder. Workers inherit the descriptor, so that the lock
    outlives a killed parent for as long as any worker may still write."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)


def take_lock(path: Path, *, shared: bool = False) -> Lock | None:
    """Lock the file `path`; `shared`, with others that take it so. None if its folder is gone, or went
    while we waited: the run that held it has finished and tidied up. Raises OutputError if another run
    holds it."""
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
        return Lock(fd)
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return Lock(fd)


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
