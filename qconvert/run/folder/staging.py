"""Everything of a folder but its tensors: side files, config, index, manifest, receipt. Written next to
the finished shards, checked as any reader of the folder would, then published.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256 as new_sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from qconvert import __version__
from qconvert.checkpoint.checkpoint import INDEX, MANIFEST, RECEIPT
from qconvert.checkpoint.receipt import (
    digest,
    manifest_seal,
    read_file_lines,
    sealed_lines,
    sealed_manifest,
)
from qconvert.core.errors import CheckpointError, OutputError
from qconvert.core.links import PER_TENSOR, SMALL, read_regular, reading
from qconvert.plan.plan import Plan, described
from qconvert.run.folder.verify import check_entries, header_of, seen, shard_fault
from qconvert.run.folder.workspace import Workspace, lasting
from qconvert.run.work.file_layout import OutFile

if TYPE_CHECKING:
    from qconvert.run.folder.prepare import Prepared


@dataclass(frozen=True, eq=False)
class Staged:
    """A folder whose files are all made, and not all in sight yet."""

    ready: Prepared
    space: Workspace

    def file(self, name: str) -> Path | None:
        """The place of a file that lies beside the tensors, None where there is none."""
        return next((p for p in _places(self.space, name) if p.is_file()), None)

    @property
    def edited(self) -> frozenset[str]:
        """Files that people have changed since an earlier run published them."""
        found = self.space.remembered
        return frozenset() if found is None else frozenset(found.edited)


# Raises what refuses folders that are about to be published.
Judge = Callable[[Sequence[Staged]], None]

# People, and `upload`, write in it after a conversion.
EDITED = frozenset({"README.md"})
_READ_BYTES = 4 << 20


def identity_of(ready: Prepared) -> dict[str, Any]:
    """Return what makes this run this run. A journal with another identity is not resumed, `seen` and
    `stores` aside; the manifest keeps all of it but what this machine's files are like."""
    checkpoint = ready.plan.checkpoint
    return {
        "qconvert": __version__,
        "fingerprint": ready.fingerprint,
        "source": checkpoint.header_digest,
        "source_sample": checkpoint.sample_digest,
        "passes": [{"name": entry.name, "options": entry.options} for entry in ready.plan.log],
        "max_shard_size": ready.options.shard_bytes,
        "sha256": ready.options.sha256,
        "linked": [file.name for file in ready.layout.files if file.link is not None],
        "stat": [shard.stat for shard in checkpoint.shards],
        "seen": seen(checkpoint.shards),
        "stores": sorted({s.remote.store.url for s in checkpoint.shards if s.remote is not None}),
    }


def manifest_of(ready: Prepared) -> dict[str, Any]:
    """qconvert.json: what was made, from what, by which passes, and what was lost. It holds no
    time and no path, so the same conversion writes the same bytes anywhere."""
    return {"identity": lasting(identity_of(ready)), **described(ready.plan)}


def manifest_bytes(ready: Prepared) -> bytes:
    """The manifest as it is written, sealed."""
    return sealed_manifest(manifest_of(ready))


