"""Files of an untrusted folder: which links in it are followed, and how files are opened.

A link under the name of a side file may point to a file that only its reader may read; a conversion
would copy it and an upload would publish it. So a file is read only within the folder, or, in a snapshot
of the Hub client's cache, among the blobs of the same repo; elsewhere only if the user gives
--follow-links. A path that the user named, the folder itself, may be a link.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from qconvert.core.errors import CheckpointError, QConvertError
from qconvert.core.regular import SMALL, open_regular, read_regular

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
