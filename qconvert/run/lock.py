"""One run at a time in an output folder."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from qconvert.core.errors import OutputError

# Workers of a killed run die with it, but not in the same instant.
_TRIES, _PAUSE_SECONDS = 20, 0.1


def _patiently(fd: int) -> bool:
    for attempt in range(_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt + 1 < _TRIES:
                time.sleep(_PAUSE_SECONDS)
        else:
            return True
    return False


class Lock:
    """An flock on a file of the work folder. Workers inherit the descriptor, so that the lock
    outlives a killed parent for as long as any worker may still write."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)


def take_lock(path: Path) -> Lock | None:
    """Lock the file `path`. None if its folder is gone, or went while we waited: the run that held
    it has finished and tidied up. Raises OutputError if another run holds it."""
    try:
        fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutputError(f"{path}: cannot lock: {error.strerror or error}") from error
    if not _patiently(fd):
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise OutputError(
            f"{path.parent.parent}: another qconvert (process {holder or 'unknown'}) is at "
            "work there; wait for it, or choose another folder"
        )
    if not _is(fd, path):
        os.close(fd)
        return None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return Lock(fd)


def _is(fd: int, path: Path) -> bool:
    """Whether the file opened as `fd` is still the one that `path` names."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
