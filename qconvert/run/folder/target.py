"""The folders that a run writes, from the first look at them to the last rename."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from qconvert.checkpoint.checkpoint import MANIFEST, RECEIPT, WORK_DIR, file_size
from qconvert.checkpoint.receipt import digest, read_receipt, sealed_manifest
from qconvert.core.errors import OutputError, PlanError, QConvertError
from qconvert.core.links import SMALL, read_regular
from qconvert.core.manifest_keys import EVALUATION, parse_manifest
from qconvert.core.profiling import phase
from qconvert.core.shown import exact_size
from qconvert.models.calibrated import calibrated_in
from qconvert.run.folder.journal import Journal
from qconvert.run.folder.prepare import Prepared, disk_bytes
from qconvert.run.folder.staging import (
    EDITED,
    hash_of,
    identity_of,
    lost_shards,
    made_texts,
    manifest_bytes,
    manifest_of,
    planned_places,
)
from qconvert.run.folder.verify import differing, header_of, planned_record
from qconvert.run.folder.workspace import Workspace, check_apart, check_disk, check_folders_apart
from qconvert.run.work.files import Files, existing_parent

if TYPE_CHECKING:
    from qconvert.run.folder.prepare import Prepared
    from qconvert.run.work.backend import Backend


# A finished folder is checked: is it still what the plan makes, and what must be made again?


@dataclass(frozen=True)
class FolderState:
    """State of a folder. `faults` are files that are not as they were made, with what is wrong; of those
    shards are in `lost`. `records` are the receipt's lines of tensors, `wrong` the tensors that are not
    as these say; `edited` are files that people have changed, which is their right."""

    faults: Mapping[str, str]
    lost: frozenset[str]
    records: Mapping[str, str]
    wrong: frozenset[str]
    edited: frozenset[str]


def look_over(ready: Prepared, out: Path, *, verify: bool) -> FolderState:
    """Sizes and headers of all shards, hashes of all other files, and with `verify` those of all
    tensors, against the plan and the receipt."""
    lost = lost_shards(ready, out)
    faults = dict(lost)
    edited = set()
    texts = _wanted_texts(ready, out)
    wanted = {**ready.plan.checkpoint.side_digests, **{n: digest(d) for n, d in texts.items()}}
    source = ready.plan.checkpoint
    sizes = {name: file_size(source.real(name)) for name in source.side_files}
    sizes |= {name: len(data) for name, data in texts.items()}
    for name in [*ready.plan.side_files, *texts]:
        fault = _fault(out / name, wanted[name], sizes[name])
        if name in EDITED and fault == _OTHER_BYTES:
            edited.add(name)
        elif fault is not None:
            faults[name] = fault
    records, fault = _receipt(ready, out, wanted)
    if fault is not None:
        faults[RECEIPT] = fault
    places = planned_places(ready.layout.files)
    wrong = {name for name, (file, _) in places.items() if file in lost}
    if verify:
        for name in _other_bytes(ready, out, records, wrong):
            faults[places[name][0]] = f"tensor {name!r} {_OTHER_BYTES}"
            wrong.add(name)
    return FolderState(faults, frozenset(lost), records, frozenset(wrong), frozenset(edited))


_OTHER_BYTES = "has bytes that differ from those written"


def _wanted_texts(ready: Prepared, out: Path) -> dict[str, bytes]:
    """Texts of the plan; the manifest without a seal where the folder was made before there were
    seals, and with what an evaluation noted in it since."""
    texts = made_texts(ready)
    unsealed = (json.dumps(manifest_of(ready), indent=2) + "\n").encode()
    assert sealed_manifest(manifest_of(ready)) == texts[MANIFEST]
    if _fault(out / MANIFEST, digest(unsealed), len(unsealed)) is None:
        texts[MANIFEST] = unsealed
    noted = _noted(ready, out / MANIFEST)
    if noted is not None:
        texts[MANIFEST] = noted
    return texts


def _noted(ready: Prepared, manifest: Path) -> bytes | None:
    """The manifest with the evaluation that the folder's own holds, if it holds one."""
    try:
        found = parse_manifest(read_regular(manifest, 4 * SMALL, follow=False), manifest)
    except (FileNotFoundError, QConvertError):
        return None  # what is wrong with it is said where it is compared
    if EVALUATION not in found:
        return None
    return sealed_manifest({**manifest_of(ready), EVALUATION: found[EVALUATION]})


def _fault(path: Path, wanted: str, size: int) -> str | None:
    if path.is_symlink():
        return "is a symbolic link"
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != size:  # before gigabytes of what is not ours are hashed
        return _OTHER_BYTES
    return None if hash_of(path, xxhash.xxh3_128()) == wanted else _OTHER_BYTES


def _receipt(
    ready: Prepared, out: Path, wanted: Mapping[str, str]
) -> tuple[dict[str, str], str | None]:
    """Lines of the receipt by tensor, as text, and what is wrong with it."""
    try:
        found = read_receipt(
            out / RECEIPT,
            max(len(ready.plan.tensors), len(ready.plan.checkpoint)),
            error=OutputError,
        )
    except QConvertError as error:
        return {}, str(error)
    if found is None:
        return {}, "is missing"
    if found.seal == "broken":
        return {}, _OTHER_BYTES
    places = planned_places(ready.layout.files)
    records = {}
    for line in found.lines:
        name = line.get("name")
        if name not in places:
            continue
        if planned_record(line, name, ready.plan.tensors[name], *places[name]) is not None:
            records[name] = json.dumps(line, separators=(",", ":"))
    if records.keys() != places.keys():
        return records, "lacks lines of some tensors"
    return records, _wrong_file_lines(ready, out, found.lines, wanted)


