"""Layout of outputs in files, at which byte: all known before the first read.

Whether a shard of the source is hard-linked instead: passes/stages.py (`_linkable`) says where it would
be right, run/folder/prepare.py (`_links`) where it can be done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from qconvert.checkpoint.checkpoint import INDEX, SINGLE
from qconvert.checkpoint.safetensors import build_header, header_places
from qconvert.core.dtypes import DTYPE_BITS, TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, Source
from qconvert.core.names import in_model_order
from qconvert.core.shown import exact_size, format_size
from qconvert.models.calibrated import calibrated_in
from qconvert.plan.units import Unit

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


# The order of units in which output files are finished one after another, and the disk that takes. A
# file whose last unit is done can be sent and removed while others are filled. Units are grouped by
# the first file that they write to; a group's files are on disk until the last group that writes to
# them.

# Without a budget so many finished files of the largest size may wait to be sent.
WAITING_FILES = 3
# Shards of the default size may be too large for a budget: these parts of it are tried then.
_PARTS = (4, 8, 16, 32)
_LEAST_SHARD = 4096

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """Disk for files that are not sent yet, in bytes: the `least` that a run can go on with, of which
    one file may be on its way while the next is filled, and what it `takes` at most. `rest` is beside
    them: side files, records."""

    least: int
    takes: int
    rest: int


def places_of(layouts: Sequence[ShardLayout]) -> dict[str, Place]:
    """File number and offset of every output, the files of all folders counted through."""
    found: dict[str, Place] = {}
    base = 0
    for layout in layouts:
        found |= {name: (base + n, at) for name, (n, at) in layout.places.items()}
        base += len(layout.files)
    return found


def files_of(unit: Unit, places: Mapping[str, Place]) -> frozenset[int]:
    """Numbers of the files that a unit writes to."""
    return frozenset(places[name][0] for name in unit.names)


def in_file_order(
    todo: Sequence[tuple[int, Unit]], places: Mapping[str, Place]
) -> list[tuple[int, Unit]]:
    """Units with their numbers, in the order of the first place that each writes to."""
    return sorted(todo, key=lambda item: min(places[name] for name in item[1].names))


def peak(units: Sequence[Unit], layouts: Sequence[ShardLayout]) -> int:
    """The most bytes of files that are begun and not finished. Weights that are calibrated come in no
    order of files: with them it is all."""
    sizes = [file.size for layout in layouts for file in layout.files]
    if any(calibrated_in(unit) is not None for unit in units):
        return sum(sizes)
    groups: dict[int, set[int]] = {}
    places = places_of(layouts)
    for unit in units:
        written = files_of(unit, places)
        groups.setdefault(min(written), set()).update(written)
    last = {file: group for group in sorted(groups) for file in groups[group]}
    most, live = 0, set[int]()
    for group in sorted(groups):
        live |= groups[group]
        most = max(most, sum(sizes[file] for file in live))
        live = {file for file in live if last[file] > group}
    return max(most, *sizes)


def disk_room(
    units: Sequence[Unit], layouts: Sequence[ShardLayout], rest: int, budget: int | None
) -> DiskRoom:
    """Return what a run that sends its files takes. `rest` bytes lie beside them."""
    sizes = [file.size for layout in layouts for file in layout.files]
    begun, total = peak(units, layouts), sum(sizes)
    least = min(total, begun + max(sizes)) + rest
    if budget is None:
        budget = begun + WAITING_FILES * max(sizes) + rest
    return DiskRoom(least, min(budget, total + rest), rest)


def smaller_shards(budget: int) -> Iterator[int]:
    """Sizes of shards to try where those of the default size do not fit a budget, largest first."""
    for part in _PARTS:
        if (size := budget // part) >= _LEAST_SHARD:
            yield size


def refuse(budget: int, least: int, *, chosen: bool) -> PlanError:
    """Why a budget is too small. `chosen`: the size of shards was the user's."""
    smaller = ", or a smaller --max-shard-size" if chosen else ""
    return PlanError(
        f"--disk-budget {exact_size(budget)} is too small: a file that is sent, the next one that is "
        f"filled, and side files take {format_size(least)}; give {exact_size(least)} or more{smaller}"
    )
