"""A folder sent to the Hub: validated first, given its model card, compared with what arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from qconvert import __version__
from qconvert.checkpoint.hub_cache import Repo, parse_repo
from qconvert.checkpoint.open import stage_folders
from qconvert.core.errors import OutputError, QConvertError, UsageError
from qconvert.core.shown import count
from qconvert.hub.compare import hidden_files, local_files
from qconvert.hub.readme import (
    account_for_readme,
    new_card,
    read_manifest,
    rewritten,
    without_readme,
    write_card,
)
from qconvert.hub.upload import Destination, Upload, UploadPlan, UploadResult, considered
from qconvert.run.work.events import Events
from qconvert.validation.runner import Level, Report, Request, validate_folder


@dataclass(frozen=True)
class CheckedFolder:
    """A finished folder with the report of its validation. `hidden` files are not sent. With `dry_run`
    the folder is not changed."""

    folder: Path
    report: Report
    hidden: tuple[str, ...]
    follow_links: bool = False
    dry_run: bool = False

    def files(
        self, *, base_model: str | None = None, card: bool = True, force: bool = False
    ) -> Mapping[str, int]:
        """Files that an upload would compare with the repo's, with their sizes, those that it writes
        before (`card`) among them. The Hub is not asked. Raises CheckpointError and OutputError."""
        forced = force and bool(self.report.errors)
        text = new_card(self.folder, self.report, base_model, forced=forced) if card else None
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
    level: Level = "sample",
    dry_run: bool = False,
    follow_links: bool = False,
    events: Events | None = None,
) -> CheckedFolder:
    """Validate a folder before it is uploaded. Without `dry_run` its receipt is brought up to date with
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
        where, source, request=Request(level), progress=events, follow_links=follow_links
    )
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
