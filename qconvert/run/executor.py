"""execute: a checked plan becomes a folder, in bounded memory, resumable, published at the end."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from qconvert.checkpoint.checkpoint import MANIFEST, WORK_DIR, Shard, file_size
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import OutputError, PlanError, QConvertError
from qconvert.plan.plan import Plan
from qconvert.plan.units import Unit, units
from qconvert.run.committer import COMMIT_BYTES, Committer
from qconvert.run.files import Files, can_link, existing_parent
from qconvert.run.finished import State, look_over
from qconvert.run.journal import Journal
from qconvert.run.memory import Share, share_out
from qconvert.run.outside import Maker, Wanted, made_outside, open_desk
from qconvert.run.pool import BATCH_BYTES, Numbered, cut_batches, run_here, run_workers
from qconvert.run.preview import Onlooker, Outlook
from qconvert.run.shards import DEFAULT_SHARD_BYTES, Layout, Link, OutFile, lay_out
from qconvert.run.staging import (
    check_staged,
    identity_of,
    lost_shards,
    manifest_bytes,
    planned_places,
    publish_order,
    stage_the_rest,
)
from qconvert.run.unit_runner import Place, UnitResult
from qconvert.run.vouched import (
    LOOK_BACK,
    check_same_sources,
    check_sources,
    check_units,
    seen,
    touched,
    wrong_units,
)
from qconvert.run.worker import Done, Progress, Setup
from qconvert.run.workspace import (
    CALIBRATION,
    JOURNAL,
    Workspace,
    check_apart,
    check_disk,
    check_folders_apart,
)

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
    files that a plan may hold as they are stand in by hard link where they are on the same disk.
    `verify` hashes all that an earlier run left, not only what it left last."""

    memory: int | None = None
    jobs: int | None = None
    max_shard_size: int = DEFAULT_SHARD_BYTES
    sha256: bool = False
    commit_bytes: int = COMMIT_BYTES
    link_near: Path | None = None
    verify: bool = False


@dataclass(frozen=True)
class Receipt:
    """A finished run: where it is, its fingerprint, what was written, remarks (NaN codes met), and
    whether it had been finished before. `repaired` are files of a finished folder that were not as
    they had been made, and are again, with what was wrong."""

    out: Path
    fingerprint: str
    files: tuple[str, ...]
    nbytes: int
    remarks: tuple[str, ...] = ()
    resumed_units: int = 0
    already_done: bool = False
    repaired: Mapping[str, str] = field(default_factory=dict)
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
        and (shard.inode in linked or can_link(shard.path, folder))
    ]


def _linked_already(near: Path) -> frozenset[int]:
    """Inodes of shards that lie in the output already. Another link would do nothing but change the
    source's ctime, and a resumed run would have to look whether its bytes are the same."""
    return frozenset(file.stat().st_ino for file in near.glob("**/*.safetensors") if file.is_file())


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
    first = parts[0][0]
    _check_maker(first, maker)
    _check_folders(parts, 0 if maker is None else maker.disk_bytes())
    if maker is not None and not all(_looks_finished(out) for _, out in parts):
        maker.check([out for _, out in parts])
    checkpoint = first.plan.checkpoint
    # Links of our own change a file's ctime.
    checkpoint.check_unchanged(None if first.options.link_near else checkpoint.shards)
    spaces: list[Workspace] = []
    journals: list[Journal | None] = []
    repaired: list[Mapping[str, str]] = [{} for _ in parts]
    try:
        for ready, out in parts:
            tensors = max(len(checkpoint), len(ready.plan.tensors))
            spaces.append(Workspace(out, identity_of(ready), manifest_bytes(ready), tensors, disk))
        if all(space.finished or space.in_sight for space in spaces):
            for space in spaces:
                if space.in_sight:
                    space.settle()
        if spaces[0].finished:
            _check_all_finished(spaces)
            states = _looked_over(parts, told)
            if any(state.faults for state in states):
                for space in spaces:
                    space.claim()
                    if not space.finished:
                        raise OutputError(f"{space.out}: another run was here; run this one again")
                states = _looked_over(parts, told)  # nobody else is at it now
                repaired = [state.faults for state in states]
            if not any(state.faults for state in states):
                for space in spaces:
                    space.withdraw()
                return [_already(ready, out, maker) for ready, out in parts]
            journals = _begin_repairs(parts, spaces, states, maker)
        else:
            journals = _open_journals(parts, spaces)
        receipts = _fill_and_publish(parts, spaces, journals, told, disk, maker)
        for journal in journals:
            if journal is not None:
                journal.close()
        journals = []
        for space in reversed(spaces):
            if not space.finished:
                space.tidy()
        return [replace(r, repaired=faults) for r, faults in zip(receipts, repaired, strict=True)]
    except BaseException:
        for journal in journals:
            if journal is not None:
                journal.close()
        for space in spaces:
            space.withdraw()
        raise


