"""Upload a folder to a repo, validated first and given its model card, and verify that it arrived.

The client's `upload_folder` sends what the repo does not have (huggingface_hub: one commit, or
with hf_xet several); afterwards the commit's tree is compared with the folder, file by file.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert import __version__
from qconvert.checkpoint.hub_cache import Repo, parse_repo
from qconvert.checkpoint.open import stage_folders
from qconvert.client.listing import files_of
from qconvert.client.ranges import ranges_of
from qconvert.client.retries import Say, client, patiently, without_userinfo
from qconvert.core.errors import OutputError, QConvertError, UsageError
from qconvert.core.shown import count
from qconvert.hub.compare import (
    MISSING,
    Difference,
    Digests,
    RemoteFile,
    differences,
    hidden_files,
    known_repo,
    local_files,
    remote_files,
    stale_weights,
)
from qconvert.hub.readme import (
    account_for_readme,
    new_card,
    read_manifest,
    rewritten,
    without_readme,
    write_card,
)
from qconvert.run.work.events import Events, NoEvents
from qconvert.validation.runner import Level, Report, Request, validate_folder

if TYPE_CHECKING:
    from huggingface_hub import HfApi


_PIECE = 64 << 20  # of a file that is read back


@dataclass(frozen=True, slots=True)
class Destination:
    """A repo, whose `revision` is a branch (created where it is missing) or `refs/pr/N`; `create_pr`
    opens a pull request instead of a commit; `private` is for a repo that is created."""

    repo: Repo
    message: str
    private: bool = False
    create_pr: bool = False


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """Plan of an upload: `files` of the folder with their sizes, `changed` those that the repo
    lacks or has with other content, `stale` weights that only the repo has. `exists` and `private` are
    the repo's."""

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
class UploadResult:
    """A finished upload: the commit, its page, the pull request's page, and files that differ on the Hub
    from the folder's. `read_back` files were fetched again and compared byte for byte."""

    commit: str
    url: str
    pull_request: str | None
    differences: tuple[Difference, ...]
    stale: tuple[str, ...]
    read_back: int


def considered(
    folder: Path, rewritten: Mapping[str, bytes], *, follow_links: bool = False
) -> dict[str, int]:
    """Files that an upload would compare with the repo's, with their sizes: those of the folder, and
    `rewritten`, which are written anew before. No request is sent. Raises OutputError."""
    found = local_files(folder, follow_links=follow_links)
    return {**found, **{path: len(data) for path, data in rewritten.items()}}


