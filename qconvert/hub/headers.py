"""A repo's headers as a folder that validators take for the repo itself.

Shards become files of their true size with their real header and a hole where the weights are;
small files are fetched whole. Whatever reads no weights then works on it as on any folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

from qconvert.checkpoint.hub_cache import cached_folder, cached_id
from qconvert.checkpoint.hub_store import HubStore, commit_of
from qconvert.checkpoint.mirror import MOST_WHOLE, mirror, write_headers
from qconvert.checkpoint.open import local, named_repo
from qconvert.checkpoint.store import StoredObject, is_url, named, store_of
from qconvert.client.retries import client
from qconvert.core.errors import CheckpointError
from qconvert.core.shown import count, format_size

if TYPE_CHECKING:
    from qconvert.validation.runner import Report


@dataclass(frozen=True, slots=True)
class OpenedAt:
    """Place where a checkpoint can be opened, and what to call it. For headers from the Hub `folder` is
    one that goes with the context, `name` the repo with its commit; with the bytes and requests they
    took, and the files that were left as holes."""

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
        """Return what was fetched, in a line."""
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
def place_of(where: str, *, weights: bool = False) -> Iterator[OpenedAt]:
    """Return where to open what a user named. What lies in a store is opened through its mirror, which
    knows where the weights are. A repo's headers are fetched at its current commit, whatever of it is in
    the client's cache taken from there; offline, and where the Hub is out of reach, it is the snapshot
    in the cache. Where `weights` are wanted too, it is what any command opens of a repo.

    Raises CheckpointError for a repo that is not there (its text names the repo, also where it comes
    from within the context), RunError where the Hub fails for too long.
    """
    if is_url(where):
        found = mirror(store_of(where))
        with _naming_the_store():
            yield OpenedAt(found.folder, where.rstrip("/"), found.nbytes, found.requests)
        return
    repo = named_repo(where)
    if repo is None:
        yield OpenedAt(where, where)
        return
    if weights:
        folder = local(where)
        with _naming_the_store():
            yield OpenedAt(folder, where if cached_id(folder) else named(str(folder)))
        return
    commit = commit_of(repo, where)
    if commit is None:
        yield OpenedAt(cached_folder(repo, where), where)
        return
    with tempfile.TemporaryDirectory(prefix="qconvert-headers-") as scratch:
        folder = Path(scratch)
        store = _Counted(HubStore(repo.id, commit, client().endpoint))
        holes = write_headers(store, folder)
        name = f"{repo.id}@{commit[:12]}"
        place = OpenedAt(folder, name, store.nbytes, store.requests, holes)
        try:
            yield place
        except CheckpointError as error:
            raise CheckpointError(place.named(str(error))) from error


@dataclass
class _Counted:
    """A commit as a store, with what was fetched of it: what the client's cache has is read there."""

    store: HubStore
    nbytes: int = 0
    requests: int = 0
    imports: ClassVar[tuple[str, ...]] = ()
    _lock: Any = field(default_factory=Lock, repr=False)

    @property
    def url(self) -> str:
        return self.store.url

    def listed(self) -> Sequence[StoredObject]:
        return self.store.listed()

    def read(self, found: StoredObject, start: int, stop: int) -> bytes:
        data = self.store.cached(found.name, start, stop) if stop > start else b""
        if data is None:
            data = self.store.read(found, start, stop)
            with self._lock:
                self.nbytes, self.requests = self.nbytes + len(data), self.requests + 1
        return data


def about_repo(report: Report, place: OpenedAt) -> Report:
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
        f"{file} (larger than {MOST_WHOLE >> 20} MiB, not fetched)" for file in place.holes
    ]
    return report