def _already(ready: Prepared, out: Path, maker: Maker | None) -> Receipt:
    remarks = tuple(maker.idle()) if maker is not None else ()
    names = tuple(publish_order(ready))
    return Receipt(out, ready.fingerprint, names, ready.layout.nbytes, remarks, already_done=True)


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


def _check_all_finished(spaces: Sequence[Workspace]) -> None:
    for space in spaces:
        if not space.finished:
            raise OutputError(
                f"{spaces[0].out} is finished, and its other half {space.out} is gone; remove the "
                "former to make both again"
            )


def _looked_over(parts: Sequence[tuple[Prepared, Path]], told: Events) -> list[State]:
    told.phase("checking the finished folder")
    return [look_over(ready, out, verify=ready.options.verify) for ready, out in parts]


def _begin_repairs(
    parts: Sequence[tuple[Prepared, Path]],
    spaces: Sequence[Workspace],
    states: Sequence[State],
    maker: Maker | None,
) -> list[Journal | None]:
    """Make unfinished runs of finished folders: their journals know what is still good, and nothing
    stays in sight. Folders that were made together are repaired together."""
    units = parts[0][0].units
    records = {name: text for state in states for name, text in state.records.items()}
    kept = {
        number: [records[name] for name, _ in unit.outputs]
        for number, unit in enumerate(units)
        if all(name in records for name, _ in unit.outputs)
    }
    wrong = {name for state in states for name in state.wrong}
    lost = [
        unit
        for number, unit in enumerate(units)
        if number not in kept or any(name in wrong for name, _ in unit.outputs)
    ]
    if maker is not None and any(made_outside(unit) is not None for unit in lost):
        maker.check([out for _, out in parts])
    for (ready, out), state in zip(parts, states, strict=True):
        check_disk(
            out, sum(f.size for f in ready.layout.files if f.name in state.lost and not f.link)
        )
    run = secrets.token_hex(8)
    journals: list[Journal | None] = []
    # As folders are begun: the first folder's journal, which speaks of all units, comes last.
    for (ready, _), space, state in reversed(list(zip(parts, spaces, states, strict=True))):
        known = kept if space is spaces[0] else {}
        journals.append(space.begin_repair(publish_order(ready), state.edited, known, run))
    return journals[::-1]


def _open_journals(
    parts: Sequence[tuple[Prepared, Path]], spaces: Sequence[Workspace]
) -> list[Journal | None]:
    """Go on where all folders can; else begin all of them anew. A folder that is finished needs no
    journal. Raises as `_resumable` does."""
    resumable = _resumable(parts, spaces)
    if not resumable:
        # The first folder's journal goes first: it speaks of files in all of them.
        for space in spaces:
            space.forget()
    run = secrets.token_hex(8)
    journals: list[Journal | None] = []
    # It also comes last, when all files it may speak of are there.
    for (ready, _), space in reversed(list(zip(parts, spaces, strict=True))):
        if space.finished:
            journals.append(None)
        elif resumable:
            journals.append(space.resume())
        else:
            journals.append(space.begin(ready.layout, run))
    return journals[::-1]


