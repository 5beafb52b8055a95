"""A store's headers and small files as a folder in the user's cache, fetched by ranges.

Shards become files of their true size with their real header and a hole where the weights are; small
files are fetched whole; weights in other formats are holes. A store whose objects have changed has
another mirror, so that nothing in one is ever out of date.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from threading import Lock

from qconvert.checkpoint.checkpoint import DENIED_NAMES, DENIED_SUFFIXES, is_denied_folder
from qconvert.checkpoint.safetensors import MAX_HEADER
from qconvert.checkpoint.store import (
    FILES,
    MOST_OBJECTS,
    OBJECTS,
    Store,
    StoredObject,
    check_name,
    objects_text,
    place_of,
)
from qconvert.core.errors import CheckpointError, OutputError
from qconvert.core.links import writing
from qconvert.core.own_process import make_private
from qconvert.core.shown import count, format_size

# Most headers end within this, so most shards take one request.
_FIRST_READ = 16 << 10
_CHUNK = 8 << 20
# Larger files that are no weights are refused, and so are many of them.
MOST_WHOLE = 128 << 20
_MOST_TOGETHER = 1 << 30
_THREADS = 16


@dataclass(frozen=True, slots=True)
class Mirror:
    """The folder that stands for a store, and what was fetched for it: nothing, if it was there."""

    folder: Path
    nbytes: int
    requests: int


def mirror(store: Store) -> Mirror:
    """The folder that stands for a store as it is now. Raises CheckpointError for a store that holds no
    files, or a file that is too large to be fetched whole, and as the store does."""
    objects = _listed(store)
    _check_sizes(store, objects)
    state = sha256(objects_text(store.url, objects)).hexdigest()[:32]
    place = place_of(store.url, state)
    if (place / OBJECTS).is_file():
        return Mirror(place / FILES, 0, 1)
    try:
        make_private(place.parent)
        scratch = Path(mkdtemp(prefix=".new-", dir=place.parent))
    except OSError as error:
        raise OutputError(
            f"{place.parent}: cannot create the folder for headers: {error.strerror or error}; set "
            "XDG_CACHE_HOME to one that can be written"
        ) from error
    try:
        nbytes, requests = _fetch(store, objects, scratch / FILES)
        if _listed(store) != objects:
            raise CheckpointError(
                f"{store.url}: changed while its headers were read; wait until whoever writes to it has "
                "finished, and start again"
            )
        (scratch / OBJECTS).write_bytes(objects_text(store.url, objects))
        scratch.chmod(0o755)
        with suppress(OSError):  # another process was first
            scratch.rename(place)
    except OSError as error:
        raise OutputError(f"{scratch}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Mirror(place / FILES, nbytes, requests + 2)


def _listed(store: Store) -> list[StoredObject]:
    """The objects that are the checkpoint's."""
    found = []
    for each in store.listed():
        check_name(store.url, each.name)
        *folders, name = each.name.split("/")
        if name not in DENIED_NAMES and not any(map(is_denied_folder, [*folders, name])):
            found.append(each)
    if not found:
        raise CheckpointError(f"{store.url}: holds no files; check its name{_elsewhere(store)}")
    if len(found) > MOST_OBJECTS:
        raise CheckpointError(
            f"{store.url}: expected at most {MOST_OBJECTS} files, found {len(found)}; name the "
            "checkpoint's own folder"
        )
    return found


def _elsewhere(store: Store) -> str:
    if store.url.startswith("hf://"):
        return " and revision"
    return ", and AWS_ENDPOINT_URL for a store that is not Amazon's"


def _is_shard(name: str) -> bool:
    return name.lower().endswith(".safetensors")


def _is_whole(file: StoredObject) -> bool:
    return not file.name.lower().endswith(DENIED_SUFFIXES)


