"""Nothing of the source may be lost without a rule that names it.

QC030 a source tensor is neither in the output, nor used for an output, nor dropped.
QC031 the source is not the one this folder was made from.
QC032 a side file of the source is missing.

For a pipeline stage's folder only the tensors it holds are checked: the other stages hold the rest.

The CPU folder and its GPU side must belong together: experts of one model with layers of another
load without error and generate garbage.

QC050 the two were not made as a pair, and the GPU side is neither the repo the CPU folder was made from
nor made from that repo.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qconvert.core.manifest_keys import RANK
from qconvert.validation.findings import Finding, Skipped
from qconvert.validation.runner import Folder, validator
from qconvert.validators.reading.pruned import ROWS_RULE, Pruned, pruned


@validator("this folder and its GPU side belong together", "amx", "pair")
def pair(folder: Folder) -> Iterator[Finding]:
    """Ids of a pair's halves, or the CPU folder's note of its source against the GPU side itself."""
    partner, manifest = folder.partner, folder.checkpoint.manifest or {}
    assert partner is not None
    theirs = partner.manifest or {}
    if "pair" in theirs:
        fits = _id(theirs, "gpu") is not None and _id(theirs, "gpu") == _id(manifest, "cpu")
    else:
        fits = _source(manifest) in (
            (partner.header_digest, partner.sample_digest),
            _source(theirs),
        )
    if not fits:
        message = (
            "is neither the repo this folder was made from, nor made from that, nor the half made "
            f"with it (its pair {_id(theirs, 'gpu') or 'none'}, this folder's "
            f"{_id(manifest, 'cpu') or 'none'})"
        )
        yield Finding("QC050", "error", str(partner.root), message)


def _source(manifest: dict[str, Any]) -> tuple[Any, Any]:
    """Digests of what a folder was made from; of tiles cut from others, of what those were made from."""
    tiles = manifest.get("amx")
    before = tiles.get("cut_from") if isinstance(tiles, dict) else None
    identity = before if isinstance(before, dict) else manifest.get("identity", {})
    return identity.get("source"), identity.get("source_sample")


def _id(manifest: dict[str, Any], side: str) -> str | None:
    found = manifest.get("pair")
    if not isinstance(found, dict) or found.get("side") != side:
        return None
    return str(found.get("id"))


_OTHER_FILES = (
    ", but it holds tensors of the same names and sizes as were read. If they are the same tensors in "
    "other files (pipeline stages, another shard size): a joined folder was read from its stages, so "
    "give --against the folder that holds them; QC033 at --level full tells whether any byte differs"
)

_OTHER_STEP = ". If several commands made the folder, give --against what the last of them read"


@validator("every source byte was used, or dropped by a named rule", "receipt", "source")
def conservation(folder: Folder) -> Iterator[Finding | Skipped]:
    source, manifest = folder.source, folder.checkpoint.manifest or {}
    assert source is not None
    identity = manifest.get("identity", {})
    for key, here, what in (
        ("source", source.header_digest, "headers"),
        ("source_sample", source.sample_digest, "weights or side files"),
    ):
        if identity.get(key) != here:
            where = str(source.root)
            message = f"the folder was not made from it: its {what} differ"
            if what == "headers":
                message += _OTHER_FILES if _has_all_read(folder) else _OTHER_STEP
            steps = {step.get("name") for step in manifest.get("passes", ())}
            if "graft_draft" in steps:
                message += ". A draft was grafted to it: give --draft DRAFT as well"
            if "merge" in steps:
                message += ". Adapters were merged into it: give each with --adapter ADAPTER"
            yield Finding("QC031", "error", where, message)
            return
    used = _used(folder)
    dropped = {name for names in _rules(manifest).values() for name in names}
    partly = set(_rules(manifest).get(ROWS_RULE, ()))
    less = pruned(folder.checkpoint, source) if partly else None
    # A pipeline stage is made from part of the source on purpose: `split` proves the union.
    stage = "stage" in manifest
    if RANK in manifest:
        yield Skipped(
            "that the folders of all ranks together hold every row (`split` did, planning)"
        )
    for name, tensor in source.items():
        if name in partly and not _rows_used(less, name, used.get(name, [])):
            message = "other parts reached the output than those of the experts that stay"
            yield Finding("QC030", "error", name, message)
        if name in dropped or (stage and name not in used) or (RANK in manifest and name in used):
            continue
        at = 0
        for start, stop in sorted(used.get(name, [])):
            if start > at:
                break
            at = max(at, stop)
        if at < tensor.type.nbytes:
            yield Finding(
                "QC030", "error", name,
                f"bytes from {at} of {tensor.type.nbytes} reached no output, and no rule "
                "drops them",
            )  # fmt: skip
    gone = manifest.get("dropped_files", {})
    for file in source.side_files:
        if file not in gone and not (folder.checkpoint.root / file).is_file():
            yield Finding("QC032", "error", file, "a side file of the source is missing")


def _rows_used(less: Pruned | None, name: str, used: list[tuple[int, int]]) -> bool:
    """Tell whether exactly the parts of the experts that stay were used."""
    rows = None if less is None else less.rows(name)
    if less is None or rows is None:
        return False
    dims, size = less.source.role_index.dims, less.source[name].type.nbytes
    each = size // dims.num_experts
    wanted = {at for row in rows for at in (row * each, (row + 1) * each - 1)}
    inside = all(any(start <= at < stop for start, stop in used) for at in wanted)
    return inside and sum(stop - start for start, stop in used) == each * len(rows)


def _used(folder: Folder) -> dict[str, list[tuple[int, int]]]:
    """Bytes of the source that the receipt names, by tensor."""
    used: dict[str, list[tuple[int, int]]] = {}
    for line in folder.receipt or ():
        for part in line.get("sources", ()):
            used.setdefault(part["name"], []).append((part["start"], part["stop"]))
    return used


def _has_all_read(folder: Folder) -> bool:
    """Tell whether the source has every tensor that was read, of the same size."""
    assert folder.source is not None
    used = _used(folder)
    return bool(used) and all(
        name in folder.source and max(stop for _, stop in ranges) == folder.source[name].type.nbytes
        for name, ranges in used.items()
    )


def _rules(manifest: dict[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = manifest.get("dropped", {})
    return found
