"""One run at a time in an output folder."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from qconvert.errors import OutputError


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

    def __init__(self, path: Path) -> None:
        try:
            self.fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            raise OutputError(f"{path}: cannot lock: {error.strerror or error}") from error
        if not _patiently(self.fd):
            holder = os.pread(self.fd, 32, 0).decode(errors="replace").strip()
            os.close(self.fd)
            raise OutputError(
                f"{path.parent.parent}: another qconvert (process {holder or 'unknown'}) is at "
                "work there; wait for it, or choose another folder"
            )
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, str(os.getpid()).encode(), 0)

    def close(self) -> None:
        os.close(self.fd)
