"""Faults of a folder's metadata that can be put right without touching its weights.

The folder is built again beside itself, out of links to its files, with mended metadata; validation
judges that. Nothing is written before the result has no error left.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import unified_diff
from functools import partial
from pathlib import Path
from typing import NamedTuple

from qconvert.checkpoint.checkpoint import (
    HF_QUANT_CONFIG,
    INDEX,
    MANIFEST,
    RECEIPT,
    WORK_DIR,
    Checkpoint,
    is_denied_folder,
)
from qconvert.checkpoint.safetensors import Header, read_header
from qconvert.core.errors import CheckpointError
from qconvert.core.json_text import parse_object
from qconvert.core.links import read_inside, resolved
from qconvert.core.shown import count
from qconvert.hub.card import README, card
from qconvert.repair.blocks import (
    MendedConfig,
    as_json,
    hf_quant_config,
    true_ignore_list,
    with_fp8_linears,
    with_mixed_precision,
    with_root_block,
    with_true_numbers,
    without_stale_blocks,
)
from qconvert.repair.sealed import edited, hash_of, resealed, stated
from qconvert.runtimes.serving import loads
from qconvert.validation.findings import Finding
from qconvert.validation.runner import validate_folder

# --- model.safetensors.index.json from the headers of the shards ----------------------------------


class Index(NamedTuple):
    """An index's bytes, and why they are not what the folder has."""

    data: bytes
    why: tuple[str, ...]


def true_index(root: Path, *, follow_links: bool = False) -> Index | None:
    """The index that the shards of a folder need; None where it is right, or where one file needs none.

    Raises CheckpointError for a shard that cannot be read, a tensor in two shards, shards whose names
    (`-00002-of-00005`) show that one is missing.
    """
    try:
        opened = Checkpoint.open(root, follow_links=follow_links)
    except CheckpointError as error:
        reason = str(error)
    else:
        wrong = [text for text in opened.warnings if text.startswith(INDEX)]
        if not wrong:
            return None
        reason = wrong[0]
    files = sorted(root.glob("*.safetensors"))
    if not files or (len(files) == 1 and not (root / INDEX).exists()):
        return None
    headers = {
        file.name: read_header(file, resolved(root, file.name, follow_links=follow_links))
        for file in files
    }
    data = _index(root, headers)
    if data == _present(root):
        return None  # what is wrong is elsewhere
    return Index(data, (f"{count(len(files), 'shard')} read: {reason}",))


def _index(root: Path, headers: dict[str, Header]) -> bytes:
    weight_map: dict[str, str] = {}
    total = 0
    for name, header in headers.items():
        for entry in header.entries:
            if entry.name in weight_map:
                raise CheckpointError(
                    f"tensor {entry.name!r} is in both {weight_map[entry.name]} and {name}; remove the "
                    "shard that does not belong"
                )
            weight_map[entry.name] = name
            total += entry.type.nbytes
    _check_complete(root, list(headers))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _check_complete(root: Path, names: Sequence[str]) -> None:
    """Raises CheckpointError where numbered names show that a shard is missing."""
    stems = [name.removesuffix(".safetensors").rpartition("-of-") for name in names]
    wanted = {int(of) for _, dash, of in stems if dash and of.isdecimal()}
    if wanted and wanted != {len(names)}:
        raise CheckpointError(
            f"{root}: {count(len(names), 'shard')} found, and their names count "
            f"{' or '.join(map(str, sorted(wanted)))}: download the missing ones"
        )


def _present(root: Path) -> bytes | None:
    """The index's bytes, None for one that is missing or cannot be read: it is written again."""
    try:
        return read_inside(root, INDEX, 1 << 30)
    except (FileNotFoundError, CheckpointError):
        return None


CONFIG = "config.json"
# All that a repair, or an evaluation that is noted, ever writes or removes.
METADATA = frozenset({INDEX, CONFIG, HF_QUANT_CONFIG, README, MANIFEST, RECEIPT})
# In this order, and the ignore list last: it is mended for the block that is left.
_MENDS: tuple[Callable[[Checkpoint], MendedConfig | None], ...] = (
    with_root_block,
    without_stale_blocks,
    with_true_numbers,
    with_mixed_precision,
    with_fp8_linears,
)
# An index and a receipt have a line a tensor: those of 95,000 tensors have some 60 MB.
MOST = 1 << 30
_LONGEST = 2000  # characters of a line that a diff shows as it is
# The findings of a folder; the flag says whether links that lead out of it are followed.
Judge = Callable[[Path, bool], Sequence[Finding]]