def write_headers(store: Store, folder: Path) -> tuple[str, ...]:
    """Write a store's objects into a folder as a mirror has them. Returns the names of large files that
    are no weights and were left as holes: to look at a checkpoint none is needed."""
    objects = _listed(store)
    holes = {file.name for file in objects if _is_whole(file) and file.size > MOST_WHOLE}
    with writing(folder):
        _fetch(store, objects, folder, holes)
    return tuple(sorted(holes))


def _check_sizes(store: Store, objects: Sequence[StoredObject]) -> None:
    """Raise CheckpointError for a file that is no weights and too large to be fetched."""
    for file in objects:
        if _is_whole(file) and file.size > MOST_WHOLE:
            raise CheckpointError(
                f"{store.url}/{file.name}: expected at most {format_size(MOST_WHOLE)} of a file that "
                f"is no weights, found {format_size(file.size)}; remove it, or copy the folder"
            )


def _fetch(
    store: Store, objects: Sequence[StoredObject], folder: Path, holes: Collection[str] = ()
) -> tuple[int, int]:
    """Write every object, whole, as a header, or as a hole. Returns bytes and requests."""
    whole = [file for file in objects if _is_whole(file) and file.name not in holes]
    if sum(file.size for file in whole) > _MOST_TOGETHER:
        raise CheckpointError(
            f"{store.url}: expected at most {format_size(_MOST_TOGETHER)} in "
            f"{count(len(whole), 'file')} that are no weights; copy the folder"
        )
    budget = _Budget(store.url)
    for parent in sorted({(folder / file.name).parent for file in objects} | {folder}):
        parent.mkdir(parents=True, exist_ok=True)
    # The first alone: what may not be read is refused once, and not by as many requests as threads.

    def write(file: StoredObject) -> tuple[int, int]:
        return _write(store, file, folder / file.name, budget, hole=file.name in holes)

    counts = [write(file) for file in objects[:1]]
    with ThreadPoolExecutor(_THREADS) as pool:
        counts += pool.map(write, objects[1:])
    return sum(nbytes for nbytes, _ in counts), sum(requests for _, requests in counts)


class _Budget:
    """Number of bytes of headers that may still be fetched: each may claim MAX_HEADER, of many
    shards."""

    def __init__(self, url: str) -> None:
        self._url, self._left, self._lock = url, _MOST_TOGETHER, Lock()

    def take(self, nbytes: int) -> None:
        with self._lock:
            self._left -= nbytes
            if self._left < 0:
                raise CheckpointError(
                    f"{self._url}: expected at most {format_size(_MOST_TOGETHER)} of headers, found "
                    "more; copy the folder"
                )


def _write(
    store: Store, file: StoredObject, target: Path, budget: _Budget, *, hole: bool
) -> tuple[int, int]:
    nbytes = requests = 0
    with writing(target), target.open("xb") as stream:
        if _is_shard(file.name):
            for data in _header(store, file, budget):
                stream.write(data)
                nbytes, requests = nbytes + len(data), requests + 1
        elif _is_whole(file) and not hole:
            for start in range(0, file.size, _CHUNK):
                data = store.read(file, start, min(file.size, start + _CHUNK))
                stream.write(data)
                nbytes, requests = nbytes + len(data), requests + 1
        stream.truncate(file.size)
    os.utime(target, (0, 0))
    return nbytes, requests


def _header(store: Store, file: StoredObject, budget: _Budget) -> Iterator[bytes]:
    """A shard's header bytes, some at a time: 8 of length, the JSON. Of a file that is none, what there
    is: whoever reads it says so."""
    start = store.read(file, 0, min(file.size, _FIRST_READ))
    (length,) = struct.unpack("<Q", start[:8]) if len(start) >= 8 else (MAX_HEADER + 1,)
    stop = 8 + length
    if length > MAX_HEADER or stop > file.size:
        yield start
        return
    budget.take(stop)
    yield start[:stop]
    for at in range(len(start), stop, _CHUNK):
        yield store.read(file, at, min(stop, at + _CHUNK))
