"""Small files read whole, whatever is stored under their names; errors of writing that name the file.

A pipe named config.json would block for ever, /dev/zero and a file of 3 GiB would fill the memory.
So only regular files are read, and only up to a stated size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR, S_ISFIFO, S_ISREG

from qconvert.core.errors import CheckpointError, OutputError, QConvertError

# Files that qconvert reads whole: a config, an index, a manifest, ... The index and the receipt have a
# line per tensor, so their limit grows with the tensors. The largest published index, DeepSeek-V3's
# with 91,991 tensors, has 8.9 MB.
SMALL = 16 << 20
PER_TENSOR = 2048


def open_regular(
    path: Path, *, follow: bool = True, error: type[QConvertError] = CheckpointError
) -> int:
    """A descriptor to read a regular file with. `follow` says whether `path` may be a symlink.

    Raises FileNotFoundError if it is missing, and `error`, naming the file, for anything that is
    not a regular file or cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        # O_NONBLOCK: opening a pipe for reading would wait for a writer. It changes nothing for
        # regular files.
        fd = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as failure:
        if not follow and path.is_symlink():
            raise error(f"{path}: is a symbolic link, expected a regular file") from failure
        raise error(f"{path}: cannot be read: {failure.strerror or failure}") from failure
    mode = os.fstat(fd).st_mode
    if not S_ISREG(mode):
        os.close(fd)
        kind = "a directory" if S_ISDIR(mode) else "a pipe" if S_ISFIFO(mode) else "a device"
        raise error(f"{path}: is {kind}, expected a regular file")
    return fd


def read_regular(
    path: Path,
    limit: int = SMALL,
    *,
    follow: bool = True,
    error: type[QConvertError] = CheckpointError,
) -> bytes:
    """All bytes of a regular file of at most `limit` bytes.

    Raises FileNotFoundError if it is missing, and `error`, naming the file, for anything that is
    not a regular file, is larger, or cannot be read.
    """
    fd = open_regular(path, follow=follow, error=error)
    with os.fdopen(fd, "rb") as stream:
        size = os.fstat(fd).st_size
        try:
            data = stream.read(limit + 1) if size <= limit else b""
        except OSError as failure:
            raise error(f"{path}: cannot be read: {failure.strerror or failure}") from failure
    if size > limit or len(data) > limit:
        raise error(f"{path}: expected at most {limit} bytes, found {max(size, len(data))}")
    return data


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within this a file is written that the user named. Raises OutputError naming it: where a disk is
    full, the system's own error names no file."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
