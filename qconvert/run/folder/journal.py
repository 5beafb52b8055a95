"""Journal of what is done and safe on disk: an append-only file, one checked line at a time.

A line is written only after the file data it speaks of has been synced, so a line that can be read
back whole is true of the moment it was written. A torn last line (a crash in mid-write) fails its hash
and is cut off. A line with a right hash that this program does not write is refused: a journal may have
come with a folder that is anyone's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from qconvert.checkpoint.receipt import is_own_name
from qconvert.core.errors import OutputError
from qconvert.core.links import SMALL, open_regular
from qconvert.core.profiling import phase
from qconvert.core.shown import exact_size, shortened
from qconvert.run.work.files import Files
from qconvert.run.work.upload_target import SentFile

if TYPE_CHECKING:
    from qconvert.run.work.unit_runner import UnitResult

# A sync waits for the disk, so units are committed in batches: after this time, or so much output as
# the run's options say.
COMMIT_SECONDS = 5.0
# Bytes of one line: a unit may hold the records of many tensors, each with many sources.
_LONGEST = SMALL
# Remarks kept; more are no longer something to read.
_MOST_REMARKS = 10_000


@dataclass
class JournalContent:
    """A journal read back.

    `units` are the finished ones, number to receipt lines, in the order they were finished. `publish`
    are the names to publish, in order, once that has begun. `withdrawn` are those of a result that
    was taken out of sight again, to be repaired; `withdrawals` counts how often that was done, and
    `edited` are files of it that people have changed since they were made. `seen` are ctime and inode
    of the source's shards when the units were last known to be made from them. `forgotten` are units
    that were not as recorded and have to be done again; `ended` says how the process of a shard ended,
    None while it has not. `sent` are files that are elsewhere, by name: size and sha256. `length`
    is that of the sound part in bytes.
    """

    header: Mapping[str, Any]
    units: dict[int, Sequence[str]] = field(default_factory=dict)
    remarks: dict[str, None] = field(default_factory=dict)
    publish: Sequence[str] | None = None
    withdrawn: Sequence[str] = ()
    withdrawals: int = 0
    edited: frozenset[str] = frozenset()
    seen: Any = None
    forgotten: set[int] = field(default_factory=set)
    ended: str | None = None
    sent: dict[str, SentFile] = field(default_factory=dict)
    length: int = 0

    @property
    def run(self) -> str | None:
        """Return what the journals of folders that were begun together have in common, and no others."""
        run = self.header.get("run")
        return run if isinstance(run, str) else None

    @property
    def names(self) -> Sequence[str]:
        """Files that may be in sight, or have been."""
        return self.publish if self.publish is not None else self.withdrawn


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return xxhash.xxh3_64(text).hexdigest().encode() + b" " + text + b"\n"


def read_journal(path: Path) -> JournalContent | None:
    """Read a journal; None where there is none, or not even its header got safely to disk. Raises
    OutputError for anything but a regular file, and for sound lines that are not of this program."""
    try:
        fd = open_regular(path, follow=False, error=OutputError)
    except FileNotFoundError:
        return None
    found: JournalContent | None = None
    number = 0
    with os.fdopen(fd, "rb") as stream:
        while raw := stream.readline(_LONGEST):
            digest, _, text = raw.rstrip(b"\n").partition(b" ")
            if not raw.endswith(b"\n") or xxhash.xxh3_64(text).hexdigest().encode() != digest:
                break
            number += 1
            try:
                record = json.loads(text)
                _expect(isinstance(record, dict), "expected an object")
                if found is None:
                    found = _begun(record)
                else:
                    _take(found, record)
            except (ValueError, RecursionError) as error:
                raise OutputError(
                    f"{path}: line {number} was not written by qconvert: {error}; remove "
                    f"{path.parent} by hand if you trust nothing in it"
                ) from error
            found.length += len(raw)
    return found


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)


def _begun(record: Mapping[str, Any]) -> JournalContent:
    """Return what the first line says. What is only compared with this run's own may be of any type: it
    differs then. Raises ValueError for a line that qconvert does not write."""
    _expect(isinstance(record.get("fingerprint"), str), "the first line names no run")
    _expect(isinstance(record.get("run", ""), str), "run is not a string")
    passes = record.get("passes", [])
    _expect(
        isinstance(passes, list) and all(isinstance(step, dict) for step in passes),
        "passes is not a list of objects with name and options",
    )
    return JournalContent(record, seen=record.get("seen"))


def _take(found: JournalContent, record: Mapping[str, Any]) -> None:
    """Apply a line. Raises ValueError for one that qconvert does not write."""
    for kind, take in _KINDS.items():
        if kind in record:
            take(found, record)
            return
    raise ValueError(f"expected one of {', '.join(_KINDS)}, found {sorted(record)[:3]}")


def _unit(found: JournalContent, record: Mapping[str, Any]) -> None:
    number, records, remarks = record["unit"], record.get("records"), record.get("remarks")
    _expect(type(number) is int and number >= 0, f"{number!r} is not the number of a unit")
    _expect(_is_texts(records), f"records of unit {number} are not a list of strings")
    _expect(_is_texts(remarks), f"remarks of unit {number} are not a list of strings")
    assert isinstance(records, list)
    assert isinstance(remarks, list)
    found.units.pop(number, None)  # the order is that of the last time
    found.units[number] = records
    if len(found.remarks) < _MOST_REMARKS:
        found.remarks.update(dict.fromkeys(remarks))


def _forget(found: JournalContent, record: Mapping[str, Any]) -> None:
    _expect(_is_numbers(record["forget"]), "the units to forget are not a list of numbers")
    for number in record["forget"]:
        found.units.pop(number, None)
        found.forgotten.add(number)


def _publish(found: JournalContent, record: Mapping[str, Any]) -> None:
    found.publish = _names(record["publish"])


def _withdraw(found: JournalContent, record: Mapping[str, Any]) -> None:
    found.withdrawn, found.publish = _names(record["withdraw"]), None
    _expect(_is_texts(record.get("edited")), "the edited files are not a list of names")
    found.edited = frozenset(record["edited"])
    found.withdrawals += 1


def _seen(found: JournalContent, record: Mapping[str, Any]) -> None:
    found.seen = record["seen"]


def _beat(_found: JournalContent, _record: Mapping[str, Any]) -> None:
    """A sign of life, of a shard."""


def _sent(found: JournalContent, record: Mapping[str, Any]) -> None:
    listed = record["sent"]
    _expect(isinstance(listed, list), "the files that were sent are not a list")
    for each in listed:
        _expect(isinstance(each, dict), "a file that was sent is not an object")
        (name,) = _names([each.get("name")])
        size, sha256 = each.get("size"), each.get("sha256")
        _expect(type(size) is int and size >= 0, f"{size!r} is not the size of a file")
        _expect(isinstance(sha256, str), f"{sha256!r} is not a sha256")
        found.sent[name] = SentFile(name, size, sha256)


def _unsent(found: JournalContent, record: Mapping[str, Any]) -> None:
    for name in _names(record["unsent"]):
        found.sent.pop(name, None)


def _ended(found: JournalContent, record: Mapping[str, Any]) -> None:
    _expect(isinstance(record["ended"], str), "how it ended is not a string")
    found.ended = record["ended"]


def _names(value: Any) -> list[str]:
    _expect(_is_texts(value), "the names of files are not a list of strings")
    names: list[str] = value
    for name in names:
        _expect(is_own_name(name), f"{name!r} is not inside the folder")
    return names


_KINDS: Mapping[str, Callable[[JournalContent, Mapping[str, Any]], None]] = {
    "unit": _unit, "forget": _forget, "publish": _publish, "withdraw": _withdraw, "seen": _seen,
    "beat": _beat, "ended": _ended, "sent": _sent, "unsent": _unsent,
}  # fmt: skip


def lines_of(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Journal lines as they are written."""
    return b"".join(map(_line, records))


