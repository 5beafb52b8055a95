"""Writing of a delta: two checkpoints compared chunk by chunk, and what changed, in a folder.

A chunk of each is in memory at a time, and up to SHARD_BYTES of what changed. A run that is killed
leaves OUT without its list (DELTA, written last) and begins anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from qconvert.checkpoint.checkpoint import MANIFEST, Checkpoint
from qconvert.checkpoint.delta import (
    BLOCK,
    CHUNK,
    DELTA,
    MODEL_TYPE,
    NEW,
    NOTHING,
    ChangedTensor,
    Chunk,
    Delta,
    blob_bytes,
    blob_name,
    width,
)
from qconvert.checkpoint.safetensors import build_header
from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import OutputError
from qconvert.core.graph import Source
from qconvert.run.work.events import Events
from qconvert.run.work.files import PARTIAL, Files, write_whole
from qconvert.run.work.reader import Reader

if TYPE_CHECKING:
    import numpy as np

SHARD_BYTES = 256 << 20
_MARK = ".qconvert-delta"  # in OUT while it is written; locked by the run that writes
_CONFIG = "config.json"


@dataclass(frozen=True)
class WrittenDelta:
    """A delta that was written: its folder and content, the bytes of its chunks, and of the new
    checkpoint's tensors."""

    out: Path
    delta: Delta
    nbytes: int
    of_bytes: int

    @property
    def changed(self) -> int:
        """Tensors that are not the old ones."""
        return sum(bool(one.chunks) or one.whole for one in self.delta.tensors.values())


@dataclass(eq=False)
class _Shards:
    """Blobs that wait for their shard, and shards that were written."""

    folder: Path
    files: Files
    waiting: list[tuple[str, TensorType, bytes]] = field(default_factory=list)
    count: int = 0
    nbytes: int = 0

    def add(self, name: str, blob: bytes) -> None:
        self.waiting.append((name, TensorType("U8", (len(blob),)), blob))
        self.nbytes += len(blob)
        if sum(kind.nbytes for _, kind, _ in self.waiting) >= SHARD_BYTES:
            self.write()

    def write(self) -> None:
        if not self.waiting:
            return
        self.count += 1
        header, _ = build_header([(name, kind) for name, kind, _ in self.waiting], {"format": "pt"})
        file = self.folder / f"model-{self.count:05}.safetensors"
        write_whole(file, [header, *(blob for _, _, blob in self.waiting)], self.files)
        self.waiting.clear()

    def finish(self) -> None:
        """Write what waits, and name the shards as a complete set; one is there in any case."""
        if not self.count and not self.waiting:
            self.waiting.append((MODEL_TYPE, NOTHING, b""))
        self.write()
        for number in range(1, self.count + 1):
            file = self.folder / f"model-{number:05}.safetensors"
            self.files.rename(file, file.with_name(f"{file.stem}-of-{self.count:05}.safetensors"))


def write_delta(
    old: Checkpoint, new: Checkpoint, out: Path, events: Events, files: Files | None = None
) -> WrittenDelta:
    """Write what turns `old` into `new`. Raises OutputError where `out` is not empty, CheckpointError
    where a source cannot be read or changes meanwhile."""
    files = files or Files()
    with _claimed(out, files):
        shards = _Shards(out, files)
        tensors: dict[str, ChangedTensor] = {}
        readers = Reader(old.shards), Reader(new.shards)
        events.start(new.nbytes, 0)
        try:
            for name, source in new.items():
                chunks = _Chunks(old.sources.get(name), source, readers)
                tensors[name] = chunks.compared(shards, events)
        finally:
            for reader in readers:
                reader.close()
        shards.finish()
        for file in out.glob("*.safetensors"):
            files.restrict(file, new.strictest_mode)
        old.check_unchanged()
        new.check_unchanged()
        changed, kept = _files(old, new)
        for name, data in changed.items():
            files.make_folder((out / NEW / name).parent)
            write_whole(out / NEW / name, [data], files)
        write_whole(out / _CONFIG, [_text({"model_type": MODEL_TYPE})], files)
        delta = Delta(old.header_digest, new.header_digest, tensors, tuple(changed), kept)
        write_whole(out / DELTA, [_text(delta.as_json())], files)
    return WrittenDelta(out, delta, shards.nbytes, new.nbytes)


