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
from typing import TYPE_CHECKING, Any, Literal

from qconvert.checkpoint.checkpoint import (
    DENIED_SUFFIXES,
    REPAIR_DIR,
    WORK_DIR,
    is_denied_folder,
)
from qconvert.checkpoint.hub_cache import Repo, parse_repo
from qconvert.client.listing import HubFile, files_of
from qconvert.client.retries import HubRefused, client, patiently
from qconvert.core.errors import CheckpointError, OutputError, UsageError
from qconvert.core.links import open_inside, resolved
from qconvert.core.names import natural_key
from qconvert.hub.destination import is_hub

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile


Algorithm = Literal["sha256", "git-sha1"]
MISSING = "is missing on the Hub"
_CHUNK = 4 << 20
_THREADS = 4


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the Hub lists it."""

    size: int
    hash: str
    algorithm: Algorithm


@dataclass(frozen=True, slots=True)
class Difference:
    """A file that differs on the Hub from the folder's, and how."""

    path: str
    what: str


def known_repo(
    api: HfApi, ask: Callable[[Callable[[], Any], str], Any], name: str, revision: str | None
) -> Any:
    """Return what the Hub knows of a repo at a revision, None where it has none of that name. `ask`
    makes a request, which a text describes."""
    try:
        return ask(lambda: api.repo_info(name, revision=revision), f"looking for {name}")
    except HubRefused as error:
        if error.status == 404:
            return None
        raise


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


def remote_files(listed: Iterable[HubFile | RepoFile]) -> dict[str, RemoteFile]:
    """A tree's files by path."""
    found = {}
    for file in listed:
        if file.lfs is not None:
            found[file.path] = RemoteFile(file.lfs.size, file.lfs.sha256, "sha256")
        else:
            found[file.path] = RemoteFile(file.size, file.blob_id, "git-sha1")
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
    here: Mapping[str, int], there: Mapping[str, RemoteFile], digests: Digests
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


# A folder and a repo, or two repos, compared file by file, by the hashes that the Hub lists: of
# weights not a byte is fetched, and of a folder only files of the same size are read.


@dataclass(frozen=True, slots=True)
class FileDifference:
    """A file that is on one side alone (`only-a`, `only-b`), or has another size or hash (`data`)."""

    file: str
    kind: Literal["only-a", "only-b", "data"]
    detail: str


@dataclass(frozen=True, slots=True)
class FilesCompared:
    """Number of files that both sides have, and those that differ, in the order of their names."""

    equal: int
    differences: tuple[FileDifference, ...]


def compare_files(a: str | Path, b: str | Path, *, follow_links: bool = False) -> FilesCompared:
    """Compare the files of two places, at least one of them a repo (`hf://ORG/NAME`, `@REVISION`).
    Hidden files are left out, .gitattributes among them. Raises UsageError for two folders,
    CheckpointError for a repo that is not there, OutputError and RunError as the Hub and the folder
    do."""
    if not (is_hub(a) or is_hub(b)):
        raise UsageError("files are compared with a repo's: name one, hf://ORG/NAME")
    if is_hub(a) and is_hub(b):
        return _compared(_listed(str(a)), _listed(str(b)))
    here, repo, turned = (b, a, True) if is_hub(a) else (a, b, False)
    there = _listed(str(repo))
    found = _hashed(Path(here), there, follow_links=follow_links)
    return _compared(there, found) if turned else _compared(found, there)


def _listed(where: str) -> dict[str, RemoteFile]:
    """A repo's files with size and hash."""
    repo = parse_repo(where)
    assert isinstance(repo, Repo), "it begins with hf://"
    endpoint = client().endpoint
    try:
        found = patiently(
            lambda: files_of(endpoint, repo.id, repo.revision or "main"), f"listing {repo}"
        )
    except HubRefused as error:
        raise CheckpointError(f"{where}: {error}") from error
    return {path: file for path, file in remote_files(found).items() if not _hidden(path)}


def _hashed(
    folder: Path, there: Mapping[str, RemoteFile], *, follow_links: bool
) -> dict[str, RemoteFile]:
    """A folder's files as the repo lists its own. What can be told by size is not hashed."""
    sizes = local_files(folder, follow_links=follow_links)
    digests = Digests(folder, follow_links=follow_links)
    alike = {path: there[path].algorithm for path in sizes if path in there}
    alike = {path: how for path, how in alike.items() if there[path].size == sizes[path]}
    digests.of(alike.items())
    return {
        path: RemoteFile(size, digests.known[path, alike[path]], alike[path])
        if path in alike
        else RemoteFile(size, "", "sha256")
        for path, size in sizes.items()
    }


def _compared(a: Mapping[str, RemoteFile], b: Mapping[str, RemoteFile]) -> FilesCompared:
    found = []
    for path in sorted({*a, *b}, key=natural_key):
        first, second = a.get(path), b.get(path)
        if first is None or second is None:
            one = first or second
            assert one is not None
            kind: Literal["only-a", "only-b"] = "only-b" if first is None else "only-a"
            found.append(FileDifference(path, kind, f"{one.size} bytes"))
        elif first.size != second.size:
            found.append(
                FileDifference(path, "data", f"{first.size} bytes in A, {second.size} in B")
            )
        elif (first.algorithm, first.hash) != (second.algorithm, second.hash):
            detail = f"{first.algorithm} {first.hash} in A, {second.algorithm} {second.hash} in B"
            found.append(FileDifference(path, "data", detail))
    return FilesCompared(len({*a, *b}) - len(found), tuple(found))