class Journal:
    """An open journal to append to."""

    def __init__(self, path: Path, files: Files, length: int) -> None:
        self._path = path
        self._files = files
        self._fd = files.open(path)
        files.truncate(self._fd, path, length)

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append lines and sync them."""
        self._files.append(self._fd, self._path, lines_of(records))
        self._files.sync(self._fd, self._path)

    def close(self) -> None:
        self._files.close(self._fd)


NO_PASS = "no pass"


def first_difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """In words, the first thing in which two journal headers differ, in the order a user would
    look: source, passes in turn, then output options. None if they agree."""
    for key, label in (
        ("source", "the source"),
        ("source_sample", "the source's weights or side files"),
        ("stat", "the source's files (size or time)"),
    ):
        if then.get(key) != now.get(key):
            return f"{label} changed since that run began{_moved(then, now)}"
    before, after = _steps(then), _steps(now)
    for i in range(max(len(before), len(after))):
        was = before[i] if i < len(before) else NO_PASS
        wants = after[i] if i < len(after) else NO_PASS
        if was != wants:
            return f"pass {i + 1} was {_step_text(was)}, now {_step_text(wants)}"
    for key, label in (
        ("qconvert", "the version of qconvert"),
        ("max_shard_size", "--max-shard-size"),
        ("sha256", "--sha256"),
        ("linked", "which files are hard links"),
    ):
        was, wants = then.get(key), now.get(key)
        if was != wants:
            if type(was) is int and type(wants) is int:
                was, wants = exact_size(was), exact_size(wants)
            return f"{label} was {shortened(str(was), 200)}, now {wants}"
    was, wants = then.get("fingerprint"), now.get("fingerprint")
    if was != wants:
        # The source and passes agree, so it is most likely the text of a new file.
        return (
            f"the plan was {was}, now {wants} (the model card is part of it: give the same "
            "--base-model, and the source by the same folder; another version of qconvert may write "
            "another card)"
        )
    return None


def _steps(header: Mapping[str, Any]) -> list[Any]:
    found = header.get("passes")
    return found if isinstance(found, list) else []


def _step_text(step: Any) -> str:
    from qconvert.plan.pass_options import recipe_line

    return f"`{recipe_line(step)}`" if isinstance(step, Mapping) else NO_PASS


def _moved(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return where a run was begun from another commit of a repo, both, and how to go on."""
    was, found = (header.get("stores") for header in (then, now))
    if not (_is_texts(was) and _is_texts(found)):
        return ""
    assert isinstance(was, list)
    assert isinstance(found, list)
    gone = [url for url in was if url not in found and url.startswith("hf://")]
    return "".join(
        f": it was read from {shortened(url, 200)}, and is {shortened(new, 200)} now; name the source "
        f"{shortened(url.removeprefix('hf://'), 200)} to go on"
        for url in gone
        for new in found
        if new.startswith(f"{url.partition('@')[0]}@")
    )


