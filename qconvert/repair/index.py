"""model.safetensors.index.json from the headers of the shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from qconvert.checkpoint.checkpoint import INDEX, Checkpoint
from qconvert.checkpoint.safetensors import Header, read_header
from qconvert.core.errors import CheckpointError
from qconvert.core.links import read_inside, resolved
from qconvert.core.shown import count


class Index(NamedTuple):
    """An index's bytes, and why they are not what the folder has."""

    data: bytes
    why: tuple[str, ...]


def true_index(root: Path, *, follow_links: bool = False) -> Index | None:
    """The index that the shards of a folder need; None where it is right, or where one file needs none.

    Raises CheckpointError for a shard that cannot be read, a tensor in two shards, shards whose names
    (`-00002-of-00005`) show that one is missing.
    """
    try:
        opened = Checkpoint.open(root, follow_links=follow_links)
    except CheckpointError as error:
        reason = str(error)
    else:
        wrong = [text for text in opened.warnings if text.startswith(INDEX)]
        if not wrong:
            return None
        reason = wrong[0]
    files = sorted(root.glob("*.safetensors"))
    if not files or (len(files) == 1 and not (root / INDEX).exists()):
        return None
    headers = {
        file.name: read_header(file, resolved(root, file.name, follow_links=follow_links))
        for file in files
    }
    data = _index(root, headers)
    if data == _present(root):
        return None  # what is wrong is elsewhere
    return Index(data, (f"{count(len(files), 'shard')} read: {reason}",))


def _index(root: Path, headers: dict[str, Header]) -> bytes:
    weight_map: dict[str, str] = {}
    total = 0
    for name, header in headers.items():
        for entry in header.entries:
            if entry.name in weight_map:
                raise CheckpointError(
                    f"tensor {entry.name!r} is in both {weight_map[entry.name]} and {name}; remove the "
                    "shard that does not belong"
                )
            weight_map[entry.name] = name
            total += entry.type.nbytes
    _check_complete(root, list(headers))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _check_complete(root: Path, names: Sequence[str]) -> None:
    """Raises CheckpointError where numbered names show that a shard is missing."""
    stems = [name.removesuffix(".safetensors").rpartition("-of-") for name in names]
    wanted = {int(of) for _, dash, of in stems if dash and of.isdecimal()}
    if wanted and wanted != {len(names)}:
        raise CheckpointError(
            f"{root}: {count(len(names), 'shard')} found, and their names count "
            f"{' or '.join(map(str, sorted(wanted)))}: download the missing ones"
        )


def _present(root: Path) -> bytes | None:
    """The index's bytes, None for one that is missing or cannot be read: it is written again."""
    try:
        return read_inside(root, INDEX, 1 << 30)
    except (FileNotFoundError, CheckpointError):
        return None
