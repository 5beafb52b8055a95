"""Files of an untrusted folder: which links in it are followed, and how files are opened.

A link under the name of a side file may point to a file that only its reader may read; a conversion
would copy it and an upload would publish it. So a file is read only within the folder, or, in a snapshot
of the Hub client's cache, among the blobs of the same repo; elsewhere only if the user gives
--follow-links. A path that the user named, the folder itself, may be a link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from stat import S_ISDIR, S_ISFIFO, S_ISREG

from qconvert.core.errors import CheckpointError, OutputError, QConvertError

# Small files read whole, whatever is stored under their names; errors of writing that name the file. A
# pipe named config.json would block for ever, /dev/zero and a file of 3 GiB would fill the memory. So
# only regular files are read, and only up to a stated size.

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
        with reading(path, error):
            data = stream.read(limit + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise error(f"{path}: expected at most {limit} bytes, found {max(size, len(data))}")
    return data


@contextmanager
def reading(path: Path | str, error: type[QConvertError] = CheckpointError) -> Iterator[None]:
    """Within this a file is read. Raises `error` naming it: the system's own error may name none."""
    try:
        yield
    except OSError as failure:
        raise error(f"{path}: cannot be read: {failure.strerror or failure}") from failure


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within this a file is written that the user named. Raises OutputError naming it: where a disk is
    full, the system's own error names no file."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


# huggingface_hub, "Understand caching": models--ORG--NAME/snapshots/COMMIT/FILE -> ../../blobs/HASH
_REPO = re.compile(r"(?:models|datasets|spaces)--.+")


def is_inside(name: str) -> bool:
    """Return whether a name, as an index or a receipt gives it, is a path below a folder: relative,
    without `..`, not empty."""
    path = PurePosixPath(name)
    return not (path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name)


def resolved(
    root: Path,
    name: str,
    *,
    follow_links: bool = False,
    error: type[QConvertError] = CheckpointError,
) -> Path:
    """The resolved path of the file called `name` below `root`, without a link in it. It need not
    exist.

    Raises `error`, naming the file, for a name that leads out of the folder, and for a link that does
    unless `follow_links` allows it.
    """
    if not is_inside(name):
        raise error(f"{root}: {name!r} is not the name of a file inside the folder")
    home = os.path.realpath(root)
    real = os.path.realpath(os.path.join(home, name))
    if follow_links or _below(real, home) or _is_blob(real, home):
        return Path(real)
    raise error(
        f"{root / name}: is a link that leads out of its folder, to {real}; replace it with the file, "
        "or give --follow-links if you trust it"
    )


def open_inside(
    root: Path,
    name: str,
    *,
    follow_links: bool = False,
    error: type[QConvertError] = CheckpointError,
) -> int:
    """A descriptor to read such a file with; it must be a regular file. The path found by `resolved` is
    opened without following a link, so exchanging the file for a link does not help. Raises
    FileNotFoundError if it is missing, else as `resolved` and `open_regular` do."""
    real = resolved(root, name, follow_links=follow_links, error=error)
    return open_regular(real, follow=False, error=error)


def read_inside(
    root: Path,
    name: str,
    limit: int = SMALL,
    *,
    follow_links: bool = False,
    error: type[QConvertError] = CheckpointError,
) -> bytes:
    """All bytes of such a file of at most `limit` bytes; raises as `open_inside` and `read_regular`."""
    real = resolved(root, name, follow_links=follow_links, error=error)
    return read_regular(real, limit, follow=False, error=error)


def _below(real: str, home: str) -> bool:
    return real.startswith(home if home.endswith(os.sep) else home + os.sep)


def _is_blob(real: str, home: str) -> bool:
    """Return whether a file is a blob of the repo whose snapshot `home` is."""
    snapshots = Path(home).parent
    if snapshots.name != "snapshots" or not _REPO.fullmatch(snapshots.parent.name):
        return False
    return Path(real).parent == snapshots.parent / "blobs"