def refuse_other_plan(path: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise OutputError if a journal belongs to another plan, naming the first difference."""
    difference = first_difference(then, now)
    if difference is not None:
        raise OutputError(
            f"{path} holds unfinished work of another plan: {difference}. Run that command again "
            f"to finish it, or drop it: qconvert clean {path}"
        )


class Committer:
    """Collects finished units and commits them in batches: their files are synced, then the journal says
    so."""

    def __init__(
        self, journal: Journal, files: Files, paths: Sequence[Path], commit_bytes: int
    ) -> None:
        self._journal = journal
        self._files = files
        self._paths = paths
        self._commit_bytes = commit_bytes
        self._waiting: list[tuple[int, UnitResult]] = []
        self._bytes = 0
        self._since = time.monotonic()

    def add(self, number: int, result: UnitResult) -> None:
        self._waiting.append((number, result))
        self._bytes += result.written
        late = time.monotonic() - self._since > COMMIT_SECONDS
        if self._bytes >= self._commit_bytes or late:
            self.commit()

    @phase("commit")
    def commit(self) -> None:
        """Sync every file the waiting units wrote to, then append their journal lines."""
        for number in sorted({file for _, result in self._waiting for file in result.files}):
            path = self._paths[number]
            # Any descriptor will do: syncing is about the file, whoever wrote to it.
            fd = self._files.open(path)
            try:
                self._files.sync(fd, path)
            finally:
                self._files.close(fd)
        if self._waiting:
            self._journal.append([_record(number, result) for number, result in self._waiting])
        self._waiting.clear()
        self._bytes = 0
        self._since = time.monotonic()


def _record(number: int, result: UnitResult) -> dict[str, Any]:
    return {"unit": number, "records": list(result.records), "remarks": list(result.remarks)}