class Upload:
    """One upload in three steps: `pending`, `send`, `verify`. `say` gets a line for each retry."""

    def __init__(
        self,
        folder: Path,
        target: Destination,
        *,
        events: Events | None = None,
        say: Say = print,
        follow_links: bool = False,
    ) -> None:
        self.folder, self.target = folder, target
        self._follow_links = follow_links
        self._events = events or NoEvents()
        self._say = say
        self._api: HfApi = client()
        self._digests = Digests(folder, self._events.wrote, follow_links=follow_links)
        self._files = local_files(folder, follow_links=follow_links)

    def _ask(self, call: Any, what: str, once: str | None = None) -> Any:
        then = "what was sent is kept; run the same command again to continue"
        return patiently(call, what, say=self._say, once=once, then=then)

    def pending(self) -> UploadPlan:
        """Compare the folder with the repo as it is now. Raises OutputError where the repo is public
        and `private` was asked for."""
        repo, target = self.target.repo, self.target
        info = self._look(None)
        if info is None:
            changed = tuple(Difference(path, MISSING) for path in self._files)
            return UploadPlan(self._files, changed, (), False, target.private, None)
        if target.private and not info.private:
            raise OutputError(
                f"{repo.id} already exists and is public, and --private applies to new repos only; make "
                "it private in its settings, or name another repo"
            )
        if repo.revision is not None:
            info = self._look(repo.revision) or info  # a branch begins as a copy of main
        there = self._tree(str(info.sha))
        self._events.start(_same_size(self._files, there), 0)
        changed = tuple(differences(self._files, there, self._digests))
        stale = tuple(stale_weights(self._files, there))
        return UploadPlan(self._files, changed, stale, True, bool(info.private), str(info.sha))

    def _look(self, revision: str | None) -> Any:
        return known_repo(self._api, self._ask, self.target.repo.id, revision)

    def _tree(self, commit: str) -> dict[str, RemoteFile]:
        name, endpoint = self.target.repo.id, self._api.endpoint
        return remote_files(self._ask(lambda: files_of(endpoint, name, commit), f"listing {name}"))

    def send(self, pending: UploadPlan) -> UploadResult:
        """Create the repo and branch where they are missing, and send what is pending; nothing pending
        is no request. The result is not verified yet."""
        if not pending.exists:
            self._create_repo()
        self._create_branch()
        if pending.changed:
            return self._commit([change.path for change in pending.changed])
        name = self.target.repo.id
        url = without_userinfo(f"{self._api.endpoint}/{name}/commit/{pending.commit}")
        return UploadResult(str(pending.commit), url, None, (), pending.stale, 0)

    def _create_repo(self) -> None:
        name, private = self.target.repo.id, self.target.private or None
        self._ask(
            lambda: self._api.create_repo(name, private=private, exist_ok=True),
            f"creating {name}",
        )

    def _create_branch(self) -> None:
        """The target's branch, where it is missing. Raises OutputError for a pull request."""
        name, revision = self.target.repo.id, self.target.repo.revision
        if revision is None or self._look(revision) is not None:
            return
        if revision.startswith("refs/"):
            raise OutputError(f"{name} has no {revision}; --create-pr opens a pull request")
        self._ask(
            lambda: self._api.create_branch(name, branch=revision, exist_ok=True),
            f"creating the branch {revision} of {name}",
        )

    def _commit(self, paths: Sequence[str]) -> UploadResult:
        """Send files as one commit, or as the client cuts it."""
        target, name = self.target, self.target.repo.id
        self._events.phase("uploading")
        # The client retries everything but a commit, and skips what has not changed: sending again what
        # was sent is no request for its bytes.
        info = self._ask(
            lambda: self._api.upload_folder(
                repo_id=name,
                folder_path=self.folder,
                commit_message=target.message,
                revision=target.repo.revision,
                create_pr=target.create_pr,
                allow_patterns=[glob.escape(path) for path in paths],
            ),
            f"uploading to {name}",
            once="/commit/" if target.create_pr else None,
        )
        pull = without_userinfo(str(info.pr_url)) if info.pr_url else None
        return UploadResult(str(info.oid), without_userinfo(str(info.commit_url)), pull, (), (), 0)

    def verify(self, arrived: UploadResult, *, read_back: bool = False) -> UploadResult:
        """Compare what the Hub lists at that commit with the folder, hashing what was not hashed
        before; with `read_back` fetch every file and compare the hash of its bytes."""
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
        reader = ranges_of(self._api.endpoint, self.target.repo.id, commit)
        self._digests.of((path, "sha256") for path in files)
        found = []
        for path, size in files.items():
            digest = sha256()
            for start in range(0, size, _PIECE):  # one request a piece, so that any can be repeated
                chunk = reader.read(path, start, min(size, start + _PIECE))
                digest.update(chunk)
                self._events.wrote(len(chunk))
            ours = self._digests.known[path, "sha256"]
            if digest.hexdigest() != ours:
                what = f"read back, its sha256 is {digest.hexdigest()}, in the folder {ours}"
                found.append(Difference(path, what))
        return found


def _same_size(here: Mapping[str, int], there: Mapping[str, RemoteFile]) -> int:
    """Bytes that have to be hashed to tell whether they are equal."""
    return sum(size for path, size in here.items() if path in there and there[path].size == size)


@dataclass(frozen=True)
class CheckedFolder:
    """A finished folder with the report of its validation. `hidden` files are not sent. With `dry_run`
    the folder is not changed."""

    folder: Path
    report: Report
    hidden: tuple[str, ...]
    follow_links: bool = False
    dry_run: bool = False

    def card(self, *, base_model: str | None = None, force: bool = False) -> str:
        """README.md as an upload writes it. Raises CheckpointError and OutputError."""
        forced = force and bool(self.report.errors)
        return new_card(self.folder, self.report, base_model, forced=forced)

    def files(
        self, *, base_model: str | None = None, card: bool = True, force: bool = False
    ) -> Mapping[str, int]:
        """Files that an upload would compare with the repo's, with their sizes, those that it writes
        before (`card`) among them. The Hub is not asked. Raises CheckpointError and OutputError."""
        text = self.card(base_model=base_model, force=force) if card else None
        made = rewritten(self.folder, None if text is None else text.encode())
        return considered(self.folder, made, follow_links=self.follow_links)