def _resumable(parts: Sequence[tuple[Prepared, Path]], spaces: Sequence[Workspace]) -> bool:
    """Whether all folders can be gone on with. Raises OutputError where one is finished that another
    begun anew would be written to."""
    begun = {None if s.remembered is None else s.remembered.run for s in spaces if not s.finished}
    resumable = None not in begun and len(begun) == 1
    finished = [space for space in spaces if space.finished]
    if finished and not (resumable and _all_units_kept(parts[0][0], spaces[0])):
        raise OutputError(
            f"{finished[0].out} is finished, and its other half {spaces[0].out} is not; remove the "
            "former to make both again"
        )
    return resumable


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
    checkpoint = parts[0][0].plan.checkpoint
    kept: dict[int, Sequence[str]] = {}
    again: dict[int, Sequence[str]] = {}
    remarks: list[str] = []
    known = identity_of(parts[0][0])["seen"]
    if first.remembered is not None:
        kept, again = _built_on(parts, spaces, journals, told)
        remarks, known = list(first.remembered.remarks), first.remembered.seen
    resumed = len(kept)
    now: Sequence[Shard] | None = None
    if not any(_is_publishing(space) for space in spaces):
        now = checkpoint.look_again()
        if changed := touched(now, known):
            if kept:
                told.phase("the source was touched: hashing it again")
                check_sources(kept.values(), checkpoint, changed)
            journal.append([{"seen": seen(now)}])
        _run_units(parts, spaces, journal, told, files, maker, kept, again, remarks)
        checkpoint.check_unchanged(now)
    told.phase("publishing")
    for (ready, _), space in zip(parts, spaces, strict=True):
        if not space.finished and not _is_publishing(space):
            stage_the_rest(ready, space, kept)
            checkpoint.check_unchanged(now)
    for (ready, _), space, its in reversed(list(zip(parts, spaces, journals, strict=True))):
        if its is not None:
            space.publish(publish_order(ready), its)
    unique = tuple(dict.fromkeys(remarks))
    return [
        Receipt(
            out, ready.fingerprint, tuple(publish_order(ready)), ready.layout.nbytes, unique,
            resumed, share=ready.share,
        )
        for ready, out in parts
    ]  # fmt: skip


def _is_publishing(space: Workspace) -> bool:
    return space.remembered is not None and space.remembered.publish is not None


def _built_on(
    parts: Sequence[tuple[Prepared, Path]],
    spaces: Sequence[Workspace],
    journals: Sequence[Journal | None],
    told: Events,
) -> tuple[dict[int, Sequence[str]], dict[int, Sequence[str]]]:
    """What of the work that was left can be built on: units with their records, and those of units that
    must be done again, because their bytes are not what was recorded. Files that are not as planned
    are made anew; where some had been published, all are taken out of sight first.

    Raises OutputError for records that are not this plan's, and where another folder of the run is
    finished and would have to be written to.
    """
    told.phase("checking what was done before")
    units, options = parts[0][0].units, parts[0][0].options
    remembered = spaces[0].remembered
    assert remembered is not None
    kept = remembered.units
    at = {
        name: (space, place)
        for (ready, _), space in zip(parts, spaces, strict=True)
        for name, place in planned_places(ready.layout.files).items()
    }
    check_units(
        kept, units, {name: place for name, (_, place) in at.items()}, spaces[0].work / JOURNAL
    )

    def where(name: str) -> tuple[Path, int]:
        space, (file, offset) = at[name]
        return space.find(file), offset

    begun = [
        (ready, space, journal)
        for (ready, _), space, journal in zip(parts, spaces, journals, strict=True)
        if journal is not None
    ]
    rounds = max(space.withdrawals for _, space, _ in begun)
    wrong = wrong_units(kept, units, where, None if options.verify else LOOK_BACK)
    if any(_is_publishing(space) for _, space, _ in begun) and (
        wrong or any(not _is_sound(ready, space) for ready, space, _ in begun)
    ):
        rounds += 1
    for _, space, journal in begun:
        if space.withdrawals < rounds:
            space.withdraw_again(journal)
    for _, space, _ in begun:
        space.move_back()
    if any(_is_publishing(space) for _, space, _ in begun):
        return kept, {}
    lost = {
        (space, file.name): file
        for ready, space, _ in begun
        for file in ready.layout.files
        if file.name in lost_shards(ready, space.stage)
    }
    again = _units_again(kept, units, at, set(wrong), lost, begun)
    if again:
        for space in spaces:
            if space.finished:
                raise OutputError(
                    f"{spaces[0].out}: unfinished work in it is damaged, and its other half {space.out} "
                    f"is finished; remove the latter, and run qconvert clean {spaces[0].out}"
                )
        assert journals[0] is not None
        journals[0].append([{"forget": sorted(again)}])
    for (space, _), file in lost.items():
        space.make_again(file)
    return kept, again


def _is_sound(ready: Prepared, space: Workspace) -> bool:
    """Whether a folder that is being published, or about to be, can be."""
    try:
        if _is_publishing(space):
            check_staged(ready, space)
    except OutputError:
        return False
    return _is_publishing(space) or not lost_shards(ready, space.stage)


