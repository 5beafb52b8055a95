"""upload: a folder to the Hub, validated before and compared after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from qconvert.cli.options import (
    AGAINST,
    DRY_RUN,
    FOLLOW_LINKS,
    JSON,
    Branch,
    Folder,
    base_model,
    level,
)
from qconvert.cli.progress import Bar
from qconvert.core.say import say, say_json

if TYPE_CHECKING:
    from qconvert.hub.upload import Arrived, Pending
    from qconvert.validation.runner import Report

_FINDINGS = 3
_MOST_LISTED = 12


@click.command()
@click.argument("folder", metavar="DIR", type=Folder())
@click.argument("repo", metavar="ORG/NAME")
@click.option("--private", is_flag=True, help="Make the repo private, if it has to be made.")
@click.option(
    "--revision",
    metavar="BRANCH",
    type=Branch(),
    help="Commit to a branch, made where it is missing.",
)
@click.option("--create-pr", is_flag=True, help="Open a pull request instead.")
@click.option("--commit-message", metavar="TEXT", help="[default: what made the folder]")
@base_model("what README.md names")
@AGAINST
@level("sample")
@click.option("--no-card", is_flag=True, help="Leave README.md as it is.")
@click.option(
    "--read-back", is_flag=True, help="Afterwards fetch every file and compare its bytes."
)
@FOLLOW_LINKS
@click.option("--force", is_flag=True, help="Upload what does not validate; the card says so.")
@DRY_RUN
@JSON
def upload(
    folder: Path,
    repo: str,
    private: bool,
    revision: str | None,
    create_pr: bool,
    commit_message: str | None,
    base_model: str | None,
    against: str | None,
    level: Literal["headers", "sample", "full"],
    no_card: bool,
    read_back: bool,
    follow_links: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Validate DIR, write its model card, send it to the Hub, and compare what arrived with DIR.

    Sends only what the repo does not have. What may pass (no connection, 429, 5xx) is waited for; a
    wrong token, no permission or too large a file ends it at once. Exit code 3 where DIR does not
    validate, or the Hub lists another size or hash than DIR has.

    \b
    Examples:
      qconvert upload DeepSeek-V3-bf16 me/DeepSeek-V3-bf16 --dry-run
      qconvert upload V3-cpu me/V3-amxint4 --private --base-model deepseek-ai/DeepSeek-V3
      qconvert upload V3-cpu me/V3-amxint4 --against DeepSeek-V3 --level full --create-pr
    """
    from qconvert.core.errors import QConvertError
    from qconvert.core.shown import count
    from qconvert.hub.cards import (
        account_for_readme,
        new_card,
        rewritten,
        without_readme,
        write_card,
    )
    from qconvert.hub.trees import hidden_files, local_files
    from qconvert.hub.upload import Target, Upload, considered
    from qconvert.validation.runner import Request, validate_folder

    if create_pr and revision is not None:
        raise click.UsageError("--create-pr opens its own branch; leave --revision away")
    target = Target(_repo(repo, revision), "", private, create_pr)
    # What is no finished folder is refused before it is read.
    local_files(folder, follow_links=follow_links)
    hidden = hidden_files(folder)
    if hidden:
        say(_hidden(hidden), err=True)
    if not dry_run:
        account_for_readme(folder)
    with Bar() as bar:
        report = validate_folder(
            folder, against, request=Request(level), progress=bar, follow_links=follow_links
        )
        if dry_run:
            report = without_readme(report)
        _tell_findings(report)
        if report.errors and not force:
            say(
                f"not uploaded: {count(report.errors, 'error')} (--force uploads it as it is)",
                err=True,
            )
            if as_json:
                say_json(_validated(report))
            return _FINDINGS
        if dry_run:
            forced = force and bool(report.errors)
            text = None if no_card else new_card(folder, report, base_model, forced=forced)
            made = rewritten(folder, None if text is None else text.encode())
            files = considered(folder, made, follow_links=follow_links)
            if as_json:
                say_json({**_validated(report), **_considered(repo, files, hidden)})
            else:
                say(*_would(repo, files))
            return 0
        if not no_card:
            base = write_card(folder, report, base_model, forced=force and bool(report.errors))
            if base is None:
                say(
                    "README.md names no base model, so the Hub lists this under none: --base-model "
                    "ORG/NAME",
                    err=True,
                )
        message = commit_message or _message(folder)
        target = Target(target.repo, message, private, create_pr)
        work = Upload(
            folder, target, events=bar, say=partial(say, err=True), follow_links=follow_links
        )
        pending = work.pending()
        try:
            sent = work.send(pending)
        except QConvertError:
            say("", err=True)  # the client leaves a bar without an end
            raise
        arrived = work.proof(sent, read_back=read_back)
    if as_json:
        found = {**_validated(report), **_pending(repo, pending, hidden), **_arrived(arrived)}
        say_json(found)
    else:
        say(*_done(pending, arrived))
    return _FINDINGS if arrived.differences else 0


