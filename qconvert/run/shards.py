"""Layout of outputs in files, at which byte: all known before the first read.

Whether a shard of the source is hard-linked instead: passes/stages.py (`_linkable`) says where it would
be right, run/prepare.py (`_links`) where it can be done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from qconvert.checkpoint.checkpoint import INDEX, SINGLE
from qconvert.checkpoint.safetensors import build_header, header_places
from qconvert.core.dtypes import DTYPE_BITS, TensorType
from qconvert.core.graph import Output, Source
from qconvert.core.names import in_model_order

# Bytes that an element's place is a multiple of.
_WIDTHS = {dtype: max(1, bits // 8) for dtype, bits in DTYPE_BITS.items()}


@dataclass(frozen=True, slots=True)
class OutFile:
    """One safetensors file to be: its name, its tensors as one who opens the folder finds them, in the
    order of the file, and the metadata of its header. `link` is the source file that will stand in as it
    is, None for a file to be written."""

    name: str
    tensors: tuple[Source, ...]
    size: int
    metadata: Mapping[str, str]
    link: Path | None = None

    @property
    def header(self) -> bytes:
        """The header's bytes, b"" of a file that is not written. Made when they are written or compared,
        not kept: those of Kimi-K2's 276,480 tiles take 28 MB."""
        if self.link is not None:
            return b""
        return build_header([(one.name, one.type) for one in self.tensors], self.metadata)[0]


@dataclass(frozen=True)
class ShardLayout:
    """All files of an output."""

    files: tuple[OutFile, ...]

    @cached_property
    def places(self) -> Mapping[str, tuple[int, int]]:
        """A tensor's (file index, offset in that file)."""
        return {one.name: (one.shard, one.offset) for file in self.files for one in file.tensors}

    @property
    def nbytes(self) -> int:
        """Bytes of all files, linked ones too."""
        return sum(file.size for file in self.files)

    @property
    def written(self) -> int:
        """Bytes of the files that are written."""
        return sum(file.size for file in self.files if file.link is None)

    def index_json(self) -> bytes | None:
        """The index, or None for a single file (which needs none)."""
        if len(self.files) == 1:
            return None
        weight_map = {one.name: file.name for file in self.files for one in file.tensors}
        total = sum(one.type.nbytes for file in self.files for one in file.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        return (json.dumps(index, indent=2) + "\n").encode()

    @property
    def commit_name(self) -> str:
        """The file whose rename makes the folder a checkpoint: the index, or the single file."""
        return INDEX if len(self.files) > 1 else SINGLE


@dataclass(frozen=True, slots=True)
class Link:
    """A source file that holds nothing but outputs as they are: where, its size, and the tensors in
    it with their offsets."""

    path: Path
    size: int
    tensors: tuple[tuple[str, TensorType, int], ...]


def lay_out(
    outputs: Mapping[str, Output],
    max_bytes: int,
    metadata: Mapping[str, str],
    links: Sequence[Link] = (),
) -> ShardLayout:
    """Fill files in the order a model runs in, each with at most `max_bytes` of tensor data (a
    larger tensor gets a file of its own). `links` come first, as they are."""
    linked = {name for link in links for name, _, _ in link.tensors}
    group: list[str] = []
    groups = [group]
    filled = 0
    for name in in_model_order([name for name in outputs if name not in linked]):
        size = outputs[name].type.nbytes
        if group and filled + size > max_bytes:
            group = []
            groups.append(group)
            filled = 0
        group.append(name)
        filled += size
    if links and not groups[-1]:
        groups.pop()
    count = len(links) + len(groups)
    files = []
    for number, link in enumerate(links):
        held = tuple([Source(name, kind, number, at) for name, kind, at in link.tensors])
        files.append(OutFile(_name(number, count), held, link.size, {}, link.path))
    for number, group in enumerate(groups, len(links)):
        ordered = _aligned_order([(name, outputs[name].type) for name in group])
        length, offsets = header_places(ordered, metadata)
        last = offsets[-1] + ordered[-1][1].nbytes if ordered else length
        placed = tuple(
            [Source(n, t, number, at) for (n, t), at in zip(ordered, offsets, strict=True)]
        )
        files.append(OutFile(_name(number, count), placed, last, metadata))
    return ShardLayout(tuple(files))


def _name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _aligned_order(tensors: list[tuple[str, TensorType]]) -> list[tuple[str, TensorType]]:
    """The given order if it leaves every tensor at a multiple of its element size, else largest
    elements first (as safetensors' own writer sorts): loaders map tensors in place, and the format
    allows no padding between them."""
    at = 0
    for _, kind in tensors:
        if at % _WIDTHS[kind.dtype]:
            return sorted(tensors, key=lambda pair: -DTYPE_BITS[pair[1].dtype])
        at += kind.nbytes
    return tensors
