"""A repo's headers as a folder that validators take for the repo itself.

Shards become files of their true size with their real header and a hole where the weights are;
small files are fetched whole. Whatever reads no weights then works on it as on any folder.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from qconvert.checkpoint.checkpoint import DENIED_NAMES, DENIED_SUFFIXES
from qconvert.checkpoint.hub_cache import cached_folder, cached_id
from qconvert.checkpoint.hub_store import commit_of
from qconvert.checkpoint.mirror import mirror
from qconvert.checkpoint.open import local, named_repo
from qconvert.checkpoint.safetensors import MAX_HEADER
from qconvert.checkpoint.store import is_url, named, store_of
from qconvert.client.download import Reader, client
from qconvert.client.retries import patiently
from qconvert.core.errors import CheckpointError
from qconvert.core.links import open_inside
from qconvert.core.shown import count
from qconvert.core.sizes import format_size

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

    from qconvert.validation.runner import Report

# Most headers end within this, so most shards take one request.
_FIRST_READ = 16 << 10
# Larger files that are no weights are left as holes, and named.
_MOST_WHOLE = 128 << 20
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint can be opened, and what to call it. For headers from the Hub `folder` is one
    that goes with the context, `name` the repo with its commit; with the bytes and requests they took,
    and the files that were left as holes."""

    folder: str | Path
    name: str
    nbytes: int = 0
    requests: int = 0
    holes: tuple[str, ...] = ()

    @property
    def fetched(self) -> bool:
        return self.requests > 0

    @property
    def summary(self) -> str:
        """What was fetched, in a line."""
        size, requests = format_size(self.nbytes), count(self.requests, "request")
        return f"{self.name}: {size} fetched in {requests}"

    def named(self, text: str) -> str:
        """A text about the folder, as one about the repo."""
        return text.replace(str(self.folder), self.name)


@contextmanager
def _naming_the_store() -> Iterator[None]:
    """Errors from within are about the store that a mirror stands for."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(named(str(error))) from error


@contextmanager
def place_of(where: str, *, weights: bool = False) -> Iterator[Place]:
    """Where to open what a user named. What lies in a store is opened through its mirror, which knows
    where the weights are. A repo's headers are fetched at its current commit, whatever
    of it is in the client's cache taken from there; offline, and where the Hub is out of reach, it is
    the snapshot in the cache. Where `weights` are wanted too, it is what any command opens of a repo.

    Raises CheckpointError for a repo that is not there (its text names the repo, also where it comes
    from within the context), RunError where the Hub fails for too long.
    """
    if is_url(where):
        found = mirror(store_of(where))
        with _naming_the_store():
            yield Place(found.folder, where.rstrip("/"), found.nbytes, found.requests)
        return
    repo = named_repo(where)
    if repo is None:
        yield Place(where, where)
        return
    if weights:
        folder = local(where)
        with _naming_the_store():
            yield Place(folder, where if cached_id(folder) else named(str(folder)))
        return
    commit = commit_of(repo, where)
    if commit is None:
        yield Place(cached_folder(repo, where), where)
        return
    with tempfile.TemporaryDirectory(prefix="qconvert-headers-") as scratch:
        folder = Path(scratch)
        reader = Reader(client(), repo.id, commit)
        holes = _fetch(reader, folder)
        name = f"{repo.id}@{commit[:12]}"
        place = Place(folder, name, reader.nbytes, reader.requests, holes)
        try:
            yield place
        except CheckpointError as error:
            raise CheckpointError(place.named(str(error))) from error


def _fetch(reader: Reader, folder: Path) -> tuple[str, ...]:
    """Write every file of the commit, whole, as a header, or as a hole. Returns the holes."""
    from huggingface_hub import RepoFile

    listed = patiently(
        lambda: list(
            reader.api.list_repo_tree(reader.repo, recursive=True, revision=reader.commit)
        ),
        f"listing {reader.repo}",
    )
    # .gitattributes is the Hub's own, and no part of the checkpoint.
    files = [e for e in listed if isinstance(e, RepoFile) and e.path not in DENIED_NAMES]
    for file in files:
        _check_inside(reader.repo, file.path)
    with ThreadPoolExecutor(_THREADS) as pool:
        done = pool.map(lambda file: _write(reader, folder, file), files)
        return tuple(file.path for file, whole in zip(files, done, strict=True) if not whole)


def _check_inside(repo: str, path: str) -> None:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in path or not pure.parts:
        raise CheckpointError(f"{repo}: lists {path!r}, which is no file inside the repo")


def _write(reader: Reader, folder: Path, file: RepoFile) -> bool:
    """One file. False where it is a hole and was not expected to be one."""
    target = folder / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    size = file.size if file.lfs is None else file.lfs.size
    lower = file.path.lower()
    shard = lower.endswith(".safetensors")
    weights = shard or lower.endswith(DENIED_SUFFIXES)
    data = b""
    if shard or (not weights and size <= _MOST_WHOLE):
        with _bytes_of(reader, file.path, size) as read:
            data = _header(read, size) if shard else read(0, size)
    with target.open("wb") as stream:
        stream.write(data)
        stream.truncate(size)
    return weights or len(data) == size


@contextmanager
def _bytes_of(reader: Reader, path: str, size: int) -> Iterator[Callable[[int, int], bytes]]:
    """What reads a range of a file: from the client's cache where that has it, else from the Hub."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(reader.repo, path, revision=reader.commit)
    if isinstance(cached, str):
        # Links in the cache lead to its blobs; one that does not is not followed.
        snapshot = Path(cached).parents[len(PurePosixPath(path).parts) - 1]
        with os.fdopen(open_inside(snapshot, path), "rb") as stream:
            fd = stream.fileno()
            if os.fstat(fd).st_size == size:
                yield lambda start, stop: os.pread(fd, stop - start, start)
                return
    yield lambda start, stop: reader.read(path, start, stop)


def _header(read: Callable[[int, int], bytes], size: int) -> bytes:
    """A shard's header bytes: 8 of length, the JSON. Of a file that is none, what there is: whoever
    reads it says so."""
    start = read(0, min(size, _FIRST_READ))
    if len(start) < 8:
        return start
    (length,) = struct.unpack("<Q", start[:8])
    stop = 8 + length
    if length > MAX_HEADER or stop > size:
        return start
    if stop <= len(start):
        return start[:stop]
    return start + read(len(start), stop)


def about_repo(report: Report, place: Place) -> Report:
    """A report on a folder of headers, as one on the repo or the store they are of."""

    def said(text: str) -> str:
        return named(place.named(text))

    report.about = {key: said(value) for key, value in report.about.items()}
    report.findings = [
        replace(f, where=said(f.where), message=said(f.message)) for f in report.findings
    ]
    for texts in (report.proved, report.read, report.not_checked):
        texts[:] = [said(text) for text in texts]
    report.not_checked += [
        f"{file} (larger than {_MOST_WHOLE >> 20} MiB, not fetched)" for file in place.holes
    ]
    return report
