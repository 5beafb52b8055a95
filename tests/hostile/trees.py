"""All that lies in a folder, and what changed in it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

# Files beyond this are told apart by size and time; hashing a sparse 3 GiB file takes seconds.
_READ = 4 << 20

Entry = tuple[str, int, int, str]  # kind, mode, size, what is in it
Tree = Mapping[str, Entry]


def _walk(folder: bytes, below: bytes = b"") -> Iterator[tuple[bytes, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            name = below + entry.name
            info = entry.stat(follow_symlinks=False)
            yield name, info
            if stat.S_ISDIR(info.st_mode):
                yield from _walk(entry.path, name + b"/")


def tree(root: Path) -> dict[str, Entry]:
    """Every entry below a folder by its path: names may be any bytes, links are not followed."""
    found: dict[str, Entry] = {}
    base = os.fsencode(root)
    for name, info in _walk(base):
        path = base + b"/" + name
        mode = stat.S_IMODE(info.st_mode)
        key = os.fsdecode(name)
        if stat.S_ISLNK(info.st_mode):
            found[key] = ("link", mode, 0, os.fsdecode(os.readlink(path)))  # noqa: PTH115
        elif stat.S_ISDIR(info.st_mode):
            found[key] = ("folder", mode, 0, "")
        elif stat.S_ISREG(info.st_mode):
            found[key] = ("file", mode, info.st_size, _content(path, info))
        else:
            found[key] = ("special", mode, stat.S_IFMT(info.st_mode), str(info.st_rdev))
    return found


def _content(path: bytes, info: os.stat_result) -> str:
    if info.st_size > _READ:
        return f"{info.st_mtime_ns}"
    with open(path, "rb") as stream:
        return hashlib.blake2b(stream.read(), digest_size=16).hexdigest()


def changes(before: Tree, after: Tree) -> tuple[str, ...]:
    """`+ made`, `- removed`, `~ changed`, sorted by path."""
    found = []
    for name in sorted({*before, *after}):
        if name not in before:
            found.append(f"+ {name}")
        elif name not in after:
            found.append(f"- {name}")
        elif before[name] != after[name]:
            found.append(f"~ {name}")
    return tuple(found)


def digest(of: Tree, *more: str) -> str:
    """A hash that tells hostile inputs apart."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in more:
        hasher.update(part.encode(errors="surrogateescape") + b"\0")
    for name, entry in sorted(of.items()):
        hasher.update(repr((name, entry)).encode(errors="surrogateescape"))
    return hasher.hexdigest()