def _units_again(
    kept: dict[int, Sequence[str]],
    units: Sequence[Unit],
    at: Mapping[str, tuple[Workspace, tuple[str, int]]],
    wrong: set[int],
    lost: dict[tuple[Workspace, str], OutFile],
    begun: Sequence[tuple[Prepared, Workspace, Journal]],
) -> dict[int, Sequence[str]]:
    """Take units out of `kept` that are wrong or in lost files. A file that would be written to and has
    a second name, which may be anyone's, is lost too: it is added to `lost`."""
    shared = {
        (space, file.name): file
        for ready, space, _ in begun
        for file in ready.layout.files
        if file.link is None
        and (space, file.name) not in lost
        and (space.stage / file.name).stat().st_nlink > 1
    }
    files = [{(at[name][0], at[name][1][0]) for name, _ in unit.outputs} for unit in units]
    again: dict[int, Sequence[str]] = {}
    while True:
        for number in [n for n in kept if n in wrong or files[n] & lost.keys()]:
            again[number] = kept.pop(number)
        written = {file for n, unit in enumerate(files) if n not in kept for file in unit}
        more = {key: file for key, file in shared.items() if key in written and key not in lost}
        if not more:
            return again
        lost |= more


def _run_units(
    parts: Sequence[tuple[Prepared, Path]],
    spaces: Sequence[Workspace],
    journal: Journal,
    told: Events,
    files: Files,
    maker: Maker | None,
    kept: dict[int, Sequence[str]],
    again: Mapping[int, Sequence[str]],
    remarks: list[str],
) -> None:
    """Run the units that the journal does not know, and add their records to `kept`: those of workers
    first, then what a maker makes. `again` are the records of those that were done before."""
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
        if number in again:
            check_same_sources(again[number], result.records, ready.plan.checkpoint)
        kept[number] = result.records
        remarks.extend(result.remarks)
        committer.add(number, result)

    locks = [space.lock_fd for space in spaces if not space.finished]
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


def side_bytes(plan: Plan) -> int:
    """Size of the side files that travel along. Raises CheckpointError if one cannot be read."""
    return sum(file_size(plan.checkpoint.root / name) for name in plan.side_files)


def disk_bytes(ready: Prepared) -> int:
    """Bytes a run will put on disk, generously."""
    records = _RECORD_BYTES * len(ready.plan.tensors)
    texts = sum(len(text.encode()) for text in ready.plan.new_files.values())
    return ready.layout.written + side_bytes(ready.plan) + texts + records


def foreseen(
    parts: Sequence[tuple[Prepared, Path]], *, maker: Maker | None = None
) -> list[Outlook]:
    """What `run_together` would find in each folder and refuse to begin, by its own checks, without a
    write. Refusals of the folders as a whole stand with the first one's."""
    common: list[str] = []
    with _noted(common):
        _check_maker(parts[0][0], maker)
        _check_folders(parts, 0 if maker is None else maker.disk_bytes())
    spaces: list[Onlooker | None] = [None for _ in parts]
    own: list[list[str]] = [[] for _ in parts]
    for number, (ready, out) in enumerate(parts):
        if not common:  # of a folder on top of the source, say, what lies in it is no news
            with _noted(own[number]):
                tensors = max(len(ready.plan.checkpoint), len(ready.plan.tensors))
                spaces[number] = Onlooker(
                    out, identity_of(ready), manifest_bytes(ready), tensors, Files()
                )
    there = [space for space in spaces if space is not None]
    damaged: list[tuple[str, ...]] = [() for _ in parts]
    if len(there) == len(parts):
        with _noted(common):
            if there[0].finished:
                _check_all_finished(there)
                damaged = [tuple(state.faults) for state in _looked_over(parts, Silent())]
            else:
                _resumable(parts, there)
            if maker is not None and not all(space.finished for space in there):
                maker.check([out for _, out in parts])
    own[0] = [*common, *own[0]]
    units = len(parts[0][0].units)
    journal = spaces[0].remembered if spaces[0] is not None else None  # it speaks of all folders
    kept = 0 if journal is None else len(journal.units)
    done = {"finished": units, "unfinished": kept}
    return [
        Outlook(out, None if space is None else space.state,
                0 if space is None else done.get(space.state, 0), units, tuple(refusals), faults)
        for (_, out), space, refusals, faults in zip(parts, spaces, own, damaged, strict=True)
    ]  # fmt: skip


@contextmanager
def _noted(refusals: list[str]) -> Iterator[None]:
    """Errors that a user is to see, kept as text."""
    try:
        yield
    except QConvertError as error:
        refusals.append(str(error))
