"""Checkpoints that lie in an object store: what is asked of a store, and the folder that stands for one.

A store gives two things: its objects with their sizes and marks, and ranges of their bytes. A mark is
what changes when the bytes change: an ETag, a generation. Headers and small files are kept in a folder
of the user's cache, the mirror (mirror.py), which opens as any checkpoint does; its shards have their
true size and no weights, and know the object whose bytes are theirs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from qconvert.core.errors import CheckpointError, UsageError
from qconvert.core.json_text import parse_object
from qconvert.core.links import PER_TENSOR, SMALL, is_inside, read_regular
from qconvert.core.own_process import cache_root

# The mirror's list of objects. It lies beside the folder that stands for the store, not in it.
OBJECTS = "objects.json"
FILES = "files"
_URL = re.compile(r"([a-z][a-z0-9+]*)://(.*)", re.DOTALL)
_PART = re.compile(r"[\w.=+,@ -]{1,200}")
_STATE = "@[0-9a-f]{32}"
# The most objects of a folder: a checkpoint has some hundreds.
MOST_OBJECTS = 20_000
_MOST_LIST = SMALL + PER_TENSOR * MOST_OBJECTS


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object: its name below the store's folder, its size in bytes, its mark, and when it was
    written, in the store's words."""

    name: str
    size: int
    mark: str
    time: str = ""


