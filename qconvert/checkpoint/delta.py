"""A delta: what turns one checkpoint into another of the same model, in a folder.

    DIR/qconvert-delta.json       tensors, hashes and changed chunks, as below
    DIR/config.json               `{"model_type": "qconvert_delta"}`: no library takes it for a model
    DIR/model-00001-of-00002...   changed chunks, each U8 [n] under `TENSOR[CHUNK]`
    DIR/new/...                   config.json, and each other file that is new or has changed

A tensor's bytes are cut into chunks of CHUNK bytes. Of a chunk that changed in few places its blob
holds, little-endian: `counts` U32 [blocks], how many elements changed in each BLOCK elements; `offsets`
U16 [changed], their places within the block, ascending; `values` [changed], their new bits. A blob as
long as the chunk holds its new bytes. An element has the width of the dtype; of dtypes below a byte it
is a byte. Compared are bits, whatever they encode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from qconvert.checkpoint.checkpoint import MANIFEST, RECEIPT, Checkpoint, extended
from qconvert.core.dtypes import DTYPE_BITS, TensorType, ceil_div
from qconvert.core.errors import CheckpointError, PlanError
from qconvert.core.json_text import parse_object
from qconvert.core.links import PER_TENSOR, SMALL

DELTA = "qconvert-delta.json"
NEW = "new"  # the folder of files that are not the old ones
MODEL_TYPE = "qconvert_delta"
VERSION = 1
NOTHING = TensorType(
    "U8", (0,)
)  # under MODEL_TYPE, where no chunk changed: a folder holds some tensor
CHUNK = 32 << 20  # bytes
BLOCK = 1 << 16  # elements
_COUNT, _OFFSET = 4, 2  # bytes


class Chunk(NamedTuple):
    """A chunk that changed: its number, how many elements did, and xxh3-128 of its bytes before (none
    where there was no such tensor) and after."""

    number: int
    changed: int
    old: str
    new: str

    @property
    def start(self) -> int:
        return self.number * CHUNK


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """A tensor of the new checkpoint: type, xxh3-128 of its bytes, and the chunks of it that are not
    those of the old one. `whole`: none of it is taken from the old one."""

    type: TensorType
    xxh3: str
    chunks: tuple[Chunk, ...]
    whole: bool

    def size(self, chunk: Chunk) -> int:
        """Bytes of a chunk."""
        return min(CHUNK, self.type.nbytes - chunk.start)


def width(kind: TensorType) -> int:
    """Bytes of an element."""
    return max(1, DTYPE_BITS[kind.dtype] // 8)


def blob_bytes(size: int, element: int, changed: int) -> int:
    """Bytes of the blob of a chunk of `size` bytes: never more than the chunk's own."""
    sparse = _COUNT * ceil_div(size // element, BLOCK) + changed * (_OFFSET + element)
    return min(size, sparse)


def blob_name(tensor: str, chunk: Chunk) -> str:
    return f"{tensor}[{chunk.number}]"


@dataclass(frozen=True, slots=True)
class Delta:
    """The content of DELTA. `old` and `new` are the checkpoints' header digests; `tensors` are those of
    the new one, in its order; `files` those in NEW, `kept` the old one's that the new one has, too."""

    old: str
    new: str
    tensors: Mapping[str, ChangedTensor]
    files: tuple[str, ...]
    kept: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        tensors = {
            name: {
                "dtype": one.type.dtype, "shape": list(one.type.shape), "xxh3": one.xxh3,
                **({"whole": True} if one.whole else {}),
                **({"chunks": [list(chunk) for chunk in one.chunks]} if one.chunks else {}),
            }
            for name, one in self.tensors.items()
        }  # fmt: skip
        return {
            MODEL_TYPE: VERSION, "old": self.old, "new": self.new, "files": list(self.files),
            "kept": list(self.kept), "tensors": tensors,
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Patched(Checkpoint):
    """A checkpoint with the chunks of a delta beside its tensors (as sources `TENSOR[CHUNK]`), and with
    the new one's files in place of its own: what the pass `apply_delta` reads."""

    delta: Delta = field(default_factory=lambda: Delta("", "", {}, (), ()))
    patches: Checkpoint | None = None

    @property
    def added(self) -> str:
        return " and the delta"

    def real(self, name: str) -> Path:
        folder, path = self._place(name)
        return Checkpoint.real(self, name) if folder is self else folder.real(path)

    def open_file(self, name: str) -> BinaryIO:
        folder, path = self._place(name)
        return Checkpoint.open_file(self, name) if folder is self else folder.open_file(path)

    def there(self, name: str) -> os.stat_result | None:
        folder, path = self._place(name)
        return Checkpoint.there(self, name) if folder is self else folder.there(path)

    def read(self, name: str, limit: int = SMALL) -> bytes | None:
        if name == RECEIPT or (name == MANIFEST and MANIFEST not in self.delta.files):
            return None  # those of the old one say nothing of the new
        folder, path = self._place(name)
        return Checkpoint.read(self, name, limit) if folder is self else folder.read(path, limit)

    @property
    def old_names(self) -> list[str]:
        """The tensors of the old checkpoint."""
        blobs = () if self.patches is None else self.patches.sources
        return [name for name in self.sources if name not in blobs]

    def _place(self, name: str) -> tuple[Checkpoint, str]:
        if self.patches is not None and name in self.delta.files:
            return self.patches, f"{NEW}/{name}"
        return self, name


def patched(old: Checkpoint, patches: Checkpoint) -> Patched:
    """A checkpoint and a delta's folder as one. Raises CheckpointError where the folder is no delta, is
    broken, or is one of another checkpoint than this."""
    delta = read_delta(patches)
    if delta.old != old.header_digest:
        raise CheckpointError(
            f"{patches.name}: is a delta of a checkpoint with other tensors (digest of their headers "
            f"{delta.old[:12]}) than {old.name} ({old.header_digest[:12]}); name the folder that "
            "`qconvert delta` compared, or its copy"
        )
    data = patches.read(f"{NEW}/config.json")
    if data is None:
        raise CheckpointError(f"{patches.name}: {NEW}/config.json is missing; copy the delta again")
    first = len(old.shards)
    blobs = {
        name: replace(one, shard=first + one.shard)
        for name, one in patches.items()
        if one.type.numel
    }
    for name in blobs.keys() & old.sources.keys():
        raise CheckpointError(f"{patches.name}: {name!r} is a tensor of {old.name}, too")
    files = {*delta.files, *delta.kept} - {"config.json", MANIFEST}
    return extended(
        Patched,
        old,
        patches.shards,
        blobs,
        [patches.header_digest],
        config=parse_object(data, patches.root / NEW / "config.json"),
        config_bytes=data,
        side_files=tuple(sorted(files)),
        warnings=(*old.warnings, *patches.warnings),
        delta=delta,
        patches=patches,
    )


def read_delta(patches: Checkpoint) -> Delta:
    """The content of a delta's folder, checked against its blobs. Raises CheckpointError."""
    where = patches.root / DELTA
    data = patches.read(DELTA, 4 * SMALL + 4 * PER_TENSOR * (len(patches) + 1) + (64 << 20))
    if data is None:
        raise CheckpointError(
            f"{patches.name}: expected a folder of `qconvert delta`, found no {DELTA}"
        )
    found = parse_object(data, where)
    if found.get(MODEL_TYPE) != VERSION:
        raise CheckpointError(
            f"{where}: expected version {VERSION} of the format, found {found.get(MODEL_TYPE)!r}; a "
            "newer qconvert may know it"
        )
    try:
        delta = Delta(
            str(found["old"]), str(found["new"]),
            {str(name): _tensor(one) for name, one in found["tensors"].items()},
            tuple(map(str, found["files"])), tuple(map(str, found["kept"])),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, PlanError) as error:
        raise CheckpointError(f"{where}: is broken ({error}); copy the delta again") from error
    _check_blobs(delta, patches)
    return delta


def _tensor(one: Mapping[str, Any]) -> ChangedTensor:
    """Raises what a broken entry leads to."""
    kind = TensorType(str(one["dtype"]), tuple(map(int, one["shape"])))
    chunks = tuple(Chunk(int(a), int(b), str(c), str(d)) for a, b, c, d in one.get("chunks", ()))
    numbers = [chunk.number for chunk in chunks]
    count, whole = ceil_div(kind.nbytes, CHUNK), bool(one.get("whole", False))
    if numbers != sorted(set(numbers) & set(range(count))) or (whole and len(numbers) != count):
        raise ValueError(f"chunks {numbers[:4]} of {count}")
    return ChangedTensor(kind, str(one["xxh3"]), chunks, whole)


def _check_blobs(delta: Delta, patches: Checkpoint) -> None:
    wanted = dict(_blobs(delta)) or {MODEL_TYPE: NOTHING}
    for name in sorted(wanted.keys() | patches.sources.keys()):
        found = patches[name].type if name in patches else None
        if found != wanted.get(name):
            raise CheckpointError(
                f"{patches.name}: {name!r}: expected {wanted.get(name)}, found {found}; copy the delta "
                "again"
            )


def _blobs(delta: Delta) -> Iterator[tuple[str, TensorType]]:
    for name, one in delta.tensors.items():
        for chunk in one.chunks:
            size, element = one.size(chunk), width(one.type)
            if not 0 <= chunk.changed <= size // element:
                raise CheckpointError(
                    f"{DELTA}: {name!r} has {chunk.changed} changed elements in a chunk"
                )
            yield (
                blob_name(name, chunk),
                TensorType("U8", (blob_bytes(size, element, chunk.changed),)),
            )