def _wrong_file_lines(
    ready: Prepared, out: Path, lines: Sequence[Mapping[str, Any]], wanted: Mapping[str, str]
) -> str | None:
    """Return whether the receipt's lines of files are those of this result."""
    said = {line["file"]: line for line in lines if "name" not in line}
    for file in ready.layout.files:
        line = said.get(file.name, {})
        same = line.get("nbytes") == file.size
        if "header_xxh3" in line:  # older receipts have none
            same = same and line["header_xxh3"] == digest(header_of(file))
        if not same:
            return f"has a wrong line, or none, of {file.name}"
    for name, xxh3 in wanted.items():
        line = said.get(name, {})
        if line.get("xxh3") != xxh3 and name not in EDITED:
            return f"has a wrong line, or none, of {name}"
    return None


def _other_bytes(
    ready: Prepared, out: Path, records: Mapping[str, str], lost: Set[str]
) -> list[str]:
    """Tensors whose bytes have another hash than their line, of those that are not lost."""
    places = planned_places(ready.layout.files)
    paths = {file.name: out / file.name for file in ready.layout.files}
    return sorted(
        differing(
            (
                name,
                (paths[places[name][0]], places[name][1], ready.plan.tensors[name].type.nbytes),
                json.loads(records[name])["xxh3"],
            )
            for name in sorted(records.keys() - lost, key=places.__getitem__)
        ),
        key=places.__getitem__,
    )


Parts = Sequence[tuple[Prepared, Path]]
Space = TypeVar("Space", bound=Workspace)


@dataclass(frozen=True, eq=False)
class Target:
    """One folder of a run: the plan it is for, and the workspace claimed in it. `journal` is there while
    the folder is unfinished; `state` is how a finished one was found.

    Targets of one run are always in the same order. The first one's journal speaks of the units of all,
    so that it is begun after the others' and its folder is published last.
    """

    ready: Prepared
    space: Workspace
    journal: Journal | None = None
    state: FolderState | None = None

    @property
    def out(self) -> Path:
        return self.space.out

    @property
    def publishing(self) -> bool:
        """Return whether renaming has begun, as the journal says."""
        return self.space.remembered is not None and self.space.remembered.publish is not None

    @property
    def faults(self) -> Mapping[str, str]:
        """Files of a finished folder that were not as they had been made, with what was wrong."""
        return self.state.faults if self.state is not None else {}


@phase("stage")
def opened(
    ready: Prepared,
    out: Path,
    files: Files,
    kind: type[Space],
    notice: Callable[[str], None] | None = None,
) -> Space:
    """The workspace of a plan's folder. Raises OutputError as Workspace does."""
    tensors = max(len(ready.plan.checkpoint), len(ready.plan.tensors))
    return kind(out, identity_of(ready), manifest_bytes(ready), tensors, files, notice)


@contextmanager
def claimed(
    parts: Parts,
    files: Files,
    notice: Callable[[str], None] | None = None,
    kind: type[Workspace] = Workspace,
) -> Iterator[list[Target]]:
    """Claim all folders. At the end locks are given up, and folders that nothing was begun in are as
    they were before."""
    targets: list[Target] = []
    try:
        for ready, out in parts:
            targets.append(Target(ready, opened(ready, out, files, kind, notice)))
        yield targets
    finally:
        for target in targets:
            target.space.withdraw()


# Checks before a run touches anything: folders, disk, a backend's memory. A foreign folder, or another
# plan's work in it: workspace.py, journal.py. The plan itself: validation/judgement.py.


def check_parts(parts: Parts, backend: Backend | None) -> None:
    """Raise PlanError where calibrated weights have no backend, OutputError for folders in one another
    or in the source, and for disks without space for all that is new."""
    op = next(filter(None, map(calibrated_in, parts[0][0].units)), None)
    if op is not None and backend is None:
        raise PlanError(
            f"{op.what} has to be calibrated, and the run has no backend: give it "
            "qconvert.calibrate.backend.backend_for(plans)"
        )
    if op is not None and parts[0][0].options.shard is not None:
        raise PlanError(
            "--shard divides bytes, and a calibration goes through all layers in order: start the same "
            "command with --distributed on all machines, by torchrun or srun, or run it without --shard"
        )
    needed: dict[int, int] = {}
    for number, (ready, out) in enumerate(parts):
        check_apart(out, ready.plan.checkpoint)
        for _, other in parts[:number]:
            check_folders_apart(out, other)
        if not (out / WORK_DIR).is_dir() and not (out / MANIFEST).is_file():
            device = existing_parent(out).stat().st_dev
            # The work folder of a calibration lies in the first folder.
            extra = backend.needs().disk if backend is not None and number == 0 else 0
            needed[device] = needed.get(device, 0) + disk_bytes(ready) + extra
            check_disk(out, needed[device])


def check_backend(parts: Parts, backend: Backend | None) -> None:
    """Raise PlanError where a backend needs more memory than the run was given, and what the backend's
    own check raises."""
    if backend is None:
        return
    memory, need = parts[0][0].options.memory, backend.needs().memory
    if memory is not None and memory < need:
        raise PlanError(
            f"calibration needs more than {-(-need >> 20)} MiB for what it solves at a time (given: "
            f"{exact_size(memory)}); give more --memory"
        )
    backend.check([out for _, out in parts])


def is_finished(parts: Parts) -> bool:
    """Return whether all folders look finished from outside."""
    return all((out / MANIFEST).is_file() and not (out / WORK_DIR).is_dir() for _, out in parts)


def check_all_finished(targets: Sequence[Target]) -> None:
    """Raise OutputError where the first folder is finished and another is not."""
    for target in targets:
        if not target.space.finished:
            raise OutputError(
                f"{targets[0].out} is finished, and the other folder of its run, {target.out}, is not; "
                f"remove {targets[0].out} to write both again"
            )