def _repo(text: str, revision: str | None) -> Any:
    from qconvert.checkpoint.hub_cache import Repo, parse_repo

    found = parse_repo(text)
    if found is None:
        raise click.UsageError(f"{text!r} is not a valid repo id; write ORG/NAME")
    if found.revision is not None and revision is not None:
        raise click.UsageError(f"{text} and --revision {revision} name two revisions")
    return Repo(found.id, revision or found.revision)


def _message(folder: Path) -> str:
    """What made the folder, as the commit's first line."""
    from qconvert import __version__
    from qconvert.hub.cards import read_manifest

    manifest = read_manifest(folder)
    if manifest is None:
        return f"Upload with qconvert {__version__}"
    steps = ", ".join(step["name"] for step in manifest["passes"])
    return f"qconvert {__version__}: {steps or 'copy'}"


def _hidden(files: Sequence[str]) -> str:
    more = f" and {len(files) - _MOST_LISTED} more" if len(files) > _MOST_LISTED else ""
    return f"left out, hidden files: {', '.join(files[:_MOST_LISTED])}{more}"


def _tell_findings(report: Report) -> None:
    for finding in report.findings[:_MOST_LISTED]:
        say(
            f"{finding.severity} {finding.rule} {finding.where}: {finding.message}",
            err=True,
        )
    more = len(report.findings) - _MOST_LISTED
    if more > 0:
        say(f"... and {more} more (qconvert validate lists all)", err=True)


def _would(repo: str, files: Mapping[str, int]) -> list[str]:
    """A dry run asks the Hub nothing, so it says nothing of what the repo has."""
    from qconvert.core.shown import count
    from qconvert.core.sizes import format_size

    lines = [f"{count(len(files), 'file')} for {repo}; the Hub was not asked what it has of them:"]
    lines += [f"  {path}  {format_size(size)}" for path, size in files.items()]
    return [*lines, f"{format_size(sum(files.values()))} in all"]


def _considered(repo: str, files: Mapping[str, int], hidden: Sequence[str]) -> dict[str, Any]:
    return {
        "dry_run": True,
        "repo": repo,
        "files": len(files),
        "bytes": sum(files.values()),
        "considered": [{"path": path, "bytes": size} for path, size in files.items()],
        "hidden": list(hidden),
    }


def _done(pending: Pending, arrived: Arrived) -> list[str]:
    from qconvert.core.shown import count
    from qconvert.core.sizes import format_size

    files, size = count(len(pending.files), "file"), format_size(pending.nbytes)
    sent = f"{len(pending.changed)} of {files}, {size}"
    lines = [
        f"sent    {sent}" if pending.changed else "sent    nothing: all of it is there already"
    ]
    lines.append(f"commit  {arrived.url}")
    if arrived.pull_request:
        lines.append(f"pull    {arrived.pull_request}")
    if arrived.differences:
        lines += [f"WRONG   {d.path} {d.what}" for d in arrived.differences]
        lines.append(f"{count(len(arrived.differences), 'file')} not on the Hub as here")
    else:
        how = "fetched again and compared" if arrived.read_back else "listed with size and hash"
        lines.append(f"proved  {count(len(pending.files), 'file')} {how}: as they are here")
    return [*lines, *_stale(arrived.stale)]


def _stale(files: Sequence[str]) -> list[str]:
    if not files:
        return []
    shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    return [f"stale   the repo also holds {shown}; some runtimes would load it: delete it there"]


def _validated(report: Report) -> dict[str, Any]:
    listed = [
        {"rule": f.rule, "severity": f.severity, "where": f.where, "message": f.message}
        for f in report.findings
    ]
    return {"errors": report.errors, "warnings": report.warnings, "findings": listed}


def _pending(repo: str, pending: Pending, hidden: Sequence[str]) -> dict[str, Any]:
    return {
        "repo": repo,
        "files": len(pending.files),
        "sent": [change.path for change in pending.changed],
        "bytes": pending.nbytes,
        "hidden": list(hidden),
        "stale": list(pending.stale),
    }


def _arrived(arrived: Arrived) -> dict[str, Any]:
    return {
        "commit": arrived.commit,
        "url": arrived.url,
        "pull_request": arrived.pull_request,
        "read_back": arrived.read_back,
        "stale": list(arrived.stale),
        "differences": [{"file": d.path, "what": d.what} for d in arrived.differences],
    }
