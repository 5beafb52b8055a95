"""Receipt and manifest of a folder whose small files were changed, sealed again.

The manifest records each repair (`repaired`: file, hash before, hash after), the receipt has the new
sizes and hashes; lines of tensors and shards stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from qconvert.checkpoint.checkpoint import HF_QUANT_CONFIG, INDEX, MANIFEST, RECEIPT, Checkpoint
from qconvert.checkpoint.receipt import digest, parse_receipt, sealed_lines, sealed_manifest
from qconvert.core.errors import CheckpointError

# Small files of a folder that people and tools edit; what else differs from its receipt is damage.
METADATA = ("config.json", INDEX, HF_QUANT_CONFIG, "README.md")
# The hash before and the bytes after, by file; None: there is no such file.
Changed = Mapping[str, tuple[str | None, bytes | None]]


def edited(checkpoint: Checkpoint) -> dict[str, tuple[str, bytes]]:
    """Metadata that is not what the receipt records: the hash there, and the bytes."""
    found = {}
    for name, wanted in stated(checkpoint).items():
        now = checkpoint.read(name, checkpoint.receipt_limit)
        if now is not None and digest(now) != wanted:
            found[name] = (wanted, now)
    return found


def stated(checkpoint: Checkpoint) -> dict[str, str]:
    """Hashes of metadata as the conversion wrote it, by file, from the receipt."""
    data = checkpoint.read(RECEIPT, checkpoint.receipt_limit)
    lines = () if data is None else parse_receipt(data, checkpoint.root / RECEIPT).lines
    return {
        line["file"]: line["xxh3"] for line in lines
        if "name" not in line and line["file"] in METADATA and "xxh3" in line
    }  # fmt: skip


def resealed(checkpoint: Checkpoint, changed: Changed) -> dict[str, bytes]:
    """New bytes of manifest and receipt, as far as the folder has them. Raises CheckpointError for a
    receipt that does not match its seal: what it says of the weights cannot be vouched for again."""
    if not changed:
        return {}
    found: dict[str, bytes] = {}
    every: dict[str, tuple[str | None, bytes | None]] = dict(changed)
    manifest, before = checkpoint.manifest, checkpoint.manifest_bytes
    if manifest is not None:
        kept = {key: value for key, value in manifest.items() if key != "seal"}
        entries = [
            {"file": name, "before": old, "after": hash_of(new)}
            for name, (old, new) in changed.items()
        ]
        found[MANIFEST] = sealed_manifest(
            {**kept, "repaired": [*manifest.get("repaired", []), *entries]}
        )
        every[MANIFEST] = (hash_of(before), found[MANIFEST])
    data = checkpoint.read(RECEIPT, checkpoint.receipt_limit)
    if data is not None:
        found[RECEIPT] = receipt_with(data, checkpoint, every)
    return found


def receipt_with(data: bytes, checkpoint: Checkpoint, changed: Changed) -> bytes:
    """A folder's receipt with the lines of changed files, sealed. Raises CheckpointError as
    `resealed`."""
    file = checkpoint.root / RECEIPT
    receipt = parse_receipt(data, file)
    if receipt.seal == "broken":
        raise CheckpointError(
            f"{file}: its bytes do not match its seal, so what it says of the weights is not reliable; "
            "restore it, or convert again"
        )
    raws = data.decode().splitlines()[: len(receipt.lines)]
    lines = []
    hashed = any("sha256" in line for line in receipt.lines if "name" not in line)
    told = set()
    for raw, line in zip(raws, receipt.lines, strict=True):
        name = line["file"]
        if "name" in line or name not in changed:
            lines.append(raw)
            continue
        told.add(name)
        after = changed[name][1]
        if after is not None:
            lines.append(_line(name, after, hashed=hashed))
    for name, (_, after) in changed.items():
        if name not in told and after is not None:
            lines.append(_line(name, after, hashed=hashed))
    texts = lines if receipt.seal == "none" else sealed_lines(lines)
    return ("\n".join(texts) + "\n").encode()


def _line(name: str, data: bytes, *, hashed: bool) -> str:
    line: dict[str, Any] = {"file": name, "nbytes": len(data), "xxh3": digest(data)}
    if hashed:
        line["sha256"] = sha256(data).hexdigest()
    return json.dumps(line, separators=(",", ":"))


def hash_of(data: bytes | None) -> str | None:
    return None if data is None else digest(data)
