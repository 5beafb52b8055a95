"""execute: a checked plan becomes a folder, in bounded memory, resumable, published at the end."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from hashlib import sha256 as new_sha256
from pathlib import Path
from typing import Any, Protocol

import xxhash

from qconvert import __version__
from qconvert.checkpoint.checkpoint import INDEX, MANIFEST, RECEIPT, WORK_DIR, file_size
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import OutputError, PlanError, QConvertError
from qconvert.plan.manifest import described
from qconvert.plan.plan import Plan
from qconvert.plan.units import Unit, units
from qconvert.run.committer import COMMIT_BYTES, Committer
from qconvert.run.files import Files, can_link, existing_parent
from qconvert.run.journal import Journal
from qconvert.run.memory import Share, share_out
from qconvert.run.outside import Maker, Wanted, made_outside, open_desk
from qconvert.run.pool import BATCH_BYTES, Numbered, cut_batches, run_here, run_workers
from qconvert.run.shards import DEFAULT_SHARD_BYTES, Layout, Link, lay_out
from qconvert.run.unit_runner import Place, UnitResult
from qconvert.run.worker import Done, Progress, Setup
from qconvert.run.workspace import (
    CALIBRATION,
    Workspace,
    check_apart,
    check_disk,
    check_folders_apart,
)

_READ_BYTES = 4 << 20
# Journal, receipt and index lines of one tensor, generously.
_RECORD_BYTES = 2048


class Events(Protocol):
    """What a run tells while it goes on."""

    def start(self, total: int, done: int) -> None:
        """Bytes to write in all, and those an interrupted run left finished."""

    def wrote(self, nbytes: int) -> None:
        """That many more bytes were written."""

    def phase(self, text: str) -> None:
        """What follows the writing: hashing, publishing."""


class Silent:
    """Events nobody listens to."""

    def start(self, total: int, done: int) -> None:
        pass

    def wrote(self, nbytes: int) -> None:
        pass

    def phase(self, text: str) -> None:
        pass


@dataclass(frozen=True)
class Options:
    """How to run a plan. None lets qconvert choose: `memory` 1 GiB, or what the plan and a worker for
    each core need, half of what is free at most; `jobs` the cores that pay. Sizes in bytes.
    `commit_bytes` is how much work a crash may lose. `link_near`, the output folder, lets source
    files that a plan may hold as they are stand in by hard link where they are on the same disk."""

    memory: int | None = None
    jobs: int | None = None
    max_shard_size: int = DEFAULT_SHARD_BYTES
    sha256: bool = False
    commit_bytes: int = COMMIT_BYTES
    link_near: Path | None = None


@dataclass(frozen=True)
class Receipt:
    """A finished run: where it is, its fingerprint, what was written, remarks (NaN codes met), and
    whether it had been finished before."""

    out: Path
    fingerprint: str
    files: tuple[str, ...]
    nbytes: int
    remarks: tuple[str, ...] = ()
    resumed_units: int = 0
    already_done: bool = False
    share: Share | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Prepared:
    """A plan ready to run: its units, files, and share of memory. Everything that can be refused
    without touching the output folder has been. Plans that run together have the units and the
    share in common."""

    plan: Plan
    options: Options
    fingerprint: str
    units: tuple[Unit, ...]
    layout: Layout
    share: Share


def prepare(plan: Plan, options: Options) -> Prepared:
    """Cut the plan into units and files and share out the memory. Raises PlanError where a unit
    cannot fit. Reads no tensor data and writes nothing."""
    return prepare_together([plan], options)[0]


def prepare_together(plans: Sequence[Plan], options: Options) -> list[Prepared]:
    """As `prepare`, for plans over one checkpoint that share computed values: each value is computed
    once, and written for every plan that wants it. Their tensors must have different names."""
    merged = {name: output for plan in plans for name, output in plan.tensors.items()}
    assert len(merged) == sum(len(plan.tensors) for plan in plans), "a name in two folders"
    cut = tuple(units(merged))
    tensors = max(len(plans[0].checkpoint), len(merged))
    # What a maker computes takes memory of its own, after the workers have given theirs back.
    workers = [unit for unit in cut if made_outside(unit) is None] or cut[:1]
    share = share_out(workers, tensors, options.memory, options.jobs)
    ready = []
    for plan in plans:
        metadata = {"format": plan.checkpoint.metadata.get("format", "pt"), **plan.metadata}
        links = []
        if options.link_near is not None:
            links = _links(plan, options.link_near, options.max_shard_size)
        layout = lay_out(plan.tensors, options.max_shard_size, metadata, links)
        ready.append(Prepared(plan, options, plan.fingerprint(), cut, layout, share))
    return ready


def _links(plan: Plan, near: Path, max_shard_size: int) -> list[Link]:
    """The plan's linkable source files that can be hard-linked where the output will be, and are not
    larger than an explicit --max-shard-size."""
    folder = existing_parent(near)
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
        and can_link(shard.path, folder)
    ]


def execute(
    plan: Plan,
    out: Path,
    options: Options | None = None,
    *,
    events: Events | None = None,
    files: Files | None = None,
    maker: Maker | None = None,
) -> Receipt:
    """Run a checked plan into folder `out`. Calibrated weights are the `maker`'s to compute.

    Interrupted, by anything, the same call goes on where it stopped; the result is byte for byte
    that of an undisturbed run. Raises OutputError (foreign or locked folder, other plan, full
    disk), CheckpointError (the source changed), RunError (data that cannot be right), PlanError
    (memory too small). Nothing is published unless all of it is.
    """
    ready = prepare(plan, options or Options())
    return run_prepared(ready, out, events=events, files=files, maker=maker)


def run_prepared(
    ready: Prepared,
    out: Path,
    *,
    events: Events | None = None,
    files: Files | None = None,
    maker: Maker | None = None,
) -> Receipt:
    """The second half of `execute`, for callers that have shown the user the first."""
    return run_together([(ready, out)], events=events, files=files, maker=maker)[0]


def run_together(
    parts: Sequence[tuple[Prepared, Path]],
    *,
    events: Events | None = None,
    files: Files | None = None,
    maker: Maker | None = None,
) -> list[Receipt]:
    """Run plans that were prepared together, each into its folder, from one read of the source.

    The first folder's journal tells what is done of all of them, and that folder is published last:
    when it is there, all are. Raises as `execute` does.
    """
    told: Events = events or Silent()
    disk = files or Files()
    _check_maker(parts[0][0], maker)
    _check_folders(parts, 0 if maker is None else maker.disk_bytes())
    if maker is not None and not all(_looks_finished(out) for _, out in parts):
        maker.check([out for _, out in parts])
    parts[0][0].plan.checkpoint.check_unchanged()
    spaces: list[Workspace] = []
    journals: list[Journal | None] = []
    try:
        for ready, out in parts:
            spaces.append(Workspace(out, _identity(ready), ready.layout.commit_name, disk))
        if spaces[0].done:
            _check_all_done(spaces)
            return [
                Receipt(
                    out, ready.fingerprint, tuple(_publish_order(ready)), ready.layout.nbytes,
                    tuple(maker.idle()) if maker is not None else (), already_done=True,
                )
                for ready, out in parts
            ]  # fmt: skip
        journals = _open_journals(parts, spaces)
        receipts = _fill_and_publish(parts, spaces, journals, told, disk, maker)
        for journal in journals:
            if journal is not None:
                journal.close()
        journals = []
        for space in reversed(spaces):
            if not space.done:
                space.tidy()
        return receipts
    except BaseException:
        for journal in journals:
            if journal is not None:
                journal.close()
        for space in spaces:
            space.withdraw()
        raise


def _check_maker(ready: Prepared, maker: Maker | None) -> None:
    """Raise PlanError where calibrated weights have nobody to compute them."""
    op = next(filter(None, map(made_outside, ready.units)), None)
    if op is not None and maker is None:
        raise PlanError(
            f"{op.kind} of expert {op.expert} in layer {op.layer} is to be calibrated, and the run "
            "has no maker: give it qconvert.calibrate.maker.maker_for(plans)"
        )


def _check_folders(parts: Sequence[tuple[Prepared, Path]], extra: int) -> None:
    """Refuse folders in one another or in the source, and disks without room for all that is new;
    `extra` bytes go to the first folder."""
    needed: dict[int, int] = {}
    for number, (ready, out) in enumerate(parts):
        check_apart(out, ready.plan.checkpoint)
        for _, other in parts[:number]:
            check_folders_apart(out, other)
        if not (out / WORK_DIR).is_dir() and not (out / MANIFEST).is_file():
            device = existing_parent(out).stat().st_dev
            needed[device] = needed.get(device, 0) + disk_bytes(ready) + (0 if number else extra)
            check_disk(out, needed[device])


def _looks_finished(out: Path) -> bool:
    return (out / MANIFEST).is_file() and not (out / WORK_DIR).is_dir()


def _check_all_done(spaces: Sequence[Workspace]) -> None:
    for space in spaces:
        if not space.done:
            raise OutputError(
                f"{spaces[0].out} is finished, and its other half {space.out} is gone; remove the "
                "former to make both again"
            )


def _open_journals(
    parts: Sequence[tuple[Prepared, Path]], spaces: Sequence[Workspace]
) -> list[Journal | None]:
    """Go on where all folders can; else begin all of them anew. A folder that is finished needs no
    journal. Raises OutputError where one is finished that another begun anew would be written to."""
    begun = {None if s.remembered is None else s.remembered.run for s in spaces if not s.done}
    resumable = None not in begun and len(begun) == 1
    finished = [space for space in spaces if space.done]
    if finished and not (resumable and _all_units_kept(parts[0][0], spaces[0])):
        raise OutputError(
            f"{finished[0].out} is finished, and its other half {spaces[0].out} is not; remove the "
            "former to make both again"
        )
    if not resumable:
        # The first folder's journal goes first: it speaks of files in all of them.
        for space in spaces:
            space.forget()
    run = secrets.token_hex(8)
    journals: list[Journal | None] = []
    # It also comes last, when all files it may speak of are there.
    for (ready, _), space in reversed(list(zip(parts, spaces, strict=True))):
        if space.done:
            journals.append(None)
        elif resumable:
            journals.append(space.resume())
        else:
            journals.append(space.begin(ready.layout, run))
    return journals[::-1]


def _all_units_kept(ready: Prepared, space: Workspace) -> bool:
    return space.remembered is not None and len(space.remembered.units) == len(ready.units)


def _fill_and_publish(
    parts: Sequence[tuple[Prepared, Path]],
    spaces: Sequence[Workspace],
    journals: Sequence[Journal | None],
    told: Events,
    files: Files,
    maker: Maker | None,
) -> list[Receipt]:
    first, journal = spaces[0], journals[0]
    assert journal is not None, "the first folder is published last"
    kept = dict(first.remembered.units) if first.remembered is not None else {}
    remarks = list(first.remembered.remarks) if first.remembered is not None else []
    resumed = len(kept)
    if not any(_is_publishing(space) for space in spaces):
        _run_units(parts, spaces, journal, told, files, maker, kept, remarks)
        parts[0][0].plan.checkpoint.check_unchanged()
    told.phase("publishing")
    for (ready, _), space in zip(parts, spaces, strict=True):
        if not space.done and not _is_publishing(space):
            _stage_the_rest(ready, space, kept)
    for (ready, _), space, its in reversed(list(zip(parts, spaces, journals, strict=True))):
        if its is not None:
            space.publish(_publish_order(ready), its)
    unique = tuple(dict.fromkeys(remarks))
    return [
        Receipt(
            out, ready.fingerprint, tuple(_publish_order(ready)), ready.layout.nbytes, unique,
            resumed, share=ready.share,
        )
        for ready, out in parts
    ]  # fmt: skip


def _is_publishing(space: Workspace) -> bool:
    return space.remembered is not None and space.remembered.publish is not None


def _run_units(
    parts: Sequence[tuple[Prepared, Path]],
    spaces: Sequence[Workspace],
    journal: Journal,
    told: Events,
    files: Files,
    maker: Maker | None,
    kept: dict[int, Sequence[str]],
    remarks: list[str],
) -> None:
    """Run the units that the journal does not know, and add their records to `kept`: those of workers
    first, then what a maker makes."""
    ready = parts[0][0]
    left = [(number, unit) for number, unit in enumerate(ready.units) if number not in kept]
    total = sum(unit.write for unit in ready.units)
    told.start(total, total - sum(unit.write for _, unit in left))
    if not left:
        return
    outside = [
        Wanted(number, op) for number, unit in left if (op := made_outside(unit)) is not None
    ]
    elsewhere = {wanted.number for wanted in outside}
    todo: list[Numbered] = [(number, unit) for number, unit in left if number not in elsewhere]
    paths: list[Path] = []
    places: dict[str, Place] = {}
    for (its, _), space in zip(parts, spaces, strict=True):
        base = len(paths)
        paths += [space.stage / file.name for file in its.layout.files]
        for name, (n, at) in its.layout.places.items():
            places[name] = Place(base + n, at, its.layout.files[n].link is not None)
    share = ready.share
    setup = Setup(ready.plan.checkpoint.shards, paths, share.arena, share.window, os.getpid())
    batches = cut_batches(todo, places, min(BATCH_BYTES, ready.options.commit_bytes))
    committer = Committer(journal, files, paths, ready.options.commit_bytes)

    def finished(number: int, result: UnitResult) -> None:
        kept[number] = result.records
        remarks.extend(result.remarks)
        committer.add(number, result)

    locks = [space.lock_fd for space in spaces if not space.done]
    stream: Generator[Progress | Done] = (
        run_here(setup, batches, files)
        if share.jobs == 1
        else run_workers(setup, share.jobs, batches, locks)
    )
    try:
        # Closed whatever happens here: workers must not outlive the run they belong to.
        with closing(stream):
            for message in stream:
                if isinstance(message, Progress):
                    told.wrote(message.nbytes)
                else:
                    finished(message.number, message.result)
        if outside:
            assert maker is not None, "checked before anything was claimed"
            with open_desk(
                setup, files, dict(left), places, progress=told.wrote, finished=finished,
                lasting=committer.commit,
            ) as desk:  # fmt: skip
                remarks += maker.make(
                    outside, desk, room=spaces[0].work / CALIBRATION, key=ready.fingerprint,
                    files=files, say=told.phase,
                )  # fmt: skip
                desk.commit()
    except (KeyboardInterrupt, QConvertError):
        # What is finished is kept, unless keeping it fails as well.
        with suppress(QConvertError):
            committer.commit()
        raise
    committer.commit()


def _identity(ready: Prepared) -> dict[str, Any]:
    """What makes this run this run. A journal with another identity is not resumed; the manifest
    keeps all of it but the file times."""
    checkpoint = ready.plan.checkpoint
    return {
        "qconvert": __version__,
        "fingerprint": ready.fingerprint,
        "source": checkpoint.header_digest,
        "source_sample": checkpoint.sample_digest,
        "passes": [entry.spec for entry in ready.plan.log],
        "max_shard_size": ready.options.max_shard_size,
        "sha256": ready.options.sha256,
        "linked": [file.name for file in ready.layout.files if file.link is not None],
        "stat": [[shard.size, shard.mtime_ns] for shard in checkpoint.shards],
    }


def side_bytes(plan: Plan) -> int:
    """Size of the side files that travel along. Raises CheckpointError if one cannot be read."""
    return sum(file_size(plan.checkpoint.root / name) for name in plan.side_files)


def disk_bytes(ready: Prepared) -> int:
    """Bytes a run will put on disk, generously."""
    records = _RECORD_BYTES * len(ready.plan.tensors)
    texts = sum(len(text.encode()) for text in ready.plan.new_files.values())
    return ready.layout.written + side_bytes(ready.plan) + texts + records


def _publish_order(ready: Prepared) -> list[str]:
    """Files in the order they are renamed: what makes the folder a checkpoint comes last."""
    commit = ready.layout.commit_name
    shards = [file.name for file in ready.layout.files if file.name != commit]
    others = [*ready.plan.side_files, *ready.plan.new_files]
    return [*shards, *others, RECEIPT, MANIFEST, "config.json", commit]


def _stage_the_rest(
    ready: Prepared, space: Workspace, records: Mapping[int, Sequence[str]]
) -> None:
    """Side files, config, index, manifest and receipt, beside the finished shards."""
    plan = ready.plan
    for name in plan.side_files:
        space.copy_file(plan.checkpoint.root / name, name)
    for name, text in plan.new_files.items():
        space.write_file(space.stage / name, memoryview(text.encode()))
    config = config_bytes(plan)
    space.write_file(space.stage / "config.json", memoryview(config))
    index = ready.layout.index_json()
    if index is not None:
        space.write_file(space.stage / INDEX, memoryview(index))
    manifest = (json.dumps(manifest_of(ready), indent=2) + "\n").encode()
    space.write_file(space.stage / MANIFEST, memoryview(manifest))
    by_name = {
        name: record
        for number, made in records.items()
        for (name, _), record in zip(ready.units[number].outputs, made, strict=True)
    }
    lines = [by_name[name] for file in ready.layout.files for name, _, _ in file.tensors]
    for record in _file_records(ready, space, index is not None):
        lines.append(json.dumps(record, separators=(",", ":")))
    space.write_lines(space.stage / RECEIPT, lines)


def _file_records(ready: Prepared, space: Workspace, indexed: bool) -> list[dict[str, Any]]:
    """A receipt line for every file: shards with their size (and sha256 where asked), the others
    with their hash."""
    found: list[dict[str, Any]] = []
    for file in ready.layout.files:
        line: dict[str, Any] = {"file": file.name, "nbytes": file.size}
        if ready.options.sha256:
            line["sha256"] = _hash(space.stage / file.name, new_sha256())
        found.append(line)
    plan = ready.plan
    made = ["config.json", MANIFEST, *([INDEX] if indexed else [])]
    others = [*plan.side_files, *plan.new_files, *made]
    for name in others:
        path = space.stage / name
        digest = _hash(path, xxhash.xxh3_128())
        line = {"file": name, "nbytes": path.stat().st_size, "xxh3": digest}
        if ready.options.sha256:
            line["sha256"] = _hash(path, new_sha256())
        found.append(line)
    return found


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def _hash(path: Path, digest: _Hash) -> str:
    with path.open("rb") as stream:
        while chunk := stream.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def config_bytes(plan: Plan) -> bytes:
    """config.json: the source's own bytes where no pass changed it."""
    if plan.config == plan.checkpoint.config:
        return plan.checkpoint.config_bytes
    return (json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n").encode()


def manifest_of(ready: Prepared) -> dict[str, Any]:
    """qconvert.json: what was made, from what, by which passes, and what was lost. It holds no
    time and no path, so the same conversion writes the same bytes anywhere."""
    identity = {key: value for key, value in _identity(ready).items() if key != "stat"}
    return {"identity": identity, **described(ready.plan)}