def config_bytes(plan: Plan) -> bytes:
    """config.json: the source's own bytes where no pass changed it."""
    if plan.config == plan.checkpoint.config:
        return plan.checkpoint.config_bytes
    return (json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n").encode()


def made_texts(ready: Prepared) -> dict[str, bytes]:
    """Files whose bytes the plan alone tells, all but the receipt."""
    made = {name: text.encode() for name, text in ready.plan.new_files.items()}
    made["config.json"] = config_bytes(ready.plan)
    index = ready.layout.index_json()
    if index is not None:
        made[INDEX] = index
    made[MANIFEST] = manifest_bytes(ready)
    return made


def publish_order(ready: Prepared) -> list[str]:
    """Files in the order they are renamed: what makes the folder a checkpoint comes last."""
    commit = ready.layout.commit_name
    shards = [file.name for file in ready.layout.files if file.name != commit]
    others = [*ready.plan.side_files, *ready.plan.new_files]
    return [*shards, *others, RECEIPT, MANIFEST, "config.json", commit]


def stage_the_rest(ready: Prepared, space: Workspace, records: Mapping[int, Sequence[str]]) -> None:
    """Side files, config, index, manifest and receipt, beside the finished shards; then all files are
    looked at. Raises CheckpointError where a side file is not what was planned with, OutputError where
    a file cannot be published."""
    plan = ready.plan
    edited = space.remembered.edited if space.remembered is not None else frozenset()
    for name in plan.side_files:
        if name in edited:
            continue
        source = plan.checkpoint.real(name)
        if space.copy_file(source, name) != plan.checkpoint.side_digests[name]:
            raise CheckpointError(
                f"{source} changed while it was being converted; leave the source alone and start "
                "again (qconvert clean OUT first)"
            )
    texts = made_texts(ready)
    for name, data in texts.items():
        if name not in edited:
            space.stage_file(name, data)
    by_name = {
        name: record
        for number, made in records.items()
        for name, record in zip(ready.units[number].names, made, strict=True)
    }
    lines = [by_name[one.name] for file in ready.layout.files for one in file.tensors]
    for record in _file_records(ready, space, [*plan.side_files, *texts]):
        lines.append(json.dumps(record, separators=(",", ":")))
    space.stage_lines(RECEIPT, sealed_lines(lines))
    written = [file.name for file in ready.layout.files if file.link is None]
    own = [*texts, RECEIPT, *written]
    space.restrict([name for name in own if name not in space.away], plan.checkpoint.strictest_mode)
    check_staged(ready, space)


def _file_records(ready: Prepared, space: Workspace, others: Sequence[str]) -> list[dict[str, Any]]:
    """A receipt line for every file: shards with their size, the hash of their header (and sha256
    where asked), the others with their hash."""
    found: list[dict[str, Any]] = []
    for file in ready.layout.files:
        header = digest(header_of(file))
        line: dict[str, Any] = {"file": file.name, "nbytes": file.size, "header_xxh3": header}
        if ready.options.sha256:
            away = space.away.get(file.name)
            path = space.stage / file.name
            line["sha256"] = hash_of(path, new_sha256()) if away is None else away.sha256
        found.append(line)
    for name in others:
        path = space.stage / name
        line = {
            "file": name, "nbytes": path.stat().st_size, "xxh3": hash_of(path, xxhash.xxh3_128()),
        }  # fmt: skip
        if ready.options.sha256:
            line["sha256"] = hash_of(path, new_sha256())
        found.append(line)
    return found


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def hash_of(path: Path, made: _Hash) -> str:
    """The hash of a file's bytes. Raises OutputError naming a file that cannot be read."""
    with reading(path, OutputError), path.open("rb") as stream:
        while chunk := stream.read(_READ_BYTES):
            made.update(chunk)
    return made.hexdigest()


def check_staged(ready: Prepared, space: Workspace) -> None:
    """Check every file that is about to be published, or was, as any reader would: shards' headers
    against the plan, JSON and seals parsed. Raises OutputError naming the file."""
    for file in ready.layout.files:
        if file.name not in space.away:  # its bytes were compared where it is now
            check_entries(_place(space, file.name), file)
    tensors = len(ready.plan.tensors)
    for name in ("config.json", MANIFEST, *([INDEX] if len(ready.layout.files) > 1 else [])):
        path = _place(space, name)
        data = read_regular(path, SMALL + PER_TENSOR * tensors, follow=False, error=OutputError)
        try:
            sound = isinstance(json.loads(data), dict)
        except (ValueError, RecursionError):
            sound = False
        if not sound or (name == MANIFEST and manifest_seal(data) != "sound"):
            raise _unpublished(path, "differs from what was written")
    found = read_file_lines(_place(space, RECEIPT), error=OutputError)
    if found.seal != "sound":
        raise _unpublished(space.stage / RECEIPT, "differs from what was written")
    for line in found.lines:
        if "xxh3" in line:
            path = _place(space, line["file"])
            if hash_of(path, xxhash.xxh3_128()) != line["xxh3"]:
                raise _unpublished(path, "differs from what was written")


def _place(space: Workspace, name: str) -> Path:
    """A file's place: staged, or published already. Raises OutputError where it is neither, or no
    regular file."""
    for path in _places(space, name):
        if path.is_symlink() or path.is_file():
            if path.is_symlink():
                raise _unpublished(path, "is a symbolic link")
            return path
    raise _unpublished(space.stage / name, "was staged and is missing now")


def _places(space: Workspace, name: str) -> tuple[Path, Path]:
    return space.stage / name, space.out / name


def _unpublished(path: Path, what: str) -> OutputError:
    return OutputError(f"{path}: {what}; nothing more was published. Run the same command again")


def lost_shards(ready: Prepared, folder: Path, away: Container[str] = ()) -> dict[str, str]:
    """Shards in a folder that are not as planned, with what is wrong. Those that are `away` are not
    looked for."""
    found = {}
    for file in ready.layout.files:
        fault = None if file.name in away else shard_fault(folder / file.name, file)
        if fault is not None:
            found[file.name] = fault
    return found


def planned_places(files: Sequence[OutFile]) -> dict[str, tuple[str, int]]:
    """File name and offset of every tensor."""
    return {one.name: (file.name, one.offset) for file in files for one in file.tensors}
