"""upload: a folder to the Hub, validated before and compared after."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from qconvert.cli.options import Folder, ModelId
from qconvert.cli.progress import Bar

if TYPE_CHECKING:
    from qconvert.hub.upload import Arrived, Pending
    from qconvert.validation.runner import Report

_FINDINGS = 3
_MOST_LISTED = 12


@click.command()
@click.argument("folder", metavar="DIR", type=Folder())
@click.argument("repo", metavar="ORG/NAME")
@click.option("--private", is_flag=True, help="Make the repo private, if it has to be made.")
@click.option("--revision", metavar="BRANCH", help="Commit to a branch, made where it is missing.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead.")
@click.option("--commit-message", metavar="TEXT", help="[default: what made the folder]")
@click.option(
    "--base-model",
    metavar="ORG/NAME",
    type=ModelId(),
    help="The source's repo, for the model card.",
)
@click.option(
    "--against", metavar="SRC", help="Validate against the source, and say so in the card."
)
@click.option(
    "--level",
    type=click.Choice(["headers", "sample", "full"]),
    default="sample",
    show_default=True,
    help="Level of the validation before, as in `validate`.",
)
@click.option("--no-card", is_flag=True, help="Leave README.md as it is.")
@click.option(
    "--read-back", is_flag=True, help="Afterwards fetch every file and compare its bytes."
)
@click.option("--force", is_flag=True, help="Upload what does not validate; the card says so.")
@click.option("--dry-run", is_flag=True, help="Say what would be sent; write and send nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
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
    from qconvert.hub.cards import (
        account_for_readme,
        new_card,
        rewritten,
        without_readme,
        write_card,
    )
    from qconvert.hub.trees import hidden_files, local_files
    from qconvert.hub.upload import Target, Upload
    from qconvert.validation.runner import Request, validate_folder

    if create_pr and revision is not None:
        raise click.UsageError("--create-pr opens its own branch; leave --revision away")
    target = Target(_repo(repo, revision), "", private, create_pr)
    local_files(folder)  # what is no finished folder is refused before it is read
    hidden = hidden_files(folder)
    if hidden:
        click.echo(_hidden(hidden), err=True)
    if not dry_run:
        account_for_readme(folder)
    with Bar() as bar:
        report = validate_folder(folder, against, request=Request(level), progress=bar)
        if dry_run:
            report = without_readme(report)
        _tell_findings(report)
        if report.errors and not force:
            click.echo(
                f"not uploaded: {report.errors} errors (--force uploads it as it is)", err=True
            )
            if as_json:
                click.echo(json.dumps(_validated(report), indent=2))
            return _FINDINGS
        instead: dict[str, bytes] = {}
        if dry_run:
            forced = force and bool(report.errors)
            text = None if no_card else new_card(folder, report, base_model, forced=forced)
            instead = rewritten(folder, None if text is None else text.encode())
        elif not no_card:
            base = write_card(folder, report, base_model, forced=force and bool(report.errors))
            if base is None:
                click.echo(
                    "README.md names no base model, so the Hub lists this under none: --base-model "
                    "ORG/NAME",
                    err=True,
                )
        message = commit_message or _message(folder)
        target = Target(target.repo, message, private, create_pr)
        say = partial(click.echo, err=True)
        work = Upload(folder, target, events=bar, say=say, instead=instead)
        pending = work.pending()
        if dry_run:
            found = {**_validated(report), **_pending(repo, pending, hidden), "dry_run": True}
            click.echo(json.dumps(found, indent=2) if as_json else _would(repo, pending))
            return 0
        try:
            sent = work.send(pending)
        except QConvertError:
            click.echo(err=True)  # the client leaves a bar without an end
            raise
        arrived = work.proof(sent, read_back=read_back)
    if as_json:
        found = {**_validated(report), **_pending(repo, pending, hidden), **_arrived(arrived)}
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(_done(pending, arrived))
    return _FINDINGS if arrived.differences else 0


def _repo(text: str, revision: str | None) -> Any:
    from qconvert.checkpoint.hub_cache import Repo, parse_repo

    found = parse_repo(text)
    if found is None:
        raise click.UsageError(f"{text!r} is no name of a repo; write ORG/NAME")
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
    from qconvert.core.shown import printable

    more = f" and {len(files) - _MOST_LISTED} more" if len(files) > _MOST_LISTED else ""
    return printable(f"not sent, hidden files: {', '.join(files[:_MOST_LISTED])}{more}")


def _tell_findings(report: Report) -> None:
    from qconvert.core.shown import printable

    for finding in report.findings[:_MOST_LISTED]:
        line = f"{finding.severity} {finding.rule} {finding.where}: {finding.message}"
        click.echo(printable(line), err=True)
    more = len(report.findings) - _MOST_LISTED
    if more > 0:
        click.echo(f"... and {more} more (qconvert validate lists all)", err=True)


def _would(repo: str, pending: Pending) -> str:
    from qconvert.recipe.recipe import format_size

    made = "" if pending.exists else f", which would be made{' private' if pending.private else ''}"
    lines = [f"{len(pending.changed)} of {len(pending.files)} files would go to {repo}{made}:"]
    for change in pending.changed:
        lines.append(f"  {change.path}  {format_size(pending.files[change.path])}")
    lines += _stale(pending.stale)
    return "\n".join([*lines, f"{format_size(pending.nbytes)} in all"])


def _done(pending: Pending, arrived: Arrived) -> str:
    from qconvert.recipe.recipe import format_size

    sent = f"{len(pending.changed)} of {len(pending.files)} files, {format_size(pending.nbytes)}"
    lines = [
        f"sent    {sent}" if pending.changed else "sent    nothing: all of it is there already"
    ]
    lines.append(f"commit  {arrived.url}")
    if arrived.pull_request:
        lines.append(f"pull    {arrived.pull_request}")
    if arrived.differences:
        lines += [f"WRONG   {d.path} {d.what}" for d in arrived.differences]
        lines.append(f"{len(arrived.differences)} files are not on the Hub as they are here")
    else:
        how = "fetched again and compared" if arrived.read_back else "listed with size and hash"
        lines.append(f"proved  {len(pending.files)} files {how}: as they are here")
    return "\n".join([*lines, *_stale(arrived.stale)])


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
