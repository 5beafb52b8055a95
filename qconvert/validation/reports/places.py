"""Places in a repository to which findings point: weights are not text, so their findings point to the
file that lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qconvert.checkpoint.checkpoint import INDEX
from qconvert.validation.runner import Report

_CONFIG = "config.json"
_TEXT = (".json", ".jsonl", ".md", ".txt", ".jinja", ".yaml", ".yml", ".py")


@dataclass(frozen=True, slots=True)
class Place:
    """`file` is a text file, relative to the current folder if the validated one is in it, else
    to the validated one; `inside` the tensor, shard or key that is meant (empty: the file itself)."""

    file: str
    inside: str


def places(report: Report) -> Callable[[str], Place]:
    """Place of each finding's `where`. Tensors point to the index, or to the config of a folder that
    has no index; so does a `where` that is not a file of the folder."""
    folder = Path(report.about.get("folder", "."))
    try:
        prefix = folder.resolve().relative_to(Path.cwd().resolve())
    except ValueError:
        prefix = Path()
    listing = (prefix / (INDEX if (folder / INDEX).is_file() else _CONFIG)).as_posix()

    def place(where: str) -> Place:
        if where == str(folder):
            return Place((prefix / _CONFIG).as_posix(), "")
        head, _, rest = where.partition(": ")
        inside = not head.startswith("/") and ".." not in head.split("/")
        if head.endswith(_TEXT) and inside:
            return Place((prefix / head).as_posix(), where if rest else "")
        return Place(listing, where)

    return place
