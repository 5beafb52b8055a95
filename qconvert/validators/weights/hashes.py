"""Every byte as it was written: the receipt has a hash of each tensor and file.

The source, read again, must equal what was read when the output was made.

A head that the config ties to the embeddings, but that is stored all the same.

QC025 a tied head is also stored: the same bytes twice, or others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import xxhash

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.receipt import digest
from qconvert.checkpoint.safetensors import read_header
from qconvert.core.graph import Source
from qconvert.core.shown import count
from qconvert.validation.findings import Finding, Proved, Skipped
from qconvert.validation.runner import Folder, validator
from qconvert.validation.workers import CHUNK, Folders, Watch
from qconvert.validators.headers.receipt import EDITED


@validator("the source's bytes are those the output was made from", "data", "receipt", "source")
def sources(folder: Folder) -> Iterator[HashTask]:
    source = folder.source
    assert source is not None
    ranges = {
        (part["name"], part["start"], part["stop"]): (part["xxh3"], line["name"])
        for line in folder.receipt or ()
        for part in line.get("sources", ())
    }
    for (name, start, stop), (expected, made) in folder.some(list(ranges.items())):
        # QC031 and QC030 report a tensor that is gone or smaller.
        if name in source and stop <= source[name].type.nbytes:
            yield HashTask(
                tensor=source[name], side="source", spans=((start, stop),), grouped_with=made,
                rule="QC033", expected=expected,
            )  # fmt: skip


@validator("every byte has the hash it was written with", "data", "receipt")
def hashes(folder: Folder) -> Iterator[Finding | Proved | Skipped | HashTask]:
    checkpoint = folder.checkpoint
    lines = folder.receipt or ()
    tensors = [line for line in lines if line.get("name") in checkpoint]
    some = folder.some(tensors)
    if left := len(tensors) - len(some):
        yield Proved(
            f"{len(some)} of {count(len(tensors), 'tensor')} have the hash they were written with"
        )
        yield Skipped(f"bytes of the other {count(left, 'tensor')} (give --level full)")
    for line in some:
        tensor = checkpoint[line["name"]]
        yield HashTask(
            tensor=tensor, rule="QC022", expected=line["xxh3"],
            file=checkpoint.shards[tensor.shard].path.name,
        )  # fmt: skip
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
            yield Skipped(f"the header of {line['file']} (its receipt is older than such hashes)")
        elif digest(read_header(shard.path, shard.real).raw) != line["header_xxh3"]:
            yield _changed("QC022", line["file"])


def _digest(checkpoint: Checkpoint, file: str) -> str:
    found = xxhash.xxh3_128()
    with checkpoint.open_file(file) as stream:
        while chunk := stream.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _changed(rule: str, where: str, file: str = "") -> Finding:
    verb = "written" if rule == "QC022" else "read"
    return Finding(rule, "error", where, f"its bytes{file and f' in {file}'} are not those {verb}")


@dataclass(frozen=True, kw_only=True)
class HashTask(Watch):
    """xxh3-128 of some of a tensor's bytes, in the folder or its source, against the receipt's."""

    rule: str
    expected: str
    file: str = ""  # of what stands in its finding
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
            yield _changed(self._task.rule, self._task.where, self._task.file)


@dataclass(frozen=True, slots=True)
class CompareTied:
    """Compares two tensors of one type, byte by byte."""

    head: Source
    embeddings: Source
    scratch: ClassVar[int] = 4 * CHUNK

    @property
    def where(self) -> str:
        return self.head.name

    @property
    def nbytes(self) -> int:
        return 2 * self.head.type.nbytes

    def run(self, folders: Folders) -> Iterator[Finding]:
        tied = self.embeddings.name
        ours, other = (memoryview(bytearray(CHUNK)) for _ in range(2))
        size = self.head.type.nbytes
        for at in range(0, size, CHUNK):
            ours, other = ours[: size - at], other[: size - at]
            folders.output.read(self.head, at, ours)
            folders.output.read(self.embeddings, at, other)
            if bytes(ours) != bytes(other):
                message = f"tied to {tied!r} by the config, but other bytes are stored for it"
                yield Finding("QC025", "error", self.head.name, message)
                return
        message = f"tied to {tied!r} by the config; the same bytes are stored twice"
        yield Finding("QC025", "warning", self.head.name, message)


@validator("a tied head is not stored in addition to the embeddings", "data", "model")
def tied_head(folder: Folder) -> Iterator[CompareTied]:
    checkpoint = folder.checkpoint
    role_index = checkpoint.role_index
    if not role_index.dims.tied or role_index.family.tied is None:
        return
    head, embeddings = (role_index.named(role) for role in role_index.family.tied)
    if head is None or embeddings is None:
        return
    one, other = checkpoint[head], checkpoint[embeddings]
    if one.type == other.type:  # else QC014
        yield CompareTied(one, other)
