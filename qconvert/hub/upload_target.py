"""A repo on the Hub that a result goes to while it is made, so that nothing there looks finished early.

Shards go to a branch of their own: it protects them from being collected as garbage, which files that
no commit refers to are not, and lists them with size and sha256 whoever asks, after a crash too. It
has no config and no index. The branch that was asked for gets all files in one commit at the end, in
which the shards are copies of those (no bytes are sent), and the other branch goes. All of it is the
client's public API (huggingface_hub: preupload_lfs_files, create_commit, CommitOperationCopy).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from qconvert.checkpoint.checkpoint import INDEX, MANIFEST, RECEIPT, WORK_DIR
from qconvert.checkpoint.hub_cache import Repo
from qconvert.client.listing import files_of
from qconvert.client.ranges import ranges_of
from qconvert.client.retries import HubRefused, Say, client, patiently, to_stderr
from qconvert.core.errors import CheckpointError, OutputError, RunError
from qconvert.core.json_text import parse_object
from qconvert.core.links import PER_TENSOR, SMALL
from qconvert.core.shown import count
from qconvert.hub.compare import (
    Digests,
    RemoteFile,
    differences,
    known_repo,
    remote_files,
    stale_weights,
)
from qconvert.hub.destination import hub_destination, hub_work_folder
from qconvert.run.work.upload_target import Found, SentFile

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi


T = TypeVar("T")

# Branches of results that are not finished begin with this.
UNFINISHED = "qconvert-unfinished-"
MAIN = "main"
# What makes a folder a checkpoint, beside its shards. Other files that are there already (README.md,
# LICENSE) are replaced by those of the same name.
_OF_A_CHECKPOINT = frozenset({"config.json", INDEX, RECEIPT})
# How often the branch may move between a look at it and the commit.
_ROUNDS = 5
_MOVED = (409, 412)  # of a commit whose parent is not the branch's last
_AT_ONCE = 500  # files in a request for their sizes and hashes


class HubUploadTarget:
    """One result in one repo. `names` are its files in the order of publishing, `shards` those among
    them that are sent before, with their sizes; `identity` is what its manifest says it is, and
    `tensors` how many it has; `message` is the commit's. `say` gets a line for each retry."""

    def __init__(
        self,
        repo: Repo,
        names: Sequence[str],
        shards: Mapping[str, int],
        identity: Mapping[str, Any],
        tensors: int,
        message: str,
        *,
        private: bool = False,
        say: Say = print,
    ) -> None:
        self.repo, self.private = repo, private
        self._names, self._shards = names, shards
        self._identity, self._tensors = identity, tensors
        self._message, self._say = message, say
        self._uploaded: dict[str, CommitOperationAdd] = {}
        self._lock = Lock()

    @property
    def url(self) -> str:
        return f"hf://{self.repo}"

    @property
    def branch(self) -> str:
        """Return where the result is shown in the end."""
        return self.repo.revision or MAIN

    @property
    def side(self) -> str:
        """Return where shards are kept until then: a branch for each result and each branch it is
        for."""
        spelled = json.dumps([self._identity, self.branch], sort_keys=True)
        return UNFINISHED + sha256(spelled.encode()).hexdigest()[:16]

    @property
    def _api(self) -> HfApi:
        return client()

    def _ask(self, call: Callable[[], T], what: str) -> T:
        then = "what was sent is kept; run the same command again to continue"
        return patiently(call, what, say=self._say, then=then)

    # --- What is there ----------------------------------------------------------------------------

    def look(self) -> Found:
        """Return what is there. Raises OutputError for what is not of this result, and for a repo that
        is public where a private one was asked for."""
        head = self._head()
        if head is None:
            return "new"
        there = self._tree(head)
        self._check(there, head)
        sizes = {name: there[name].size for name in self._names if name in there}
        whole = all(
            sizes.get(name) == self._shards.get(name, sizes.get(name, -1)) for name in self._names
        )
        return "finished" if MANIFEST in there and whole else "begun"

    def _info(self, revision: str | None) -> Any:
        return known_repo(self._api, self._ask, self.repo.id, revision)

    def _head(self) -> str | None:
        """The last commit of the branch, or of main where the branch is to be made; None without a
        repo."""
        info = self._info(None)
        if info is None:
            return None
        if self.private and not info.private:
            raise OutputError(
                f"{self.repo.id} already exists and is public, and --private applies to new repos only; "
                "make it private in its settings, or name another repo"
            )
        if self.repo.revision is not None:
            info = self._info(self.repo.revision) or info
        return str(info.sha)

    def _tree(self, revision: str) -> dict[str, RemoteFile]:
        name, endpoint = self.repo.id, self._api.endpoint
        return remote_files(
            self._ask(lambda: files_of(endpoint, name, revision), f"listing {name}")
        )

    def _check(self, there: Mapping[str, RemoteFile], head: str) -> None:
        """Raise OutputError where the branch holds a checkpoint that is not this result."""
        if MANIFEST in there:
            if self._manifest_identity(there[MANIFEST].size, head) != self._identity:
                raise self._foreign(f"{MANIFEST} is of another conversion")
            foreign = stale_weights(self._names, there)
        else:
            ours = _OF_A_CHECKPOINT.union(self._shards)
            foreign = [*stale_weights(self._names, there), *sorted(ours & there.keys())]
        if foreign:
            raise self._foreign(f"holds {foreign[0]}, which is not of this conversion")

    def _foreign(self, what: str) -> OutputError:
        return OutputError(
            f"{self.url}: {what}; choose another repo, another branch (hf://{self.repo.id}@BRANCH), or "
            "delete it there"
        )

    def _manifest_identity(self, size: int, head: str) -> Any:
        if size > 4 * SMALL + PER_TENSOR * self._tensors:
            return None
        try:
            data = ranges_of(self._api.endpoint, self.repo.id, head).read(MANIFEST, 0, size)
            return parse_object(data, f"{self.url}/{MANIFEST}").get("identity")
        except CheckpointError:
            return None

    def there(self) -> dict[str, SentFile]:
        """Shards that are kept, or shown already."""
        found: dict[str, SentFile] = {}
        for revision in (self.branch, self.side):
            found |= self._listed(self._shards, revision)
        return found

    def _listed(self, names: Iterable[str], revision: str) -> dict[str, SentFile]:
        """Those of some files that a revision has as large files, none where there is no such
        revision."""
        from huggingface_hub import RepoFile

        wanted, name = list(names), self.repo.id
        found: dict[str, SentFile] = {}
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            try:
                infos = self._ask(
                    lambda paths=some: self._api.get_paths_info(name, paths, revision=revision),  # type: ignore[misc]
                    f"looking at {name}@{revision}",
                )
            except HubRefused as error:
                if error.status == 404:
                    return {}
                raise
            for path, file in remote_files(e for e in infos if isinstance(e, RepoFile)).items():
                if file.algorithm == "sha256":
                    found[path] = SentFile(path, file.size, file.hash)
        return found

    # --- What is sent -----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the repo and the branch for shards. Raises OutputError as `look` does."""
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        disable_progress_bars()  # of several files at a time, over that of the run
        self.look()
        name, private = self.repo.id, self.private or None
        self._ask(
            lambda: self._api.create_repo(name, private=private, exist_ok=True), f"creating {name}"
        )
        self._create(self.side)

    def _create(self, branch: str) -> None:
        name = self.repo.id
        self._ask(
            lambda: self._api.create_branch(name, branch=branch, exist_ok=True),
            f"creating the branch {branch} of {name}",
        )

    def upload(self, file: Path, sent: SentFile) -> None:
        from huggingface_hub import CommitOperationAdd

        name = self.repo.id

        def once() -> CommitOperationAdd:
            made = CommitOperationAdd(sent.name, file)
            made.upload_info.sha256 = bytes.fromhex(sent.sha256)  # else the client hashes it again
            self._api.preupload_lfs_files(
                name, [made], revision=self.side, num_threads=1, free_memory=False
            )
            return made

        made = self._ask(once, f"sending {sent.name} to {name}")
        with self._lock:
            self._uploaded[sent.name] = made

    def keep(self, files: Sequence[SentFile]) -> None:
        name = self.repo.id
        with self._lock:
            operations = [self._uploaded.pop(file.name) for file in files]
        text = f"{self._message} (unfinished: {count(len(files), 'shard')})"
        self._ask(
            lambda: self._api.create_commit(
                name, [_again(made) for made in operations], commit_message=text, revision=self.side
            ),
            f"keeping {count(len(files), 'shard')} in {name}",
        )
        there = self._listed([file.name for file in files], self.side)
        for file in files:
            if there.get(file.name) != file:
                raise OutputError(
                    f"{self.url}: {file.name}: expected {file.size} bytes with sha256 "
                    f"{file.sha256} on the branch {self.side}, found "
                    f"{_shown(there.get(file.name))}; run the same command again"
                )

    # --- What is shown ----------------------------------------------------------------------------

    def publish(self, sent: Sequence[SentFile], folder: Path, others: Sequence[str]) -> None:
        if self.repo.revision is not None and self._info(self.repo.revision) is None:
            if self.repo.revision.startswith("refs/"):
                raise OutputError(f"{self.repo.id} has no {self.repo.revision}; name a branch")
            self._create(self.branch)
        wanted = {file.name: file for file in sent}
        digests = Digests(folder)
        for _ in range(_ROUNDS):
            head = self._head()
            if head is None:
                raise OutputError(f"{self.repo.id}: is gone; run the same command again")
            there = self._tree(head)
            self._check_still(there, head)
            try:
                commit = self._commit(wanted, folder, others, there, head)
            except HubRefused as error:
                if error.status not in _MOVED:
                    raise
                continue  # somebody else's commit came between
            self._verify(commit, wanted, folder, others, digests)
            self._drop_side()
            return
        raise RunError(
            f"{self.url}: others write to the branch all the time; nothing was published. Run the same "
            "command again"
        )

    def _check_still(self, there: Mapping[str, RemoteFile], head: str) -> None:
        try:
            self._check(there, head)
        except OutputError as error:
            raise OutputError(
                f"{error}. It was not there when the run began; nothing was published"
            ) from error

    def _commit(
        self,
        wanted: Mapping[str, SentFile],
        folder: Path,
        others: Sequence[str],
        there: Mapping[str, RemoteFile],
        head: str,
    ) -> str:
        """The one commit that shows everything, on top of `head`. Returns its id, or `head` where all
        was there already."""
        from huggingface_hub import CommitOperationAdd, CommitOperationCopy

        shown = {
            n for n, f in wanted.items() if there.get(n) == RemoteFile(f.size, f.sha256, "sha256")
        }

        def once() -> str:
            operations: list[CommitOperationAdd | CommitOperationCopy] = [
                CommitOperationCopy(name, name, src_revision=self.side)
                for name in wanted
                if name not in shown
            ]
            operations += [CommitOperationAdd(name, folder / name) for name in others]
            info = self._api.create_commit(
                self.repo.id, operations, commit_message=self._message, revision=self.branch,
                parent_commit=head,
            )  # fmt: skip
            return str(info.oid)

        return self._ask(once, f"publishing {self.url}")

    def _verify(
        self,
        commit: str,
        wanted: Mapping[str, SentFile],
        folder: Path,
        others: Sequence[str],
        digests: Digests,
    ) -> None:
        """Raise OutputError where the Hub lists another size or hash of a file than it has here, or
        had."""
        there = self._tree(commit)
        wrong = [
            f"{file.name} is {_shown(_as_sent(file.name, there.get(file.name)))}"
            for file in wanted.values()
            if _as_sent(file.name, there.get(file.name)) != file
        ]
        sizes = {name: (folder / name).stat().st_size for name in others}
        wrong += [f"{each.path} {each.what}" for each in differences(sizes, there, digests)]
        if wrong:
            raise OutputError(
                f"{self.url}: the commit {commit} is not what was sent: {wrong[0]}; run the same "
                "command again"
            )

    def tidy(self) -> None:
        if self._info(self.side) is not None:
            self._drop_side()

    def _drop_side(self) -> None:
        drop_branch(self._api, self.repo.id, self.side, self._say)


