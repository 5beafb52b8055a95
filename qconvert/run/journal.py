"""What has been done and is safe on disk: an append-only file, one checked line at a time.

A line is written only after the file data it speaks of has been synced, so a line that can be read
back whole is true. A torn last line (a crash in mid-write) fails its hash and is cut off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from qconvert.core.errors import OutputError
from qconvert.run.files import Files


@dataclass(frozen=True)
class Remembered:
    """A journal read back: its header, the finished units (number -> receipt lines), whether
    publishing has begun (the names to publish, in order), and the length of the sound part."""

    header: Mapping[str, Any]
    units: dict[int, Sequence[str]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    publish: Sequence[str] | None = None
    length: int = 0

    @property
    def run(self) -> Any:
        """What the journals of folders that were begun together have in common, and no others."""
        return self.header.get("run")


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return xxhash.xxh3_64(text).hexdigest().encode() + b" " + text + b"\n"


def read_journal(path: Path) -> Remembered | None:
    """Read a journal; None where there is none, or not even its header got safely to disk."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    found: Remembered | None = None
    length = 0
    publish: Sequence[str] | None = None
    for raw in data.splitlines(keepends=True):
        digest, _, text = raw.rstrip(b"\n").partition(b" ")
        if not raw.endswith(b"\n") or xxhash.xxh3_64(text).hexdigest().encode() != digest:
            break
        record = json.loads(text)
        if found is None:
            found = Remembered(record)
        elif "unit" in record:
            found.units[record["unit"]] = record["records"]
            found.remarks.extend(record["remarks"])
        elif "publish" in record:
            publish = record["publish"]
        length += len(raw)
    if found is None:
        return None
    return Remembered(found.header, found.units, found.remarks, publish, length)


class Journal:
    """An open journal to append to."""

    def __init__(self, path: Path, files: Files, length: int) -> None:
        self._path = path
        self._files = files
        self._fd = files.open(path)
        files.truncate(self._fd, path, length)

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append lines and sync them."""
        self._files.append(self._fd, self._path, b"".join(map(_line, records)))
        self._files.sync(self._fd, self._path)

    def close(self) -> None:
        self._files.close(self._fd)


def first_difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """In words, the first thing in which two journal headers differ, in the order a user would
    look: source, passes in turn, then output options. None if they agree."""
    for key, label in (
        ("source", "the source"),
        ("source_sample", "the source's weights or side files"),
        ("stat", "the source's files (size or time)"),
    ):
        if then.get(key) != now.get(key):
            return f"{label} changed since that run began"
    before, after = list(then.get("passes", [])), list(now.get("passes", []))
    for i in range(max(len(before), len(after))):
        was = before[i] if i < len(before) else "no pass"
        wants = after[i] if i < len(after) else "no pass"
        if was != wants:
            return f"pass {i + 1} was {was}, now {wants}"
    for key, label in (
        ("qconvert", "the version of qconvert"),
        ("max_shard_size", "--max-shard-size"),
        ("sha256", "--sha256"),
        ("linked", "which files are hard links"),
    ):
        if then.get(key) != now.get(key):
            return f"{label} was {then.get(key)}, now {now.get(key)}"
    was, wants = then.get("fingerprint"), now.get("fingerprint")
    if was != wants:
        # The source and passes agree, so it is most likely the text of a new file.
        return (
            f"the plan was {was}, now {wants} (the model card is part of it: give the same "
            "--base-model, and the source by the same folder)"
        )
    return None


def refuse_other_plan(path: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise OutputError if a journal belongs to another plan, naming the first difference."""
    difference = first_difference(then, now)
    if difference is not None:
        raise OutputError(
            f"{path} holds unfinished work of another plan: {difference}. Run that command again "
            f"to finish it, or drop it: qconvert clean {path}"
        )