@dataclass(frozen=True)
class _Chunks:
    """A tensor of the new checkpoint, and that of the same name in the old one."""

    old: Source | None
    new: Source
    readers: tuple[Reader, Reader]

    def compared(self, shards: _Shards, events: Events) -> ChangedTensor:
        """Compare chunk by chunk, and hand on the blobs of those that changed."""
        kind, digest = self.new.type, xxhash.xxh3_128()
        whole = self.old is None or self.old.type != kind
        found: list[Chunk] = []
        most = min(CHUNK, kind.nbytes)
        buffers = memoryview(bytearray(most)), memoryview(bytearray(0 if whole else most))
        for number in range(ceil_div(kind.nbytes, CHUNK)):
            start = number * CHUNK
            size = min(CHUNK, kind.nbytes - start)
            now, before = (buffer[:size] for buffer in buffers)
            self.readers[1].read(self.new, start, now)
            digest.update(now)
            if self.old is not None and not whole:
                self.readers[0].read(self.old, start, before)
            if whole or now != before:
                changed, blob = _blob(None if whole else before, now, width(kind))
                was = "" if whole else xxhash.xxh3_128_hexdigest(before)
                found.append(Chunk(number, changed, was, xxhash.xxh3_128_hexdigest(now)))
                shards.add(blob_name(self.new.name, found[-1]), blob)
            events.wrote(size)
        return ChangedTensor(kind, digest.hexdigest(), tuple(found), whole)


def _blob(before: memoryview | None, now: memoryview, element: int) -> tuple[int, bytes]:
    """The number of elements of a chunk that changed, and its blob. Of a chunk that is new, all did."""
    import numpy as np

    count = now.nbytes // element
    if before is None:
        return count, bytes(now)
    kind = np.dtype(f"u{element}")
    values = np.frombuffer(now, kind)
    places = np.flatnonzero(values != np.frombuffer(before, kind))
    if blob_bytes(now.nbytes, element, places.size) == now.nbytes:
        return places.size, bytes(now)
    counts = np.bincount(places // BLOCK, minlength=ceil_div(count, BLOCK)).astype("<u4")
    offsets = (places % BLOCK).astype("<u2")
    parts: list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]
    parts = [counts, offsets, values[places]]
    return places.size, b"".join(part.tobytes() for part in parts)


def _files(old: Checkpoint, new: Checkpoint) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The files beside the new checkpoint's tensors: those that are not the old one's, config.json
    always, and the names of the others."""
    changed, kept = {_CONFIG: new.config_bytes}, []
    for name in (MANIFEST, *new.side_files):
        if (now := _content(new, name)) is None:
            continue
        if now == _content(old, name):
            kept.append(name)
        else:
            changed[name] = now
    return changed, tuple(kept)


def _content(checkpoint: Checkpoint, name: str) -> bytes | None:
    if name not in checkpoint.side_files and checkpoint.there(name) is None:
        return None
    with checkpoint.open_file(name) as stream:
        return stream.read()


def _text(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


@contextmanager
def _claimed(out: Path, files: Files) -> Iterator[None]:
    """An empty folder of our own. What an earlier run left is removed: it has our mark, and its list was
    not written. Raises OutputError for any other folder that is not empty, and while another run writes
    there."""
    mark = out / _MARK
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out}: is a file; name a folder")
    there = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if there and (_MARK not in there or DELTA in there):
        raise OutputError(f"{out}: holds {there[0]!r}; name a folder that is empty or not there")
    files.make_folder(out)
    fd = os.open(mark, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OutputError(f"{out}: another run writes there; wait for it") from error
        for left in [*out.glob("model-*.safetensors"), *out.glob(f".*{PARTIAL}"), out / _CONFIG]:
            left.unlink(missing_ok=True)
        shutil.rmtree(out / NEW, ignore_errors=True)
        yield
        mark.unlink()
        files.sync_folder(out)
    finally:
        os.close(fd)
