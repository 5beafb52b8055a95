"""Names of model repos on the Hub: `ORG/NAME`, `ORG/NAME@REVISION`, both also after `hf://`.

The grammar is huggingface_hub's own (utils/_hf_uris.py); the client is imported only for a text
that cannot be anything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qconvert.core.errors import CheckpointError, UsageError

_SCHEME = "hf://"
_PLAIN = re.compile(r"[\w.-]+/[\w.-]+(@\S+)?")
_ID = re.compile(r"(?!.*(?:--|\.\.))\w[\w.-]*(?<![-.])/\w[\w.-]*(?<![-.])")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHED = re.compile(r"models--(.+?)--(.+)")


@dataclass(frozen=True, slots=True)
class Repo:
    """A model repo; `revision` is a branch, tag, commit or `refs/pr/N`, None for the default branch."""

    id: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"

    @property
    def is_commit(self) -> bool:
        """Return whether the revision is a commit, which never stands for anything else."""
        return self.revision is not None and bool(_COMMIT.fullmatch(self.revision))

    @property
    def download(self) -> str:
        """The command that fetches it into the client's cache."""
        return f"hf download {self.id}" + (f" --revision {self.revision}" if self.revision else "")


def is_id(name: Any) -> bool:
    """Return whether a text can be a repo's id, by the Hub's rules (huggingface_hub,
    validate_repo_id; asked here without the client, whose import every conversion would pay for)."""
    return isinstance(name, str) and len(name) <= 96 and bool(_ID.fullmatch(name))


def parse_repo(text: str) -> Repo | None:
    """The repo that a text names, None if it may be a path. Everything after `@` is the revision: branch
    names may contain slashes. Raises UsageError for `hf://` followed by something other than a model
    repo.
    """
    said = text.startswith(_SCHEME)
    if not said and not _PLAIN.fullmatch(text):
        return None
    from huggingface_hub import parse_hf_uri
    from huggingface_hub.errors import HfUriError

    name, at, revision = text.removeprefix(_SCHEME).partition("@")
    why = ""
    try:
        uri = parse_hf_uri(_SCHEME + name)
        if uri.type == "model" and not uri.path_in_repo and bool(at) == bool(revision):
            return Repo(uri.id, revision or None)
    except HfUriError as error:
        why = f": {error.msg.rstrip('.')}"
    if not said:
        return None
    raise UsageError(f"{text}: invalid model repo id{why}; write hf://ORG/NAME[@REVISION]")


def cached_folder(repo: Repo, where: str) -> Path:
    """The repo's snapshot in the client's cache (HF_HUB_CACHE), whole or not. Nothing is downloaded:
    raises CheckpointError if there is none; `where` is how the user named it."""
    found = snapshot(repo)
    if found is None:
        raise CheckpointError(
            f"{where}: not found as a folder or in the local Hub cache, and the Hub cannot be asked "
            f"(offline, or no answer); download it first: {repo.download}"
        )
    return found


def snapshot(repo: Repo) -> Path | None:
    """Return what the client's cache has of the repo's revision, None for nothing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo.id, revision=repo.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def cached_id(folder: Path) -> str | None:
    """The id of the repo that a folder of the client's cache is a snapshot of
    (`models--ORG--NAME/snapshots/COMMIT`), None for any other folder."""
    if folder.parent.name != "snapshots":
        return None
    match = _CACHED.fullmatch(folder.parent.parent.name)
    return None if match is None else f"{match[1]}/{match[2]}"


# The commits that a command reads of repos on the Hub. Apart from their store (hub_store.py), whose
# client a command on a folder does not need.

PINNED: ContextVar[dict[Repo, str] | None] = ContextVar("pinned", default=None)


@contextmanager
def pinned() -> Iterator[None]:
    """Within this a revision stands for the commit that it stood for when it was first asked for: a
    command reads one commit, whatever happens to the branch."""
    if PINNED.get() is not None:
        yield
        return
    token = PINNED.set({})
    try:
        yield
    finally:
        PINNED.reset(token)
