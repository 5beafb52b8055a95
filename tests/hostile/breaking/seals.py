"""Changed manifests and receipts sealed again, as whoever forges them would: what is broken in them must
be refused for itself, not for a hash that does not fit. Folders without seals stay without.

A manifest ends in a line with the xxh3-128 of all bytes before it, a receipt in a line with the number
of lines before it and the xxh3-128 of those; the receipt has a line with the hash of the manifest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from hostile.breaking.texts import dumped

MANIFEST, RECEIPT = "qconvert.json", "qconvert.receipt.jsonl"


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write qconvert.json; sealed, and with its hash in the receipt, if it was sealed before."""
    file = folder / MANIFEST
    sealed = manifest.pop("seal", None) is not None
    data = dumped(manifest)
    if sealed:
        data = data.rstrip()[:-1] + (b",\n" if manifest else b"\n")
        data += f'  "seal": "{xxhash.xxh3_128_hexdigest(data)}"\n}}\n'.encode()
    file.write_bytes(data)
    if sealed and (folder / RECEIPT).is_file():
        lines = read_receipt(folder)
        for line in lines:
            if line.get("file") == MANIFEST and "xxh3" in line:
                line.update(nbytes=len(data), xxh3=xxhash.xxh3_128_hexdigest(data))
        write_receipt(folder, lines)


def read_receipt(folder: Path) -> list[dict[str, Any]]:
    """All lines, a seal too."""
    text = (folder / RECEIPT).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def write_receipt(folder: Path, lines: list[Any]) -> None:
    """Write the lines; a seal among them is made anew and put last."""
    kept = [line for line in lines if not _is_seal(line)]
    data = b"".join(dumped(line) + b"\n" for line in kept)
    if len(kept) != len(lines):
        seal = {"lines": len(kept), "xxh3": xxhash.xxh3_128_hexdigest(data)}
        data += json.dumps({"receipt": seal}, separators=(",", ":")).encode() + b"\n"
    (folder / RECEIPT).write_bytes(data)


def _is_seal(line: Any) -> bool:
    return isinstance(line, dict) and line.keys() == {"receipt"}
