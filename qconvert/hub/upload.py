"""A folder to a repo, and the proof that it arrived.

The client's `upload_folder` sends what the repo does not have (huggingface_hub 1.33: one commit, or
with hf_xet several); afterwards the commit's tree is compared with the folder, file by file.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.hub_cache import Repo
from qconvert.core.errors import OutputError
from qconvert.hub.download import Reader, client
from qconvert.hub.retries import Refused, Say, patiently, without_userinfo
from qconvert.hub.trees import (
    Difference,
    Digests,
    Remote,
    differences,
    local_files,
    remote_files,
    stale_weights,
)
from qconvert.run.events import Events, Silent

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@dataclass(frozen=True, slots=True)
class Target:
    """Where to, and how: a repo, whose `revision` is a branch (made where it is missing) or
    `refs/pr/N`; a pull request instead of a commit; `private` for a repo that is made."""

    repo: Repo
    message: str
    private: bool = False
    create_pr: bool = False


@dataclass(frozen=True, slots=True)
class Pending:
    """What an upload would do: files of the folder with their sizes, those the repo lacks or has
    otherwise, weights that only the repo has. `exists` and `private` of the repo."""

    files: Mapping[str, int]
    changed: tuple[Difference, ...]
    stale: tuple[str, ...]
    exists: bool
    private: bool
    commit: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of the files to send; the Hub may know some of them already."""
        return sum(self.files[change.path] for change in self.changed)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A finished upload: the commit, its page, the pull request's page, and what of the folder is not
    on the Hub as it is here. `read_back` files were fetched again and compared byte for byte."""

    commit: str
    url: str
    pull_request: str | None
    differences: tuple[Difference, ...]
    stale: tuple[str, ...]
    read_back: int


def considered(
    folder: Path, rewritten: Mapping[str, bytes], *, follow_links: bool = False
) -> dict[str, int]:
    """Files that an upload would hold against the repo, with their sizes: those of the folder, and
    `rewritten`, which are made anew before. Nothing is asked of the Hub. Raises OutputError."""
    found = local_files(folder, follow_links=follow_links)
    return {**found, **{path: len(data) for path, data in rewritten.items()}}


class Upload:
    """One upload, in three steps: `pending`, `send`, `proof`. `say` gets a line for each wait."""

    def __init__(
        self,
        folder: Path,
        target: Target,
        *,
        events: Events | None = None,
        say: Say = print,
        follow_links: bool = False,
    ) -> None:
        self.folder, self.target = folder, target
        self._follow_links = follow_links
        self._events = events or Silent()
        self._say = say
        self._api: HfApi = client()
        self._digests = Digests(folder, self._events.wrote, follow_links=follow_links)
        self._files = local_files(folder, follow_links=follow_links)

    def _ask(self, call: Any, what: str, once: str | None = None) -> Any:
        then = "what was sent is kept, the same command goes on"
        return patiently(call, what, say=self._say, once=once, then=then)

    def pending(self) -> Pending:
        """Compare the folder with the repo as it is now. Raises OutputError where the repo is public
        and was to be private."""
        repo, target = self.target.repo, self.target
        info = self._look(None)
        if info is None:
            changed = tuple(Difference(path, "is not there") for path in self._files)
            return Pending(self._files, changed, (), False, target.private, None)
        if target.private and not info.private:
            raise OutputError(
                f"{repo.id} is there already, and public: --private is for repos that are made; change "
                "it in its settings, or name another"
            )
        if repo.revision is not None:
            info = self._look(repo.revision) or info  # a branch begins as a copy of main
        there = self._tree(str(info.sha))
        self._events.start(_same_size(self._files, there), 0)
        changed = tuple(differences(self._files, there, self._digests))
        stale = tuple(stale_weights(self._files, there))
        return Pending(self._files, changed, stale, True, bool(info.private), str(info.sha))

    def _look(self, revision: str | None) -> Any:
        """The Hub's word on the repo, None where it has none of that name."""
        name = self.target.repo.id
        try:
            return self._ask(
                lambda: self._api.repo_info(name, revision=revision), f"looking for {name}"
            )
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def _tree(self, commit: str) -> dict[str, Remote]:
        from huggingface_hub import RepoFile

        name = self.target.repo.id
        listed = self._ask(
            lambda: list(self._api.list_repo_tree(name, recursive=True, revision=commit)),
            f"listing {name}",
        )
        return remote_files(entry for entry in listed if isinstance(entry, RepoFile))

    def send(self, pending: Pending) -> Arrived:
        """Make the repo and branch where they are missing, and send what is pending. Nothing pending
        is no request. The result is not proved yet."""
        target, name = self.target, self.target.repo.id
        if not pending.exists:
            self._ask(
                lambda: self._api.create_repo(name, private=target.private or None, exist_ok=True),
                f"making {name}",
            )
        revision = target.repo.revision
        if revision is not None and self._look(revision) is None:
            if revision.startswith("refs/"):
                raise OutputError(f"{name} has no {revision}; --create-pr opens a pull request")
            self._ask(
                lambda: self._api.create_branch(name, branch=revision, exist_ok=True),
                f"making the branch {revision} of {name}",
            )
        if not pending.changed:
            url = without_userinfo(f"{self._api.endpoint}/{name}/commit/{pending.commit}")
            return Arrived(str(pending.commit), url, None, (), pending.stale, 0)
        self._events.phase("uploading")
        # Of the client's retries only those of a commit are missing, and it drops what has not
        # changed: sending again what was sent is no request for its bytes.
        info = self._ask(
            lambda: self._api.upload_folder(
                repo_id=name,
                folder_path=self.folder,
                commit_message=target.message,
                revision=revision,
                create_pr=target.create_pr,
                allow_patterns=[glob.escape(change.path) for change in pending.changed],
            ),
            f"uploading to {name}",
            once="/commit/" if target.create_pr else None,
        )
        pull = without_userinfo(str(info.pr_url)) if info.pr_url else None
        return Arrived(str(info.oid), without_userinfo(str(info.commit_url)), pull, (), (), 0)

    def proof(self, arrived: Arrived, *, read_back: bool = False) -> Arrived:
        """Compare what the Hub lists at that commit with the folder, read anew where it was not
        before; with `read_back` fetch every file and compare its bytes' hash."""
        there = self._tree(arrived.commit)
        now = local_files(self.folder, follow_links=self._follow_links)
        self._events.start(_same_size(now, there) + (sum(now.values()) if read_back else 0), 0)
        self._events.phase("comparing")
        found = differences(now, there, self._digests)
        wrong = {difference.path for difference in found}
        fine = [path for path in now if path not in wrong]
        if read_back:
            self._events.phase("reading back")
            found += self._read_back(arrived.commit, {path: now[path] for path in fine})
        return replace(
            arrived,
            differences=tuple(found),
            stale=tuple(stale_weights(now, there)),
            read_back=len(fine) if read_back else 0,
        )

    def _read_back(self, commit: str, files: Mapping[str, int]) -> list[Difference]:
        reader = Reader(self._api, self.target.repo.id, commit)
        self._digests.of((path, "sha256") for path in files)
        found = []
        for path, size in files.items():
            digest = sha256()
            for chunk in reader.chunks(path, size):
                digest.update(chunk)
                self._events.wrote(len(chunk))
            ours = self._digests.known[path, "sha256"]
            if digest.hexdigest() != ours:
                what = f"read back, its sha256 is {digest.hexdigest()}, here {ours}"
                found.append(Difference(path, what))
        return found


def _same_size(here: Mapping[str, int], there: Mapping[str, Remote]) -> int:
    """Bytes that have to be hashed to tell whether they are equal."""
    return sum(size for path, size in here.items() if path in there and there[path].size == size)
