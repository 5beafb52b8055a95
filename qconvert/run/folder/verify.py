"""Verification of what an interrupted run, or a finished one, left.

Shards are checked as a loader would check them: size and header. A unit counts as finished where
its record is the plan's, and, as far as that was asked for, its bytes have the hash in it. Where the
source's files were touched since, the bytes that finished units were made from are hashed again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import xxhash

from qconvert.checkpoint.checkpoint import Checkpoint, Shard
from qconvert.checkpoint.safetensors import read_header
from qconvert.core.errors import CheckpointError, OutputError
from qconvert.core.graph import Output
from qconvert.core.links import open_regular, reading
from qconvert.plan.units import Unit
from qconvert.run.work.file_layout import OutFile
from qconvert.run.work.reader import Reader

# Of the units that were finished last, so many bytes are hashed when a run goes on. Those are the ones
# that a crash, or a disk that lied about a sync, may have harmed.
LOOK_BACK = 2 << 30
_CHUNK = 4 << 20
# How many parts of files are put in order at a time: a list of all would be 100 MB for a large model.
_TOGETHER = 1 << 13

_T = TypeVar("_T")
Records = Sequence[str]
# Bytes of a file: the file, where they begin, how many.
Part = tuple[Path, int, int]


class StoredAt(Protocol):
    """Place of an output's bytes, or the one where they should be."""

    def __call__(self, name: str) -> tuple[Path, int] | None:
        """File and offset of a tensor, None for one whose file is elsewhere."""


def shard_fault(path: Path, file: OutFile) -> str | None:
    """Return what is wrong with a shard, seen without its data: None where it is a regular file of the
    planned size with the planned header."""
    try:
        if path.is_symlink():
            return "is a symbolic link"
        header = read_header(path)
    except CheckpointError as error:
        return "is missing" if not os.path.lexists(path) else str(error)
    if header.file_size != file.size:
        return f"has {header.file_size} bytes, expected {file.size}"
    return None if header.raw == header_of(file) else "its header differs from the plan's"


def header_of(file: OutFile) -> bytes:
    """The header a shard must have: planned, or that of the source's file it is a link to. Raises
    CheckpointError where that cannot be read."""
    return file.header if file.link is None else read_header(file.link).raw


def check_entries(path: Path, file: OutFile) -> None:
    """Parse a shard as anybody would, and hold every tensor against the plan. Raises OutputError
    naming the file, and the tensor that is another."""
    try:
        header = read_header(path)
    except CheckpointError as error:
        raise OutputError(f"{error}; nothing was published") from error
    found = {entry.name: (entry.type, entry.offset) for entry in header.entries}
    planned = {one.name: (one.type, one.offset) for one in file.tensors}
    for name in sorted(found.keys() | planned.keys()):
        if found.get(name) != planned.get(name):
            raise OutputError(
                f"{path}: tensor {name!r}: expected {planned.get(name)}, found {found.get(name)}; "
                "nothing was published. Run the same command again"
            )
    if header.raw != header_of(file):
        raise OutputError(
            f"{path}: its header differs from the plan's; nothing was published. Run the same command "
            "again"
        )


# --- units ---------------------------------------------------------------------------------------


def planned_record(
    record: Any, name: str, output: Output, file: str, offset: int
) -> Mapping[str, Any] | None:
    """A receipt line, where it is one of this output at its place, else None."""
    wanted = {
        "name": name, "dtype": output.type.dtype, "shape": list(output.type.shape), "file": file,
        "offset": offset, "nbytes": output.type.nbytes,
    }  # fmt: skip
    if not isinstance(record, dict) or not wanted.items() <= record.items():
        return None
    sources = record.get("sources")
    whole = isinstance(record.get("xxh3"), str) and isinstance(sources, list)
    return record if whole and all(_is_range(part) for part in sources or ()) else None


def _is_range(part: Any) -> bool:
    kinds = {"name": str, "start": int, "stop": int, "xxh3": str}
    return isinstance(part, dict) and all(type(part.get(k)) is t for k, t in kinds.items())


def check_units(
    kept: Mapping[int, Records],
    units: Sequence[Unit],
    places: Mapping[str, tuple[str, int]],
    where: Path,
) -> None:
    """Raise OutputError where a journal vouches for units that the plan does not have, or for outputs
    elsewhere than the plan puts them. `places` gives file name and offset of each output."""
    for number, records in kept.items():
        outputs = units[number].outputs if number < len(units) else ()
        sound = len(outputs) == len(records) > 0
        for (name, output), text in zip(outputs, records, strict=False):
            sound = sound and planned_record(_parsed(text), name, output, *places[name]) is not None
        if not sound:
            raise OutputError(
                f"{where}: its record of unit {number} does not match this plan; drop the unfinished "
                f"work: qconvert clean {where.parent.parent}"
            )


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def wrong_units(
    kept: Mapping[int, Records],
    units: Sequence[Unit],
    where: StoredAt,
    most: int | None,
) -> list[int]:
    """Of the units finished last, `most` bytes of them (None: all), those whose bytes have another hash
    than their record."""
    wrong = set(differing(_recorded(kept, units, where, most)))
    return [number for number in reversed(list(kept)) if number in wrong]