class Store(Protocol):
    """A folder in a store. It can be sent to another process, and read by any number of threads.
    Its methods raise CheckpointError for what is not there or not allowed, and RunError where the
    store fails for too long. `imports` are modules that `read` imports, which start no thread: a process
    that forks readers has them already."""

    imports: ClassVar[tuple[str, ...]]

    @property
    def url(self) -> str:
        """Return what the user named it by."""

    def listed(self) -> Sequence[StoredObject]:
        """All objects below the folder, as they are now."""

    def read(self, found: StoredObject, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of an object that was found. Raises CheckpointError where it has another
        mark now: what its header says is not of these bytes."""


class WritableStore(Store, Protocol):
    """A store that takes objects. An object is there whole or not at all, and is named at the end."""

    def look(self, name: str) -> StoredObject | None:
        """An object as it is now, None where there is none."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small object."""

    def send(self, file: Path, name: str, part: int) -> None:
        """Write a file as an object, one of two parts or more in parts of `part` bytes."""

    def remove(self, name: str) -> None:
        """Remove an object."""

    def abandon(self) -> None:
        """Drop parts of objects below the folder that were sent and never put together: they are shown
        nowhere, and paid for."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """Place of a shard's bytes: an object of a store, as it was when its header was read."""

    store: Store
    object: StoredObject

    @property
    def url(self) -> str:
        return f"{self.store.url}/{self.object.name}"

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of the object. Raises as the store does."""
        return self.store.read(self.object, start, stop)


def has_changed(url: str, name: str) -> CheckpointError:
    """An object has another mark than the one that it was found with."""
    return CheckpointError(
        f"{url}/{name}: changed since its header was read; wait until whoever writes to it has "
        "finished, and start again"
    )


def is_url(where: str | Path) -> bool:
    """Return whether a text names a folder in a store; repos on the Hub (`hf://`) are named
    otherwise."""
    found = _URL.fullmatch(str(where)) if isinstance(where, str) else None
    return found is not None and found[1] != "hf"


def store_of(url: str) -> WritableStore:
    """The store that a URL names. Raises UsageError for a URL that names none."""
    from qconvert.checkpoint.fsspec_store import FsspecStore

    found = _URL.fullmatch(url)
    if found is None or found[1] in ("http", "https"):
        raise UsageError(f"{url}: expected the URL of a folder, such as s3://BUCKET/FOLDER")
    rest = found[2].rstrip("/")
    if not all(_PART.fullmatch(part) and set(part) != {"."} for part in _parts(rest)):
        raise UsageError(
            f"{url}: expected letters, digits and ._=+,@- between slashes; choose another folder"
        )
    if rest.endswith(".safetensors"):
        raise UsageError(f"{url}: names a file; name the folder that it lies in")
    return FsspecStore(f"{found[1]}://{rest}")


def source_store(url: str) -> Store:
    """The store that a source's URL names: `store_of`'s, or for `hf://ORG/NAME@COMMIT` that commit.
    Raises UsageError for a URL that names none."""
    if url.startswith("hf://"):
        from qconvert.checkpoint.hub_store import store_at

        return store_at(url)
    return store_of(url)


def _parts(rest: str) -> list[str]:
    return rest.removeprefix("/").split("/")


# --- the mirror's place ---------------------------------------------------------------------------


def stores_root() -> Path:
    return cache_root() / "stores"


def place_of(url: str, state: str) -> Path:
    """Return where the mirror of a store in one state lies."""
    found = _URL.fullmatch(url)
    assert found is not None
    return stores_root().joinpath(found[1], *_parts(found[2]), f"@{state}")


def work_folder(url: str, below: str | Path | None) -> Path:
    """Return where the folder is made that is sent to a store."""
    found = _URL.fullmatch(url)
    assert found is not None
    root = stores_root().with_name("outputs") if below is None else Path(below)
    return root.joinpath(found[1], *_parts(found[2]))


def named(text: str) -> str:
    """A text in which mirrors have the names of their stores."""
    root = re.escape(f"{stores_root()}{os.sep}")
    found = re.compile(rf"{root}([a-z0-9+]+)/((?:[^@\n]|@(?![0-9a-f]{{32}}/))*?)/{_STATE}/{FILES}")
    return found.sub(_spelled, text)


def _spelled(found: re.Match[str]) -> str:
    slash = "/" if found[1] in ("file", "local", "memory") else ""
    return f"{found[1]}://{slash}{found[2]}"


@dataclass(frozen=True, slots=True)
class MirroredStore:
    """A store and its objects as a mirror knows them. `below` is the part of the store that a folder
    stands for: empty, or ends in a slash."""

    store: Store
    objects: Mapping[str, StoredObject]
    below: str

    def remote(self, name: str) -> RemoteObject | None:
        """The object that a file of the folder stands for."""
        found = self.objects.get(self.below + name)
        return None if found is None else RemoteObject(self.store, found)


def mirrored_at(root: Path) -> MirroredStore | None:
    """The store that a folder stands for, as a whole or in part; None for any other folder. Only folders
    in the user's own cache can be such: what a downloaded folder says of itself is not asked. Raises
    CheckpointError where the mirror is broken."""
    real, home = Path(os.path.realpath(root)), Path(os.path.realpath(stores_root()))
    if home not in real.parents:
        return None
    for folder in (real, *real.parents):
        if folder.name == FILES and re.fullmatch(_STATE, folder.parent.name):
            break
    else:
        return None
    file = folder.parent / OBJECTS
    try:
        table = parse_object(read_regular(file, _MOST_LIST), file)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing; remove {folder.parent}") from error
    url, listed = table.get("url"), table.get("objects")
    if not isinstance(url, str) or not isinstance(listed, list):
        raise CheckpointError(f"{file}: is not a list of objects; remove {folder.parent}")
    objects = [
        StoredObject(str(n), int(size), str(mark), str(time)) for n, size, mark, time in listed
    ]
    below = real.relative_to(folder).as_posix()
    return MirroredStore(
        source_store(url),
        {each.name: each for each in objects},
        "" if below == "." else f"{below}/",
    )


def objects_text(url: str, objects: Sequence[StoredObject]) -> bytes:
    """Return what a mirror's list of objects holds."""
    listed = [[each.name, each.size, each.mark, each.time] for each in objects]
    return (json.dumps({"url": url, "objects": listed}) + "\n").encode()


def mirrored_repo(root: Path) -> str | None:
    """The id of the repo on the Hub that a folder is the mirror of, None for any other folder."""
    real, home = Path(os.path.realpath(root)), Path(os.path.realpath(stores_root() / "hf"))
    if home not in real.parents:
        return None
    parts = real.relative_to(home).parts
    if parts[3:] != (FILES,) or not re.fullmatch(_STATE, parts[2]):
        return None
    return f"{parts[0]}/{parts[1].partition('@')[0]}"


def check_name(url: str, name: str) -> None:
    """Raise CheckpointError for an object whose name is no path below a folder."""
    if not is_inside(name) or "\\" in name or "//" in name or "/./" in f"/{name}/":
        raise CheckpointError(f"{url}: lists {name!r}, which is no file inside the folder")
