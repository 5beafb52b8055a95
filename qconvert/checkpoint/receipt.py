"""The text of a receipt, and the seals that a receipt and a manifest end in.

A receipt has one JSON object per line: for tensors (type, place, xxh3-128 of their bytes and of the
source bytes as they were read), then for files, and last its seal: the number of lines before it, and
xxh3-128 of all bytes before it. The last entry of a manifest is its seal: xxh3-128 of all bytes before
that line. Seals cover bytes, so a changed bit shows wherever it is. Every byte of a folder is under one
chain: tensors' data, shards' headers and all other files have hashes in the receipt, and the receipt has
its seal. Folders made before seals existed have none.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import xxhash

from qconvert.core.errors import CheckpointError, QConvertError
from qconvert.core.json_text import parse_json
from qconvert.core.links import PER_TENSOR, is_inside, open_regular, read_regular

# Whether a seal is present and matches.
Seal = Literal["sound", "broken", "none"]

# A receipt names every source range that was read, and stacked experts are read from many ranges.
_LIMIT = 64 << 20
_LONGEST = 16 << 20  # bytes of one line
_MANIFEST_SEAL = re.compile(rb'  "seal": "([0-9a-f]{32})"\n}\n\Z')

_OF_TENSORS: Mapping[str, type] = {
    "name": str, "dtype": str, "shape": list, "file": str, "offset": int, "nbytes": int,
    "xxh3": str, "sources": list,
}  # fmt: skip
_OF_FILES: Mapping[str, type] = {"file": str, "nbytes": int}
_MAY_BE_OF_FILES = frozenset({"xxh3", "header_xxh3", "sha256"})
_OF_SOURCES: Mapping[str, type] = {"name": str, "start": int, "stop": int, "xxh3": str}


@dataclass(frozen=True, slots=True)
class ReceiptText:
    """A receipt read back: its lines without the seal, and whether the seal matches."""

    lines: tuple[Mapping[str, Any], ...]
    seal: Seal


def digest(data: bytes) -> str:
    """xxh3-128 in hex, as everywhere in receipts."""
    return xxhash.xxh3_128(data).hexdigest()


def is_own_name(name: object) -> bool:
    """Return whether a name read from a file is a plain relative path inside its folder, as we write
    them, and outside the work folder."""
    return isinstance(name, str) and _is_own(name)


@lru_cache(maxsize=512)  # a receipt names each shard for each of its tensors: 15 us a line
def _is_own(name: str) -> bool:
    if not is_inside(name):
        return False
    path = PurePosixPath(name)
    return path.as_posix() == name and not name.lower().startswith((".qconvert", "./"))


def sealed_lines(lines: Iterable[str]) -> list[str]:
    """A receipt's lines followed by its seal."""
    found = list(lines)
    whole = xxhash.xxh3_128()
    for line in found:
        whole.update(line.encode())
        whole.update(b"\n")
    return [*found, _seal_line(len(found), whole.hexdigest())]


def _seal_line(count: int, xxh3: str) -> str:
    return json.dumps({"receipt": {"lines": count, "xxh3": xxh3}}, separators=(",", ":"))


def sealed_manifest(content: Mapping[str, Any]) -> bytes:
    """A manifest's bytes, the seal last."""
    assert content, "an empty manifest has no place for a seal"
    assert "seal" not in content
    text = json.dumps(content, indent=2)
    body = (text.removesuffix("\n}") + ",\n").encode()
    return body + f'  "seal": "{digest(body)}"\n}}\n'.encode()


def manifest_seal(data: bytes) -> Seal:
    """Return whether a manifest has a seal that matches its bytes."""
    found = _MANIFEST_SEAL.search(data)
    if found is None:
        return "broken" if b'"seal"' in data[-80:] else "none"
    return "sound" if digest(data[: found.start()]).encode() == found[1] else "broken"


def read_receipt(
    file: Path, tensors: int, *, error: type[QConvertError] = CheckpointError
) -> ReceiptText | None:
    """The receipt of a folder with that many tensors, None if there is none.

    Raises `error` if it is not a regular file, is too large, or has a line that is neither a tensor
    nor a file inside the folder nor, at the end, a seal.
    """
    try:
        data = read_regular(file, _LIMIT + PER_TENSOR * tensors, error=error)
    except FileNotFoundError:
        return None
    return parse_receipt(data, file, error=error)


def read_file_lines(file: Path, *, error: type[QConvertError]) -> ReceiptText:
    """The lines for files in a receipt; its other lines are parsed one at a time and not kept: a receipt
    read whole takes 1.3 KB of memory per tensor. Raises `error` as `read_receipt` does, and if the
    receipt is missing."""
    kept: list[Mapping[str, Any]] = []
    whole, count, last = xxhash.xxh3_128(), 0, b""
    try:
        fd = open_regular(file, follow=False, error=error)
    except FileNotFoundError:
        raise error(f"{file}: is missing") from None
    with os.fdopen(fd, "rb") as stream:
        while raw := stream.readline(_LONGEST):
            if last:
                whole.update(last)
                count += 1
                line = parse_json(last, f"{file}:{count}", error=error)
                line = _checked(line, file, count, error)
                if "name" not in line:
                    kept.append(line)
            last = raw
    seal = last == (_seal_line(count, whole.hexdigest()) + "\n").encode()
    return ReceiptText(tuple(kept), "sound" if seal else "broken")


def _checked(line: Any, file: Path, number: int, error: type[QConvertError]) -> Mapping[str, Any]:
    if not _is_line(line):
        raise error(f"{file}:{number}: expected the entry of a tensor or file")
    if not is_own_name(line["file"]):
        raise error(f"{file}:{number}: names {line['file']!r}, which is not inside the folder")
    found: Mapping[str, Any] = line
    return found


def parse_receipt(
    data: bytes, file: Path, *, error: type[QConvertError] = CheckpointError
) -> ReceiptText:
    """As `read_receipt`, from bytes already read."""
    lines: list[Mapping[str, Any]] = []
    raws = data.splitlines()
    for number, raw in enumerate(raws, 1):
        line = parse_json(raw, f"{file}:{number}", error=error)
        if number == len(raws) and isinstance(line, dict) and line.keys() == {"receipt"}:
            return ReceiptText(tuple(lines), _seal_of(data, number - 1))
        lines.append(_checked(line, file, number, error))
    return ReceiptText(tuple(lines), "none")


def _seal_of(data: bytes, lines: int) -> Seal:
    start = data.rfind(b"\n", 0, len(data) - 1) + 1
    wanted = _seal_line(lines, digest(data[:start])) + "\n"
    return "sound" if data[start:] == wanted.encode() else "broken"


def _is_line(line: Any) -> bool:
    """Return whether a line's keys have the right types; rules check their values."""
    if not isinstance(line, dict):
        return False
    if "name" not in line:
        others = line.keys() - _OF_FILES.keys()
        return (
            _has(line, _OF_FILES)
            and others <= _MAY_BE_OF_FILES
            and all(isinstance(line[key], str) for key in others)
        )
    return (
        line.keys() == _OF_TENSORS.keys()
        and _has(line, _OF_TENSORS)
        and all(type(n) is int for n in line["shape"])
        and all(_has(p, _OF_SOURCES) and len(p) == len(_OF_SOURCES) for p in line["sources"])
    )


def _has(line: Any, kinds: Mapping[str, type]) -> bool:
    return isinstance(line, dict) and all(type(line.get(k)) is t for k, t in kinds.items())