@dataclass(frozen=True)
class Uploaded:
    """A finished upload: what was sent, and what arrived. `base_model` is the one that the card names;
    None: it names none, so that the Hub lists the repo under no model."""

    pending: UploadPlan
    arrived: UploadResult
    base_model: str | None

    @property
    def complete(self) -> bool:
        """Return whether every file is on the Hub as it is here."""
        return not self.arrived.differences


def destination(repo: str, revision: str | None = None, *, create_pr: bool = False) -> Repo:
    """The repo that a user named: `ORG/NAME`, with `hf://` before it or `@REVISION` after it. Raises
    UsageError for a name that is none, and for two revisions."""
    if create_pr and revision is not None:
        raise UsageError("--create-pr opens its own branch; omit --revision")
    found = parse_repo(repo)
    if found is None:
        raise UsageError(f"{repo!r} is not a valid repo id; write ORG/NAME")
    if found.revision is not None and revision is not None:
        raise UsageError(f"{repo} and --revision {revision} name two revisions")
    return Repo(found.id, revision or found.revision)


def check_upload(
    folder: str | Path,
    against: str | Path | None = None,
    *,
    draft: str | None = None,
    adapters: Sequence[str] = (),
    level: Level = "full",
    dry_run: bool = False,
    follow_links: bool = False,
    events: Events | None = None,
) -> CheckedFolder:
    """Validate a folder before it is uploaded, with the `draft` that was grafted to its source, and the
    `adapters` that were merged into it. Without `dry_run` its receipt is brought up to date with
    its README.md first, which people edit. Raises UsageError for the folder of all stages of a split,
    OutputError for one that is not finished, and as `validate` does."""
    where = Path(folder)
    stages = stage_folders(where)
    if stages:
        raise UsageError(
            f"{where}: holds {count(len(stages), 'pipeline stage')}, and each is a repo of its own: "
            f"upload {stages[0]} to ORG/NAME-{stages[0].name}, and the others likewise"
        )
    local_files(
        where, follow_links=follow_links
    )  # what is not finished is refused before it is read
    hidden = tuple(hidden_files(where))
    if not dry_run:
        account_for_readme(where)
    source = None if against is None else str(against)
    report = validate_folder(
        where, source, draft=draft, adapters=adapters, request=Request(level), progress=events,
        follow_links=follow_links,
    )  # fmt: skip
    if dry_run:
        report = without_readme(report)
    return CheckedFolder(where, report, hidden, follow_links, dry_run)


def upload(
    checked: CheckedFolder,
    repo: str,
    *,
    revision: str | None = None,
    create_pr: bool = False,
    private: bool = False,
    message: str | None = None,
    base_model: str | None = None,
    card: bool = True,
    force: bool = False,
    read_back: bool = False,
    events: Events | None = None,
    notice: Callable[[str], None] | None = None,
) -> Uploaded:
    """Write the folder's model card, send what the repo does not have, and compare size and hash of
    every file that the Hub lists then; `read_back` fetches every byte as well. `notice` is told of each
    wait. Raises OutputError for a folder with errors, which `force` sends all the same, and for one that
    was checked in a dry run; RunError where the Hub fails for too long."""
    to = destination(repo, revision, create_pr=create_pr)
    forced = bool(checked.report.errors)
    if checked.dry_run:
        raise OutputError(
            f"{checked.folder}: was checked in a dry run; call check_upload again without it"
        )
    if forced and not force:
        raise OutputError(refusal(checked))
    tell = notice or (lambda _: None)
    base = base_model
    if card:
        base = write_card(checked.folder, checked.report, base_model, forced=forced)
        if base is None:
            tell(
                "README.md names no base model, so the Hub lists the repo under none; add "
                "--base-model ORG/NAME"
            )
    target = Destination(to, message or _message(checked.folder), private, create_pr)
    work = Upload(
        checked.folder, target, events=events, say=tell, follow_links=checked.follow_links
    )
    pending = work.pending()
    try:
        sent = work.send(pending)
    except QConvertError:
        tell("")  # the client leaves a progress bar without an end
        raise
    return Uploaded(pending, work.verify(sent, read_back=read_back), base)


def refusal(checked: CheckedFolder) -> str:
    """Why a folder with errors is not uploaded."""
    errors = count(checked.report.errors, "error")
    return f"not uploaded: {errors} (--force uploads it anyway)"


def _message(folder: Path) -> str:
    """Return what made the folder, as the commit's first line."""
    manifest = read_manifest(folder)
    if manifest is None:
        return f"Upload with qconvert {__version__}"
    steps = ", ".join(step["name"] for step in manifest["passes"])
    return f"qconvert {__version__}: {steps or 'copy'}"
