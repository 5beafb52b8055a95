"""Nothing of the source may be lost without a rule that names it.

QC030 a source tensor is neither in the output, nor used for an output, nor dropped.
QC031 the source is not the one this folder was made from.
QC032 a side file of the source is missing.

For a pipeline stage's folder only the tensors it holds are checked: the other stages hold the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Need

_OTHER_FILES = (
    ", but it holds tensors of the same names and sizes as were read. If they are the same tensors in "
    "other files (pipeline stages, another shard size): a joined folder was read from its stages, so "
    "give --against the folder that holds them; QC033 at --level full tells whether any byte differs"
)


@dataclass(frozen=True)
class Conservation:
    """Every source byte is named by the receipt or by a drop rule of the manifest."""

    name: str = "conservation"
    proves: str = "every source byte was used, or dropped by a named rule"
    needs: frozenset[Need] = frozenset({"source", "receipt"})

    def __call__(self, folder: Folder) -> Iterator[Finding]:
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
                if what == "headers" and _has_all_read(folder):
                    message += _OTHER_FILES
                if any(step.get("name") == "graft_draft" for step in manifest.get("passes", ())):
                    message += ". A draft was grafted to it: give --draft DRAFT as well"
                yield Finding("QC031", "error", where, message)
                return
        used = _used(folder)
        dropped = {name for names in _rules(manifest).values() for name in names}
        # A pipeline stage is made from part of the source on purpose: `split` proves the union.
        stage = "stage" in manifest
        for name, tensor in source.items():
            if name in dropped or (stage and name not in used):
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


VALIDATOR = Conservation()
