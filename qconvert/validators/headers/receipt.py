"""The receipt must describe its folder; receipt and manifest must match their seals.

The receipt has hashes of everything else, and ends in a hash of itself; so does the manifest, which is
also read without a receipt. With both, one changed bit anywhere in a folder shows.

QC020 a tensor or file of the receipt is not in the folder, or the other way round.
QC021 the receipt states another type, place or size for a tensor or file than it has.
QC049 receipt or manifest does not match its seal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from qconvert.checkpoint.checkpoint import MANIFEST, RECEIPT, SIGNATURE, Checkpoint
from qconvert.checkpoint.receipt import Seal, manifest_seal
from qconvert.validation.findings import Finding, Skipped
from qconvert.validation.runner import Folder, NotChecked, validator

# Changed after a conversion: the model card by people and `upload`, one by the Hub, one by `sign`.
EDITED = frozenset({"README.md", ".gitattributes", SIGNATURE})


@validator("the receipt describes these tensors and files", "receipt")
def receipt(folder: Folder) -> Iterator[Finding]:
    """Receipt against headers and file sizes."""
    checkpoint = folder.checkpoint
    lines = folder.receipt or ()
    tensors = {line["name"]: line for line in lines if "name" in line}
    for name in sorted(set(checkpoint) ^ set(tensors)):
        where = "the receipt" if name in checkpoint else "the folder"
        yield Finding("QC020", "error", name, f"is not in {where}")
    for name in sorted(set(checkpoint) & set(tensors)):
        source, line = checkpoint[name], tensors[name]
        real = (
            source.type.dtype,
            list(source.type.shape),
            checkpoint.shards[source.shard].path.name,
            source.offset,
        )
        said = (line["dtype"], line["shape"], line["file"], line["offset"])
        if real != said:
            yield Finding("QC021", "error", name, f"receipt says {said}, header says {real}")
    yield from _strays(checkpoint, {line["file"] for line in lines if "name" not in line})
    for line in lines:
        if "name" in line or line["file"] in EDITED:
            continue
        there = checkpoint.there(line["file"])
        if there is None:
            yield Finding("QC020", "error", line["file"], f"is in {RECEIPT}, but not in the folder")
        elif there.st_size != line["nbytes"]:
            yield Finding(
                "QC021", "error", line["file"],
                f"has {there.st_size} bytes, but the receipt says {line['nbytes']}",
            )  # fmt: skip


def _strays(checkpoint: Checkpoint, known: set[str]) -> Iterator[Finding]:
    """Files not in the receipt. Runtimes glob for shards, so an unexpected shard is an error."""
    for file in (*checkpoint.side_files, *checkpoint.denied_files):
        if file in known or file in EDITED or file == RECEIPT or file.endswith("/"):
            continue
        if file.startswith("."):  # of git, and of those that check a repository
            continue
        severity: Literal["error", "warning"] = (
            "error" if file.endswith(".safetensors") else "warning"
        )
        yield Finding("QC020", severity, file, f"is not in {RECEIPT}")


@validator("receipt and manifest match their seals", "files")
def seals(folder: Folder) -> Iterator[Finding | Skipped]:
    """Each seal against the bytes before it; if only one of the two has a seal, the other was
    truncated."""
    receipt = folder.receipt_text
    found: dict[str, Seal] = {}
    if receipt is not None:
        found[RECEIPT] = receipt.seal
    manifest = folder.checkpoint.manifest_bytes
    if manifest is not None:
        found[MANIFEST] = manifest_seal(manifest)
    if not found:
        raise NotChecked(f"the folder has no {MANIFEST}")
    if set(found.values()) == {"none"}:
        raise NotChecked("made by a version that wrote no seals")
    for name, seal in found.items():
        if seal == "broken":
            yield Finding("QC049", "error", name, "its bytes do not match its seal")
        elif seal == "none":
            yield Finding("QC049", "error", name, "has no seal, but the other of the two has one")
