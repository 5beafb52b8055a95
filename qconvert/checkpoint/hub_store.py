"""A commit of a repo on the Hub as a store: its files are read by ranges; nothing is downloaded first.

A branch is looked up once for a command, and what it stood for then is read to the end: a commit's files
never change. Their marks are the hashes that the Hub lists them with. What the client's cache has of the
commit is read there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import ClassVar

from qconvert.checkpoint.hub_cache import PINNED, Repo, parse_repo
from qconvert.checkpoint.store import StoredObject
from qconvert.client.listing import HubFile, commit_at, files_of
from qconvert.client.ranges import ranges_of
from qconvert.client.retries import READING, HubRefused, client, library, patiently
from qconvert.core.errors import CheckpointError, UsageError
from qconvert.core.links import open_inside, reading


@dataclass(frozen=True, slots=True)
class HubStore:
    """A commit of a repo, at a Hub. Can be sent to other processes, which take the token from their own
    environment. Its methods raise CheckpointError for what is not there or not allowed, RunError where
    the Hub fails for too long."""

    imports: ClassVar[tuple[str, ...]] = (
        "huggingface_hub.file_download", "huggingface_hub.hf_api", "qconvert.client.ranges",
    )  # fmt: skip

    repo: str
    commit: str
    endpoint: str

    @property
    def url(self) -> str:
        return f"hf://{self.repo}@{self.commit}"

    def listed(self) -> Sequence[StoredObject]:
        """All files of the commit, asked for once a process."""
        return _listed(self)

    def read(self, found: StoredObject, start: int, stop: int) -> bytes:
        """Of a commit's files, which never change."""
        name = found.name
        if stop <= start:
            return b""
        data = self.cached(name, start, stop)
        if data is not None:
            return data
        try:
            return ranges_of(self.endpoint, self.repo, self.commit).read(name, start, stop)
        except HubRefused as error:
            raise CheckpointError(str(error)) from error

    def cached(self, name: str, start: int, stop: int) -> bytes | None:
        """A range of a file that the client's cache has of this commit, None where it has none."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo, name, revision=self.commit)
        if not isinstance(found, str):
            return None
        # Links in the cache lead to its blobs; one that does not is not followed.
        snapshot = Path(found).parents[len(PurePosixPath(name).parts) - 1]
        try:
            fd = open_inside(snapshot, name)
        except FileNotFoundError:  # it was deleted meanwhile
            return None
        try:
            with reading(found):
                data = os.pread(fd, stop - start, start)
        finally:
            os.close(fd)
        return data if len(data) == stop - start else None


def store_at(url: str) -> HubStore:
    """The store of `hf://ORG/NAME@COMMIT`. Raises UsageError where no commit is named."""
    repo = parse_repo(url)
    if repo is None or not repo.is_commit:
        raise UsageError(f"{url}: expected hf://ORG/NAME@COMMIT, with all 40 digits of the commit")
    return HubStore(repo.id, str(repo.revision), client().endpoint)


def store_of_repo(repo: Repo, where: str) -> HubStore | None:
    """The store of the commit that a repo's revision stands for now, or stood for when this command
    first asked; None where the Hub cannot be reached. `where` is how the user named it. Raises
    CheckpointError for what is not there or not allowed."""
    commit = commit_of(repo, where)
    return None if commit is None else HubStore(repo.id, commit, client().endpoint)


class _OutOfReach(CheckpointError):
    """The Hub did not answer at all."""


def commit_of(repo: Repo, where: str) -> str | None:
    """The commit that the repo's revision stands for, None where the Hub cannot be asked (offline, no
    answer at all: no use in waiting, since the cache may do). Raises CheckpointError for a repo that
    is not there or not allowed, RunError where the Hub fails for too long."""
    from huggingface_hub import is_offline_mode

    if is_offline_mode():
        return None
    if repo.is_commit:
        return repo.revision
    known = PINNED.get()
    if known is not None and repo in known:
        return known[repo]
    endpoint = client().endpoint

    def look() -> str:
        try:
            return commit_at(endpoint, repo.id, repo.revision)
        except library().TransportError as error:
            raise _OutOfReach(str(error)) from error

    try:
        commit = patiently(look, f"looking for {repo}", why=READING)
    except _OutOfReach:
        return None
    except HubRefused as error:
        raise CheckpointError(
            f"{where} is neither a folder nor a repo that can be read: {error}"
        ) from error
    if known is not None:
        known[repo] = commit
    return commit


@lru_cache(maxsize=64)
def _listed(store: HubStore) -> tuple[StoredObject, ...]:
    try:
        files = patiently(
            lambda: files_of(store.endpoint, store.repo, store.commit), f"listing {store.repo}",
            why=READING,
        )  # fmt: skip
    except HubRefused as error:
        raise CheckpointError(str(error)) from error
    return tuple(_stored(file) for file in sorted(files, key=lambda file: file.path))


def _stored(file: HubFile) -> StoredObject:
    """A file as the Hub lists it: its size, and a hash of its content for a mark."""
    if file.lfs is None:
        return StoredObject(file.path, file.size, file.blob_id)
    return StoredObject(file.path, file.lfs.size, file.lfs.sha256)
