"""Receipt and manifest must be as they were sealed.

The receipt has hashes of everything else, and ends in a hash of itself; so does the manifest, which is
read without a receipt too. With both, one changed bit anywhere in a folder shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import MANIFEST, RECEIPT
from qconvert.checkpoint.receipt import Seal, manifest_seal
from qconvert.validation.findings import Finding, Rule, Skipped
from qconvert.validation.runner import Folder, Need, NotChecked

RULES = (
    Rule(
        "QC049",
        "receipt or manifest is not as it was sealed",
        "A bit changed on a disk or in a transfer, someone edited the file, or its last line was cut "
        "off. What it says of the folder cannot be relied on.",
        "Copy the named file again from where it was made, or run the conversion's command again on the "
        "folder: it repairs what is not as it was.",
    ),
)


@dataclass(frozen=True)
class Seals:
    """Each seal against the bytes before it; one without the other is cut off."""

    name: str = "seals"
    proves: str = "receipt and manifest are as they were sealed"
    needs: frozenset[Need] = frozenset({"files"})

    def __call__(self, folder: Folder) -> Iterator[Finding | Skipped]:
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
                yield Finding("QC049", "error", name, "its bytes are not those that were sealed")
            elif seal == "none":
                yield Finding("QC049", "error", name, "has no seal, and the file beside it has one")


VALIDATOR = Seals()
