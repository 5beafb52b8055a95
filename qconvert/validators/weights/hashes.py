"""Every byte as it was written: the receipt has a hash of each tensor and file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import xxhash

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.receipt import digest
from qconvert.checkpoint.safetensors import read_header
from qconvert.validation.findings import Finding, Skipped
from qconvert.validation.runner import Folder, Need
from qconvert.validation.workers import CHUNK, Folders, Watch
from qconvert.validators.headers.receipt import EDITED


@dataclass(frozen=True)
class Hashes:
    """Reads everything once and compares xxh3-128."""

    name: str = "hashes"
    proves: str = "every byte has the hash it was written with"
    needs: frozenset[Need] = frozenset({"receipt", "data"})

    def __call__(self, folder: Folder) -> Iterator[Finding | Skipped | HashTask]:
        checkpoint = folder.checkpoint
        lines = folder.receipt or ()
        tensors = [line for line in lines if line.get("name") in checkpoint]
        for line in folder.some(tensors):
            yield HashTask(tensor=checkpoint[line["name"]], rule="QC022", expected=line["xxh3"])
        shards = {shard.path.name: shard for shard in checkpoint.shards}
        for line in lines:
            # A shard has a hash of its header, and one of each tensor; a missing file is QC020.
            if "name" in line or line["file"] in EDITED:
                continue
            there = checkpoint.there(line["file"]) is not None
            if "xxh3" in line and there and _digest(checkpoint, line["file"]) != line["xxh3"]:
                yield _changed("QC022", line["file"])
            shard = shards.get(line["file"])
            if shard is None:
                continue
            if "header_xxh3" not in line:
                yield Skipped(
                    f"the header of {line['file']} (its receipt is older than such hashes)"
                )
            elif digest(read_header(shard.path, shard.real).raw) != line["header_xxh3"]:
                yield _changed("QC022", line["file"])


def _digest(checkpoint: Checkpoint, file: str) -> str:
    found = xxhash.xxh3_128()
    with checkpoint.open_file(file) as stream:
        while chunk := stream.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _changed(rule: str, where: str) -> Finding:
    verb = "written" if rule == "QC022" else "read"
    return Finding(rule, "error", where, f"its bytes are not those {verb}")


@dataclass(frozen=True, kw_only=True)
class HashTask(Watch):
    """xxh3-128 of some of a tensor's bytes, in the folder or its source, against the receipt's."""

    rule: str
    expected: str
    scratch: ClassVar[int] = 0

    def look(self) -> _Hashing:
        return _Hashing(self)


class _Hashing:
    def __init__(self, task: HashTask) -> None:
        self._task, self._hash = task, xxhash.xxh3_128()

    def take(self, at: int, data: memoryview) -> None:
        self._hash.update(data)

    def end(self, folders: Folders) -> Iterator[Finding]:
        if self._hash.hexdigest() != self._task.expected:
            yield _changed(self._task.rule, self._task.where)


VALIDATOR = Hashes()
