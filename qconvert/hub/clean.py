"""Leftovers of interrupted runs that go to the Hub: branches with shards there, and a work folder
here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qconvert.checkpoint.checkpoint import WORK_DIR
from qconvert.client.download import client
from qconvert.client.retries import Refused, Say, patiently, to_stderr
from qconvert.core.errors import OutputError
from qconvert.hub.destination import hub_destination, hub_work_folder
from qconvert.hub.outlet import UNFINISHED, drop_branch


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Branches of unfinished results in a repo, and the work folder for it, None where there is none."""

    repo: str
    branches: Sequence[str]
    folder: Path | None


def leftovers_of(
    where: str, work_dir: str | Path | None = None, *, say: Say = to_stderr
) -> Leftovers:
    """Return what runs to `hf://ORG/NAME[@BRANCH]` left. Nothing is changed. Raises OutputError and
    RunError where the Hub refuses or fails."""
    repo = hub_destination(where)
    folder = hub_work_folder(repo, work_dir)
    api = client()
    try:
        refs = patiently(
            lambda: api.list_repo_refs(repo.id), f"listing branches of {repo.id}", say=say
        )
    except Refused as error:
        if error.status != 404:
            raise
        names = []
    else:
        names = sorted(ref.name for ref in refs.branches if ref.name.startswith(UNFINISHED))
    return Leftovers(repo.id, names, folder if (folder / WORK_DIR).is_dir() else None)


def remove_branches(found: Leftovers, *, say: Say = to_stderr) -> None:
    """Remove what runs left in the repo: a run that is still at work sends it again."""
    for name in found.branches:
        if not name.startswith(UNFINISHED):
            raise OutputError(f"{found.repo}: {name} is no branch of an unfinished result")
        drop_branch(client(), found.repo, name, say)
