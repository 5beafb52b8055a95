"""A folder and a repo, or two repos, compared file by file, by the hashes that the Hub lists: of weights
not a byte is fetched, and of a folder only files of the same size are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qconvert.checkpoint.hub_cache import Repo, parse_repo
from qconvert.client.download import client
from qconvert.client.listing import files_of
from qconvert.client.retries import Refused, patiently
from qconvert.core.errors import CheckpointError, UsageError
from qconvert.core.names import natural_key
from qconvert.hub.destination import is_hub
from qconvert.hub.trees import Digests, Remote, local_files, remote_files


@dataclass(frozen=True, slots=True)
class FileDifference:
    """A file that is on one side alone (`only-a`, `only-b`), or has another size or hash (`data`)."""

    file: str
    kind: Literal["only-a", "only-b", "data"]
    detail: str


@dataclass(frozen=True, slots=True)
class FilesCompared:
    """Number of files that both sides have, and those that differ, in the order of their names."""

    equal: int
    differences: tuple[FileDifference, ...]


def compare_files(a: str | Path, b: str | Path, *, follow_links: bool = False) -> FilesCompared:
    """Compare the files of two places, at least one of them a repo (`hf://ORG/NAME`, `@REVISION`).
    Hidden files are left out, .gitattributes among them. Raises UsageError for two folders,
    CheckpointError for a repo that is not there, OutputError and RunError as the Hub and the folder
    do."""
    if not (is_hub(a) or is_hub(b)):
        raise UsageError("files are compared with a repo's: name one, hf://ORG/NAME")
    if is_hub(a) and is_hub(b):
        return _compared(_listed(str(a)), _listed(str(b)))
    here, repo, turned = (b, a, True) if is_hub(a) else (a, b, False)
    there = _listed(str(repo))
    found = _hashed(Path(here), there, follow_links=follow_links)
    return _compared(there, found) if turned else _compared(found, there)


def _listed(where: str) -> dict[str, Remote]:
    """A repo's files with size and hash."""
    repo = parse_repo(where)
    assert isinstance(repo, Repo), "it begins with hf://"
    endpoint = client().endpoint
    try:
        found = patiently(
            lambda: files_of(endpoint, repo.id, repo.revision or "main"), f"listing {repo}"
        )
    except Refused as error:
        raise CheckpointError(f"{where}: {error}") from error
    return {path: file for path, file in remote_files(found).items() if not _hidden(path)}


def _hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _hashed(folder: Path, there: Mapping[str, Remote], *, follow_links: bool) -> dict[str, Remote]:
    """A folder's files as the repo lists its own. What can be told by size is not hashed."""
    sizes = local_files(folder, follow_links=follow_links)
    digests = Digests(folder, follow_links=follow_links)
    alike = {path: there[path].algorithm for path in sizes if path in there}
    alike = {path: how for path, how in alike.items() if there[path].size == sizes[path]}
    digests.of(alike.items())
    return {
        path: Remote(size, digests.known[path, alike[path]], alike[path])
        if path in alike
        else Remote(size, "", "sha256")
        for path, size in sizes.items()
    }


def _compared(a: Mapping[str, Remote], b: Mapping[str, Remote]) -> FilesCompared:
    found = []
    for path in sorted({*a, *b}, key=natural_key):
        first, second = a.get(path), b.get(path)
        if first is None or second is None:
            one = first or second
            assert one is not None
            kind: Literal["only-a", "only-b"] = "only-b" if first is None else "only-a"
            found.append(FileDifference(path, kind, f"{one.size} bytes"))
        elif first.size != second.size:
            found.append(
                FileDifference(path, "data", f"{first.size} bytes in A, {second.size} in B")
            )
        elif (first.algorithm, first.hash) != (second.algorithm, second.hash):
            detail = f"{first.algorithm} {first.hash} in A, {second.algorithm} {second.hash} in B"
            found.append(FileDifference(path, "data", detail))
    return FilesCompared(len({*a, *b}) - len(found), tuple(found))
