"""Files of tensor-parallel ranks, `*-TP-000.safetensors`, `*-TP-001.safetensors`, ..., and
`*-TP-common.safetensors`, as Grok-2 is published.

What all ranks share is in the common files, whole. A tensor of which each rank has a part is in the file
of each under one name; here it is several, `TENSOR[TP-000]` and so on, until the pass `join_ranks` makes
one of them. Format source: sglang (`models/grok.py`, _prepare_presharded_weights), whose rank takes its
own file and the common ones, in no other number of ranks (sglang#36438).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from qconvert.core.errors import CheckpointError

_FILE = re.compile(r".*-TP-(\d{3}|common)\.safetensors", re.DOTALL)
_PART = re.compile(r"(.+)\[TP-(\d{3})\]", re.DOTALL)
_COMMON = "common"
T = TypeVar("T")


def ranks_of(names: Iterable[str]) -> Mapping[str, int | None]:
    """The rank of each file of weights, None for a common one; empty where they are no files of ranks.
    Raises CheckpointError where those of a rank are missing."""
    found = {name: match[1] for name in names if (match := _FILE.fullmatch(name)) is not None}
    ranks = {int(rank) for rank in found.values() if rank != _COMMON}
    if not ranks:
        return {}
    missing = sorted(set(range(max(ranks) + 1)) - ranks)
    if missing or len(ranks) == 1:
        rank = missing[0] if missing else max(ranks) + 1
        raise CheckpointError(
            f"expected files of ranks 0 to {max(max(ranks), 1)}, found none named "
            f"*-TP-{rank:03d}.safetensors; the download is incomplete"
        )
    return {name: None if rank == _COMMON else int(rank) for name, rank in found.items()}


def is_of_ranks(folder: Path) -> bool:
    """Return whether a folder holds files of ranks."""
    return any(_FILE.fullmatch(file.name) for file in folder.glob("*-TP-*.safetensors"))


def part_name(tensor: str, rank: int | None) -> str:
    """The name of a rank's part of a tensor, and of a common one its own."""
    return tensor if rank is None else f"{tensor}[TP-{rank:03d}]"


def whole_name(part: str) -> tuple[str, int] | None:
    """The tensor of which a name is a rank's part, and the rank."""
    match = _PART.fullmatch(part)
    return None if match is None else (match[1], int(match[2]))


def parts_in(tensors: Mapping[str, T]) -> dict[str, dict[int, T]]:
    """The parts of each tensor that ranks have parts of, by rank."""
    found: dict[str, dict[int, T]] = {}
    for name, one in tensors.items():
        if name.endswith("]") and (place := whole_name(name)) is not None:
            found.setdefault(place[0], {})[place[1]] = one
    return found