def drop_branch(api: HfApi, repo: str, branch: str, say: Say) -> None:
    """Remove a branch, if it is there."""
    try:
        patiently(
            lambda: api.delete_branch(repo, branch=branch), f"removing {branch} of {repo}", say=say
        )
    except HubRefused as error:
        if error.status != 404:
            raise


def _again(made: CommitOperationAdd) -> CommitOperationAdd:
    """Return what was uploaded, as an operation that no commit has had: a lost answer is asked for
    again."""
    from copy import copy

    return copy(made)


def _as_sent(name: str, there: RemoteFile | None) -> SentFile | None:
    return None if there is None else SentFile(name, there.size, there.hash)


def _shown(found: SentFile | None) -> str:
    return "nothing" if found is None else f"{found.size} bytes with sha256 {found.sha256}"


# Leftovers of interrupted runs that go to the Hub: branches with shards there, and a work folder here.


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Branches of unfinished results in a repo, and the work folder for it, None where there is none."""

    repo: str
    branches: Sequence[str]
    folder: Path | None


def leftovers_of(where: str, work_dir: str | Path | None = None) -> Leftovers:
    """Return what runs to `hf://ORG/NAME[@BRANCH]` left. Nothing is changed. Raises OutputError and
    RunError where the Hub refuses or fails."""
    repo = hub_destination(where)
    folder = hub_work_folder(repo, work_dir)
    api = client()
    try:
        refs = patiently(
            lambda: api.list_repo_refs(repo.id), f"listing branches of {repo.id}", say=to_stderr
        )
    except HubRefused as error:
        if error.status != 404:
            raise
        names = []
    else:
        names = sorted(ref.name for ref in refs.branches if ref.name.startswith(UNFINISHED))
    return Leftovers(repo.id, names, folder if (folder / WORK_DIR).is_dir() else None)


def remove_branches(found: Leftovers) -> None:
    """Remove what runs left in the repo: a run that is still at work sends it again."""
    for name in found.branches:
        if not name.startswith(UNFINISHED):
            raise OutputError(f"{found.repo}: {name} is no branch of an unfinished result")
        drop_branch(client(), found.repo, name, to_stderr)