def _recorded(
    kept: Mapping[int, Records], units: Sequence[Unit], where: StoredAt, most: int | None
) -> Iterator[tuple[int, Part, str]]:
    """Of the units finished last the places of their outputs, and the hashes in their records."""
    left = most
    for number in reversed(list(kept)):
        if left is not None and left <= 0:
            return
        here = False
        for (name, output), text in zip(units[number].outputs, kept[number], strict=True):
            if (place := where(name)) is not None:
                here = True
                yield number, (*place, output.type.nbytes), json.loads(text)["xxh3"]
        if left is not None and here:
            left -= units[number].write


def differing(asked: Iterable[tuple[_T, Part, str]]) -> Iterator[_T]:
    """Of things with a part of a file and its xxh3-128 those whose bytes have another; or whose file
    ends before, or is no regular file. Raises OutputError naming a file that cannot be read.

    Some thousand at a time are read in the order of the files, those that lie side by side together:
    what a run wrote around the page cache comes from the disk, where 20,000 reads of 16 KiB, the last
    written first, took 150 us each."""
    left = iter(asked)
    with _Hashing() as hashing:
        while some := sorted(islice(left, _TOGETHER), key=_by_place):
            runs = [start + size for _, (_, start, size), _ in some]  # where what adjoins ends
            for at in range(len(some) - 2, -1, -1):
                (_, (path, _, _), _), (_, (after, start, _), _) = some[at : at + 2]
                if path == after and runs[at] == start:
                    runs[at] = runs[at + 1]
            for (thing, part, xxh3), until in zip(some, runs, strict=True):
                if hashing.of(*part, until) != xxh3:
                    yield thing


def _by_place(asked: tuple[Any, Part, str]) -> Part:
    return asked[1]


class _Hashing:
    """Hashes parts of files, one file open at a time."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._fd = -1
        self._buffer = memoryview(bytearray(_CHUNK))
        self._held = (0, 0)  # of the file, what the buffer holds

    def __enter__(self) -> _Hashing:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._path, self._fd, self._held = None, -1, (0, 0)

    def of(self, path: Path, at: int, size: int, until: int) -> str | None:
        """xxh3-128 of `size` bytes, with what follows up to `until` asked for next;
        None where the file ends before, or is no regular file. Raises OutputError naming a file that
        cannot be read."""
        if path != self._path:
            self._close()
            try:
                self._fd = open_regular(path, follow=False, error=OutputError)
            except (FileNotFoundError, OutputError):
                return None
            self._path = path
        digest = xxhash.xxh3_128()
        stop = at + size
        while at < stop:
            first, last = self._held
            if not first <= at < last:
                with reading(path, OutputError):
                    done = os.preadv(self._fd, [self._buffer[: min(until - at, _CHUNK)]], at)
                if not done:
                    return None
                first, last = self._held = at, at + done
            digest.update(self._buffer[at - first : min(stop, last) - first])
            at = min(stop, last)
        return digest.hexdigest()


# --- the source ----------------------------------------------------------------------------------


def seen(shards: Sequence[Shard]) -> list[list[int | str]]:
    """Return what tells a file that was written to from one whose modification time alone is as it
    was."""
    return [shard.seen for shard in shards]


def touched(now: Sequence[Shard], then: Any) -> set[int]:
    """Numbers of shards that are others than they were seen to be. Copies and shared file systems
    change these numbers too, so this is a reason to look and none to refuse."""
    known = then if isinstance(then, list) and len(then) == len(now) else [None] * len(now)
    return {
        n for n, (is_now, was) in enumerate(zip(seen(now), known, strict=True)) if is_now != was
    }


def check_sources(kept: Iterable[Records], checkpoint: Checkpoint, numbers: set[int]) -> None:
    """Hash what finished units were made from again, as far as it is in these shards. Raises
    CheckpointError naming the tensor whose bytes are others now."""
    ranges = {
        (part["name"], part["start"], part["stop"]): part["xxh3"]
        for records in kept
        for text in records
        for part in json.loads(text)["sources"]
    }
    buffer = memoryview(bytearray(_CHUNK))
    reader = Reader(checkpoint.shards)
    try:
        for (name, start, stop), expected in ranges.items():
            source = checkpoint.get(name)
            if source is None or not 0 <= start <= stop <= source.type.nbytes:
                raise _changed(checkpoint, name)
            if source.shard not in numbers:
                continue
            digest = xxhash.xxh3_128()
            for at in range(start, stop, _CHUNK):
                chunk = buffer[: min(_CHUNK, stop - at)]
                reader.read(source, at, chunk)
                digest.update(chunk)
            if digest.hexdigest() != expected:
                raise _changed(checkpoint, name)
    finally:
        reader.close()


def check_same_sources(before: Records, after: Records, checkpoint: Checkpoint) -> None:
    """A unit was done again: raise CheckpointError naming a tensor that was read with other bytes the
    first time."""
    for old, new in zip(before, after, strict=True):
        known = {(p["name"], p["start"], p["stop"]): p["xxh3"] for p in json.loads(old)["sources"]}
        for part in json.loads(new)["sources"]:
            key = (part["name"], part["start"], part["stop"])
            if known.get(key, part["xxh3"]) != part["xxh3"]:
                raise _changed(checkpoint, part["name"])


def _changed(checkpoint: Checkpoint, name: str) -> CheckpointError:
    source = checkpoint.get(name)
    where = checkpoint.name if source is None else checkpoint.shards[source.shard].name
    return CheckpointError(
        f"{where}: tensor {name!r}: its bytes changed since finished work was made from it, with size "
        "and time of the file unchanged. Put the source back, or drop that work (qconvert clean OUT) "
        "and start again"
    )
