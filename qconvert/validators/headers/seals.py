"""Receipt and manifest must match their seals.

The receipt has hashes of everything else, and ends in a hash of itself; so does the manifest, which is
also read without a receipt. With both, one changed bit anywhere in a folder shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import MANIFEST, RECEIPT
from qconvert.checkpoint.receipt import Seal, manifest_seal
from qconvert.validation.findings import Finding, Skipped
from qconvert.validation.runner import Folder, Need, NotChecked


@dataclass(frozen=True)
class Seals:
    """Each seal against the bytes before it; if only one of the two has a seal, the other was
    truncated."""

    name: str = "seals"
    proves: str = "receipt and manifest match their seals"
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
                yield Finding("QC049", "error", name, "its bytes do not match its seal")
            elif seal == "none":
                yield Finding(
                    "QC049", "error", name, "has no seal, but the other of the two has one"
                )


VALIDATOR = Seals()
