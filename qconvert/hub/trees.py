"""A folder and a repo's tree, compared by size and hash.

The Hub lists a file of LFS (or xet) with its size and sha256, any other with the hash git gives its
content: sha1 of `blob SIZE\\0` and the bytes (huggingface_hub, RepoFile).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qconvert.checkpoint.checkpoint import (
    DENIED_SUFFIXES,
    REPAIR_DIR,
    WORK_DIR,
    is_denied_folder,
)
from qconvert.client.listing import HubFile
from qconvert.core.errors import OutputError
from qconvert.core.links import open_inside, resolved

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

Algorithm = Literal["sha256", "git-sha1"]
MISSING = "is missing on the Hub"
_CHUNK = 4 << 20
_THREADS = 4


@dataclass(frozen=True, slots=True)
class Remote:
    """A file as the Hub lists it."""

    size: int
    hash: str
    algorithm: Algorithm


@dataclass(frozen=True, slots=True)
class Difference:
    """A file that differs on the Hub from the folder's, and how."""

    path: str
    what: str


def local_files(folder: Path, *, follow_links: bool = False) -> dict[str, int]:
    """Files to send, by path below the folder, with their sizes: all but caches, version control and
    hidden files. Raises OutputError for a folder that is not finished, or has nothing to send, and for
    a link that leads out of it where `follow_links` does not allow that."""
    if not folder.is_dir():
        raise OutputError(f"{folder}: no such folder")
    if (folder / WORK_DIR).exists():
        raise OutputError(
            f"{folder}: its conversion is unfinished ({WORK_DIR}/ exists); run the same command again, "
            "or drop it with qconvert clean"
        )
    if os.path.lexists(folder / REPAIR_DIR):
        raise OutputError(
            f"{folder}: its repair is unfinished ({REPAIR_DIR}/ exists); run qconvert repair again"
        )
    found: dict[str, int] = {}
    for path in _files(folder):
        if not _hidden(path):
            real = resolved(folder, path, follow_links=follow_links, error=OutputError)
            found[path] = real.stat().st_size
    if not found:
        raise OutputError(f"{folder}: holds no file to upload")
    return found


def hidden_files(folder: Path) -> list[str]:
    """Files that are not sent because their name, or a folder's above them, begins with a dot: settings
    and secrets (.env), and .gitattributes, which is the Hub's own. Caches and version control are not
    listed."""
    return [path for path in _files(folder) if _hidden(path)]


def _files(folder: Path) -> list[str]:
    from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects  # type: ignore[attr-defined]

    there = sorted(p.relative_to(folder).as_posix() for p in folder.glob("**/*") if p.is_file())
    kept = filter_repo_objects(there, ignore_patterns=DEFAULT_IGNORE_PATTERNS)
    return [path for path in kept if not any(map(is_denied_folder, path.split("/")))]


def _hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def remote_files(listed: Iterable[HubFile | RepoFile]) -> dict[str, Remote]:
    """A tree's files by path."""
    found = {}
    for file in listed:
        if file.lfs is not None:
            found[file.path] = Remote(file.lfs.size, file.lfs.sha256, "sha256")
        else:
            found[file.path] = Remote(file.size, file.blob_id, "git-sha1")
    return found


@dataclass
class Digests:
    """Hashes of a folder's files, each computed once, some files at a time."""

    folder: Path
    wrote: Callable[[int], None] = lambda _: None
    known: dict[tuple[str, Algorithm], str] = field(default_factory=dict)
    follow_links: bool = False

    def of(self, wanted: Iterable[tuple[str, Algorithm]]) -> None:
        """Compute what is not known yet."""
        todo = [pair for pair in dict.fromkeys(wanted) if pair not in self.known]
        with ThreadPoolExecutor(_THREADS) as pool:
            self.known.update(zip(todo, pool.map(self._hash, todo), strict=True))

    def _hash(self, wanted: tuple[str, Algorithm]) -> str:
        path, algorithm = wanted
        fd = open_inside(self.folder, path, follow_links=self.follow_links, error=OutputError)
        with os.fdopen(fd, "rb") as stream:
            digest = sha256()
            if algorithm == "git-sha1":
                digest = sha1(b"blob %d\0" % os.fstat(fd).st_size)
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                self.wrote(len(chunk))
        return digest.hexdigest()


def differences(
    here: Mapping[str, int], there: Mapping[str, Remote], digests: Digests
) -> list[Difference]:
    """Files of the folder that the tree lacks or has with other content: by size first, then by hash."""
    found = []
    same_size = [path for path in here if path in there and there[path].size == here[path]]
    digests.of((path, there[path].algorithm) for path in same_size)
    for path, size in here.items():
        remote = there.get(path)
        if remote is None:
            found.append(Difference(path, MISSING))
        elif remote.size != size:
            found.append(
                Difference(path, f"has {remote.size} bytes on the Hub, {size} in the folder")
            )
        elif (ours := digests.known[path, remote.algorithm]) != remote.hash:
            what = f"its {remote.algorithm} is {remote.hash} on the Hub, {ours} in the folder"
            found.append(Difference(path, what))
    return found


def stale_weights(here: Iterable[str], there: Iterable[str]) -> list[str]:
    """Weights and indexes that only the repo has: some runtimes glob for shards, and load them."""
    endings = (*DENIED_SUFFIXES, ".index.json")
    gone = set(there) - set(here)
    return sorted(path for path in gone if "/" not in path and path.lower().endswith(endings))