@dataclass(frozen=True, slots=True)
class Change:
    """A file's bytes before and after; None: there is no such file."""

    file: str
    before: bytes | None
    after: bytes | None
    why: tuple[str, ...]

    def diff(self) -> list[str]:
        """Lines of a unified diff. JSON in one long line is compared key by key."""
        both = (self.before or b"", self.after or b"")
        old, new = (data.decode("utf-8", "replace").splitlines() for data in both)
        if max(map(len, (*old, *new)), default=0) > _LONGEST:
            with suppress(CheckpointError):
                old, new = (_indented(data, self.file) for data in both)
        before, after = f"{self.file} (before)", f"{self.file} (after)"
        return list(unified_diff(old, new, before, after, n=1, lineterm=""))


def _indented(data: bytes, file: str) -> list[str]:
    """A JSON object as lines of a key each; none for no file. Raises CheckpointError for others."""
    return as_json(parse_object(data, file)).decode().splitlines() if data else []


@dataclass(frozen=True)
class Repair:
    """Changes that a repair of `folder` would make. `fixed` are findings that it ends, `left` errors
    that it does not: with one of them nothing is written. `steps` are the conversion's, from its
    manifest."""

    folder: Path
    changes: tuple[Change, ...]
    fixed: tuple[Finding, ...]
    left: tuple[Finding, ...]
    steps: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise CheckpointError where an error is left."""
        if not self.left:
            return
        # What a config states wrong is the cause of what its tensors are said to lack.
        first = next((f for f in self.left if f.where.startswith("config.json: ")), self.left[0])
        more = f" ({count(len(self.left) - 1, 'more error')})" if len(self.left) > 1 else ""
        again = "convert again from the source"
        if self.steps:
            steps = " | ".join(self.steps)
            again = f"run the conversion ({steps}) again into this folder with --verify"
        raise CheckpointError(
            f"{first.rule}: {first.where}: {first.message}{more}: no block, number, list or index that "
            "repair can prove from the tensors or qconvert.json ends that, so nothing is written; state "
            f"what holds in config.json by hand, or {again}"
        )


def repair_of(root: Path, judge: Judge, *, follow_links: bool = False) -> Repair:
    """Plan a repair of a folder. Reads headers and small files only, writes nothing.

    `judge` gives the findings of a folder. Raises CheckpointError for an unfinished conversion, a shard
    that cannot be read, links as Checkpoint.open, a receipt that does not match its seal.
    """
    if (root / WORK_DIR).is_dir():
        raise CheckpointError(
            f"{root}: {WORK_DIR}/ exists: a conversion is unfinished; run its command again, or "
            "qconvert clean"
        )
    before = judge(root, follow_links)
    best = Repair(root, (), (), tuple(_errors(before)), _steps(root))
    # Where an error is left, runtimes may look modules up by other names than patterns spell.
    for every in (False, True):
        with _linked(root, follow_links=follow_links) as copy:
            changes = _changes(root, copy, follow_links=follow_links, every=every)
            if not changes:
                if best.left:
                    continue
                return best
            after = [_renamed(finding, copy, root) for finding in judge(copy, True)]
        known = {(finding.rule, finding.where) for finding in after}
        fixed = [finding for finding in before if (finding.rule, finding.where) not in known]
        found = replace(best, changes=changes, fixed=tuple(fixed), left=tuple(_errors(after)))
        if not best.changes or len(found.left) < len(best.left):
            best = found
        if not best.left:
            break
    return best


def _changes(
    root: Path, copy: Path, *, follow_links: bool, every: bool = False
) -> tuple[Change, ...]:
    changes: dict[str, Change] = {}

    def change(name: str, data: bytes | None, why: Sequence[str]) -> None:
        before = _read(root, name, follow_links=follow_links)
        if data != before:
            changes[name] = Change(name, before, data, tuple(why))
            _put(copy / name, data)

    index = true_index(root, follow_links=follow_links)
    if index is not None:
        change(INDEX, index.data, index.why)
    checkpoint = Checkpoint.open(copy, follow_links=True)
    why: list[str] = []
    lists: Callable[[Checkpoint], MendedConfig | None] = partial(true_ignore_list, every=every)
    for mend in (*_MENDS, lists):
        mended = mend(checkpoint)
        if mended is not None:
            checkpoint = replace(checkpoint, config=mended.config)
            why += mended.why
    if why:
        change(CONFIG, as_json(checkpoint.config), why)
    modelopt = hf_quant_config(checkpoint)
    if modelopt is not None:
        change(HF_QUANT_CONFIG, modelopt or None, ["it contradicts config.json"])
    manifest = checkpoint.manifest
    readme = _read(root, README, follow_links=follow_links)
    if changes and manifest is not None and readme is not None:
        tensors = {name: source.type for name, source in checkpoint.items()}
        said = loads(checkpoint.config, tensors, manifest)
        old = readme.decode("utf-8", "replace")
        text = card(manifest, checkpoint.config, {}, None, old, said=said)
        change(README, text.encode(), ["the model card is made from config.json"])
    written = stated(checkpoint)
    recorded: dict[str, tuple[str | None, bytes | None]] = {
        name: (hash_of(one.before), one.after) for name, one in changes.items()
        if one.after is None or hash_of(one.after) != written.get(name)
    }  # fmt: skip
    by_hand = edited(checkpoint)
    for name, (before, now) in by_hand.items():
        recorded[name] = (before, recorded[name][1] if name in recorded else now)
    for name, one in changes.items():
        if written.get(name, "") not in ("", hash_of(one.before), hash_of(one.after)):
            told = (
                "the conversion wrote other bytes, which no repair knows: with the source, its command "
                "with --verify restores them"
            )
            changes[name] = replace(one, why=(*one.why, told))
    why = [f"records {', '.join(sorted(recorded))}"]
    why += [f"{name} was changed after the conversion" for name in by_hand]
    for name, data in resealed(checkpoint, recorded).items():
        change(name, data, why)
    return tuple(changes.values())


def _steps(root: Path) -> tuple[str, ...]:
    """The passes of the manifest, if there is one that can be read."""
    try:
        manifest = Checkpoint.open(root).manifest
    except CheckpointError:
        return ()
    passes = [] if manifest is None else manifest["passes"]
    return tuple(str(step["name"]) for step in passes)


def _errors(findings: Sequence[Finding]) -> Iterator[Finding]:
    return (finding for finding in findings if finding.severity == "error")


def _renamed(finding: Finding, copy: Path, root: Path) -> Finding:
    """A finding about the copy as one about the folder."""
    where, message = (
        text.replace(str(copy), str(root)) for text in (finding.where, finding.message)
    )
    return replace(finding, where=where, message=message)


def errors_with(
    root: Path, changes: Sequence[Change], *, follow_links: bool = False
) -> list[Finding]:
    """Errors that a folder's headers and small files would have after changes. Writes nothing."""
    with _linked(root, follow_links=follow_links) as copy:
        for each in changes:
            _put(copy / each.file, each.after)
        found = validate_folder(copy, follow_links=True).findings
        return [_renamed(finding, copy, root) for finding in _errors(found)]


@contextmanager
def _linked(root: Path, *, follow_links: bool) -> Iterator[Path]:
    """A folder of links to all files of another, for as long as the context lasts. Raises
    CheckpointError for a link that leads out of it."""
    with tempfile.TemporaryDirectory(prefix="qconvert-repair-") as made:
        copy = Path(made)
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if not is_denied_folder(name))
            for name in names:
                relative = (Path(folder) / name).relative_to(root)
                real = resolved(root, relative.as_posix(), follow_links=follow_links)
                if real.is_file():
                    (copy / relative).parent.mkdir(parents=True, exist_ok=True)
                    (copy / relative).symlink_to(real)
        yield copy


def _put(file: Path, data: bytes | None) -> None:
    file.unlink(missing_ok=True)
    if data is not None:
        file.write_bytes(data)


def _read(root: Path, name: str, *, follow_links: bool) -> bytes | None:
    try:
        return read_inside(root, name, MOST, follow_links=follow_links)
    except FileNotFoundError:
        return None
