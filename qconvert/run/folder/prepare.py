"""A plan made ready to run: cut into units and files, with its share of memory. Nothing is written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.checkpoint.checkpoint import Checkpoint, file_size
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output
from qconvert.core.profiling import phase
from qconvert.core.shown import exact_size, format_size
from qconvert.models.calibrated import calibrated_in
from qconvert.plan.plan import Plan
from qconvert.plan.units import Unit, units
from qconvert.run.work.file_layout import Link, ShardLayout, lay_out
from qconvert.run.work.files import can_link, existing_parent
from qconvert.run.work.memory import SEND_BYTES, MemoryShare, share_out
from qconvert.run.work.options import DEFAULT_SHARD_BYTES, RunOptions, check_installed
from qconvert.run.work.reader import FETCH_BYTES

if TYPE_CHECKING:
    from qconvert.run.work.file_layout import DiskRoom

# Journal, receipt and index lines of one tensor, generously.
_RECORD_BYTES = 2048


@dataclass(frozen=True)
class Prepared:
    """A plan ready to run: its units, files, and share of memory. Everything that can be refused
    without touching the output folder has been. Plans that run together have the units and the
    share in common, and the `room` on disk of a run that sends its files."""

    plan: Plan
    options: RunOptions
    fingerprint: str
    units: tuple[Unit, ...]
    layout: ShardLayout
    share: MemoryShare
    room: DiskRoom | None = None


def prepare(plan: Plan, options: RunOptions) -> Prepared:
    """Cut the plan into units and files and share out the memory. Raises PlanError where a unit
    cannot fit. Reads no tensor data and writes nothing."""
    return prepare_together([plan], options)[0]


@phase("prepare")
def prepare_together(plans: Sequence[Plan], options: RunOptions) -> list[Prepared]:
    """As `prepare`, for plans over one checkpoint that share computed values: each value is computed
    once, and written for every plan that wants it. Their tensors must have different names."""
    if options.engine == "ray":
        check_installed()
    merged: dict[str, Output] = {}
    for plan in plans:
        merged.update(plan.tensors)
    assert len(merged) == sum(len(plan.tensors) for plan in plans), "a name in two folders"
    cut = tuple(units(merged))
    tensors = max(len(plans[0].checkpoint), len(merged))
    # A backend takes memory of its own, after the workers have given theirs back.
    workers = [unit for unit in cut if calibrated_in(unit) is None] or cut[:1]
    share = _share(plans[0], workers, tensors, options)
    if options.streamed:
        return _prepare_streamed(plans, options, cut, share)
    layouts = _laid_out(plans, options)
    return [
        Prepared(plan, options, plan.fingerprint(), cut, layout, share)
        for plan, layout in zip(plans, layouts, strict=True)
    ]


def _laid_out(plans: Sequence[Plan], options: RunOptions) -> list[ShardLayout]:
    """The files of each plan."""
    layouts = []
    for plan in plans:
        metadata = {"format": plan.checkpoint.metadata.get("format", "pt"), **plan.metadata}
        links = []
        if options.link_near is not None:
            links = _links(plan, options.link_near, options.shard_bytes)
        layouts.append(lay_out(plan.tensors, options.shard_bytes, metadata, links))
    return layouts


def _prepare_streamed(
    plans: Sequence[Plan], options: RunOptions, cut: tuple[Unit, ...], share: MemoryShare
) -> list[Prepared]:
    """Plans whose files are sent while they are made. Where shards of the default size are too large for
    the disk budget, smaller ones are taken. Raises PlanError where none fit."""
    from qconvert.run.work.file_layout import disk_room, refuse, smaller_shards

    budget = options.disk_budget
    rest = sum(map(_beside, plans))
    layouts = _laid_out(plans, options)
    room = disk_room(cut, layouts, rest, budget)
    chosen = options.shard_bytes != DEFAULT_SHARD_BYTES
    sizes = iter(() if budget is None or chosen else smaller_shards(budget))
    least = room.least
    while budget is not None and room.least > budget:
        if (size := next(sizes, None)) is None:
            raise refuse(budget, least, chosen=chosen)
        options = replace(options, max_shard_size=size)
        layouts = _laid_out(plans, options)
        room = disk_room(cut, layouts, rest, budget)
        least = min(least, room.least)
    return [
        Prepared(plan, options, plan.fingerprint(), cut, layout, share, room)
        for plan, layout in zip(plans, layouts, strict=True)
    ]


def _share(first: Plan, workers: Sequence[Unit], tensors: int, options: RunOptions) -> MemoryShare:
    """Return what each worker gets. Those that read a store have its client, too."""
    from qconvert.run.work.memory import share_on_cluster

    far = any(shard.remote is not None for shard in first.checkpoint.shards)
    client = FETCH_BYTES if far else 0
    if options.engine != "local":
        return share_on_cluster(workers, tensors, options.memory, options.jobs, client)
    sender = SEND_BYTES if options.streamed else 0
    return share_out(workers, tensors, options.memory, options.jobs, client, sender)


def _links(plan: Plan, near: Path, max_shard_size: int) -> list[Link]:
    """The plan's linkable source files that can be hard-linked to the output's disk, and are not larger
    than an explicit --max-shard-size."""
    folder = existing_parent(near)
    linked = _linked_already(near)
    # Published shards are about as large as the default, some a little larger.
    largest = max_shard_size if max_shard_size != DEFAULT_SHARD_BYTES else sys.maxsize
    by_shard: dict[int, list[tuple[str, TensorType, int]]] = {n: [] for n in plan.linkable}
    for name, source in plan.checkpoint.items():
        if source.shard in by_shard:
            by_shard[source.shard].append((name, source.type, source.offset))
    return [
        Link(shard.path, shard.size, tuple(sorted(tensors, key=lambda entry: entry[2])))
        for number, tensors in by_shard.items()
        if (shard := plan.checkpoint.shards[number]).size <= largest
        and shard.remote is None
        and (shard.inode in linked or can_link(shard.path, folder))
    ]


def _linked_already(near: Path) -> frozenset[int]:
    """Inodes of shards that already lie in the output. Another link would only change the source's
    ctime, and a resumed run would have to hash its bytes again."""
    return frozenset(file.stat().st_ino for file in near.glob("**/*.safetensors") if file.is_file())


def side_bytes(plan: Plan) -> int:
    """Size of the side files that travel along. Raises CheckpointError if one cannot be read."""
    source = plan.checkpoint
    for name in plan.side_files:
        source.real(name)  # some are made when they are asked for
    return sum(_size(source, name) for name in plan.side_files)


def _size(source: Checkpoint, name: str) -> int:
    """Bytes of a side file, where the source has it: of a delta beside it. Raises CheckpointError for
    one that cannot be read."""
    found = source.there(name)
    return file_size(source.root / name) if found is None else found.st_size


def disk_bytes(ready: Prepared) -> int:
    """Bytes a run will put on disk at a time, generously."""
    if ready.room is not None:
        return ready.room.takes
    return ready.layout.written + _beside(ready.plan)


def _beside(plan: Plan) -> int:
    """Bytes of what lies beside the shards, generously."""
    records = _RECORD_BYTES * len(plan.tensors)
    texts = sum(len(text.encode()) for text in plan.new_files.values())
    return side_bytes(plan) + texts + records


def whole_result(ready: Sequence[Prepared], beside: int = 0) -> int:
    """Most bytes below the output folders of a run that makes all of its result here, with `beside` for
    what a calibration keeps there meanwhile. A source in a store or on the Hub takes none: its ranges
    are held in memory. An upper bound: shards that are hard-linked to the
    source's take none, and are not counted."""
    return sum(map(disk_bytes, ready)) + beside


def check_disk_budget(budget: int | None, need: int, what: str) -> None:
    """Raise PlanError where a run needs more disk than it was given, with the smallest budget that
    works; `what` names what takes it."""
    if budget is not None and need > budget:
        raise PlanError(
            f"--disk-budget {exact_size(budget)}: {what} takes up to {format_size(need)} of disk; give "
            f"--disk-budget {_rounded(need)} or more, or choose a smaller format"
        )


def _rounded(need: int) -> str:
    """The next whole MiB, as one would write it."""
    return f"{-(-need >> 20)}MiB"
