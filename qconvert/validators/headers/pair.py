"""The CPU folder and its GPU side must belong together: experts of one model with layers of another
load without error and generate garbage.

QC050 the two were not made as a pair, and the GPU side is neither the repo the CPU folder was made from
nor made from that repo.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Need


@dataclass(frozen=True)
class Pair:
    """Ids of a pair's halves, or the CPU folder's note of its source against the GPU side itself."""

    name: str = "pair"
    proves: str = "this folder and its GPU side belong together"
    needs: frozenset[Need] = frozenset({"amx", "pair"})

    def __call__(self, folder: Folder) -> Iterator[Finding]:
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
    identity = manifest.get("identity", {})
    return identity.get("source"), identity.get("source_sample")


def _id(manifest: dict[str, Any], side: str) -> str | None:
    found = manifest.get("pair")
    if not isinstance(found, dict) or found.get("side") != side:
        return None
    return str(found.get("id"))


VALIDATOR = Pair()
