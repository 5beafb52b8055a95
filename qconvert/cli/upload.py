"""upload, sign, verify: a folder sent to the Hub, validated before and compared after; its signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from qconvert.cli.command import VERBOSITY, Command, is_verbose
from qconvert.cli.options import (
    BRANCH,
    DRY_RUN,
    FINDINGS,
    FULL_LEVEL,
    JSON,
    OPENING,
    File,
    FolderPath,
    option_of,
    options_of,
)
from qconvert.cli.progress import Bar
from qconvert.core.say import say, say_json
from qconvert.run.work.options import RunOptions
from qconvert.validation.options import ValidateOptions

if TYPE_CHECKING:
    from qconvert.hub.upload import UploadPlan, UploadResult
    from qconvert.validation.runner import Level, Report

_MOST_LISTED = 12


@click.command(cls=Command)
@click.argument("folder", metavar="DIR", type=FolderPath())
@click.argument("repo", metavar="ORG/NAME")
@option_of(RunOptions, "private")
@click.option(
    "--revision",
    metavar="BRANCH",
    type=BRANCH,
    help="Commit to a branch; it is created if missing.",
)
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing.")
@click.option(
    "--commit-message", metavar="TEXT", help="Title of the commit. [default: what made DIR]"
)
@option_of(RunOptions, "base_model", default="what README.md names")
@option_of(ValidateOptions, "against")
@options_of(ValidateOptions, "draft", "adapter")
@FULL_LEVEL
@click.option("--no-card", is_flag=True, help="Do not write the model card.")
@click.option(
    "--read-back", is_flag=True, help="After the upload fetch every file and compare its bytes."
)
@OPENING
@click.option(
    "--force", is_flag=True, help="Upload a folder that fails validation; the card says so."
)
@VERBOSITY
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
    draft: str | None,
    adapter: tuple[str, ...],
    level: Literal["headers", "sample", "full"],
    no_card: bool,
    read_back: bool,
    follow_links: bool,
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Validate, write a card, send to the Hub.

    What arrived is compared with DIR.

    Sends only files that the repo does not have. Temporary failures (no connection, 429, 5xx) are
    retried; a wrong token, missing permission or too large a file ends the upload. Exit code 3 if DIR
    fails validation, or if the Hub lists another size or hash than DIR has.

    \b
    Examples:
      qconvert upload DeepSeek-V3-bf16 me/DeepSeek-V3-bf16 --dry-run
      qconvert upload V3-cpu me/V3-amxint4 --private --base-model deepseek-ai/DeepSeek-V3
      qconvert upload V3-cpu me/V3-amxint4 --against DeepSeek-V3 --level full --create-pr
    """
    from qconvert import api
    from qconvert.core.shown import count

    ValidateOptions(against=against, draft=draft, adapter=adapter)  # what goes with what
    api.destination(repo, revision, create_pr=create_pr)  # before the folder is read
    with Bar() as bar:
        checked = api.check_upload(
            folder, against, draft=draft, adapters=adapter, level=level, dry_run=dry_run,
            follow_links=follow_links, events=bar,
        )  # fmt: skip
        if checked.hidden:
            say(_hidden(checked.hidden), err=True)
        _tell_findings(checked.report)
        if checked.report.errors and not force:
            say(api.refusal(checked), err=True)
            if as_json:
                say_json(_validated(checked.report))
            return FINDINGS
        if not dry_run:
            done = api.upload(
                checked, repo, revision=revision, create_pr=create_pr, private=private,
                message=commit_message, base_model=base_model, card=not no_card, force=force,
                read_back=read_back, events=bar, notice=lambda text: say(text, err=True),
            )  # fmt: skip
    if dry_run:
        files = checked.files(base_model=base_model, card=not no_card, force=force)
        if as_json:
            say_json({**_validated(checked.report), **_considered(repo, files, checked.hidden)})
        else:
            how = ", ".join((level, *([f"against {against}"] if against else []), *(
                f"with {one}" for one in (*([draft] if draft else []), *adapter)
            )))  # fmt: skip
            errors, warnings = checked.report.errors, count(checked.report.warnings, "warning")
            word = "WRONG" if errors else "valid"
            say(
                f"{word}   at level {how}: {count(errors, 'error')}, {warnings}",
                *_would(repo, files),
            )
            if create_pr:
                say(
                    "a pull request would be opened"
                    + (f": {commit_message}" if commit_message else "")
                )
            elif revision is not None:
                say(f"to branch {revision}")
            if not no_card and not is_verbose():
                say("README.md is the card that qconvert writes; -v prints it")
            elif not no_card:
                say(*checked.card(base_model=base_model, force=force).splitlines())
        return 0
    if as_json:
        found = {**_pending(repo, done.pending, checked.hidden), **_arrived(done.arrived)}
        say_json({**_validated(checked.report), **found})
    else:
        say(*_done(done.pending, done.arrived))
    return 0 if done.complete else FINDINGS


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
    """A dry run does not contact the Hub, so what the repo already has is unknown."""
    from qconvert.core.shown import count, format_size

    there = "which of them it has already, only the Hub knows"
    lines = [f"{count(len(files), 'file')} for {repo}; {there}:"]
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


def _done(pending: UploadPlan, arrived: UploadResult) -> list[str]:
    from qconvert.core.shown import count, format_size

    files, size = count(len(pending.files), "file"), format_size(pending.nbytes)
    sent = f"{len(pending.changed)} of {files}, {size}"
    lines = [
        f"sent    {sent}" if pending.changed else "sent    nothing: the repo already has every file"
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


def _pending(repo: str, pending: UploadPlan, hidden: Sequence[str]) -> dict[str, Any]:
    return {
        "repo": repo,
        "files": len(pending.files),
        "sent": [change.path for change in pending.changed],
        "bytes": pending.nbytes,
        "hidden": list(hidden),
        "stale": list(pending.stale),
    }


def _arrived(arrived: UploadResult) -> dict[str, Any]:
    return {
        "commit": arrived.commit,
        "url": arrived.url,
        "pull_request": arrived.pull_request,
        "read_back": arrived.read_back,
        "stale": list(arrived.stale),
        "differences": [{"file": d.path, "what": d.what} for d in arrived.differences],
    }


_KEY = click.option(
    "--key", type=File(exists=False), required=True, metavar="PEM",
    help="The key, of P-256, P-384 or P-521: `sign` takes the private one, whose password, if it has "
    "one, is read from QCONVERT_KEY_PASSWORD, `verify` the public one.",
)  # fmt: skip
_SIGNATURE = click.option(
    "--signature", type=File(exists=False), metavar="FILE",
    help="The file of the signature. [default: model.sig in DIR]",
)  # fmt: skip


@click.command(cls=Command)
@click.argument("folder", metavar="DIR", type=FolderPath())
@_KEY
@_SIGNATURE
@click.option(
    "--checksums", type=File(exists=False), metavar="FILE",
    help="Also write the hashes that sglang's --model-checksum FILE compares with.",
)  # fmt: skip
@click.option(
    "--sbom", type=File(exists=False), metavar="FILE",
    help="Also write a bill of materials: CycloneDX 1.6, JSON.",
)  # fmt: skip
@FULL_LEVEL
@VERBOSITY
@JSON
def sign(
    folder: Path,
    key: Path,
    signature: Path | None,
    checksums: Path | None,
    sbom: Path | None,
    level: Level,
    as_json: bool,
) -> None:
    """Sign a folder with a key (OpenSSF).

    Writes what `qconvert verify` and model-signing (`model_signing verify key`) compare DIR with: a
    Sigstore bundle with the SHA-256 of each file, and what made DIR.

    DIR is validated first, every byte of it: a signature vouches for all. A later change, of the model
    card too, makes the signature wrong: sign after `upload` has written the card, and upload once more.

    \b
    Examples:
      qconvert sign V3-bf16 --key key.pem
      qconvert sign V3-bf16 --key key.pem --level full --signature V3-bf16.sig
      qconvert sign V3-bf16 --key key.pem --checksums V3-bf16.sha256.json
    """
    from qconvert import api
    from qconvert.core.shown import count

    with Bar() as bar:
        done = api.sign(
            folder, key, signature=signature, checksums=checksums, sbom=sbom, level=level,
            events=bar,
        )  # fmt: skip
    if as_json:
        say_json({
            "signature": str(done.signature), "key": done.key, "files": dict(done.files),
            "checksums": None if done.checksums is None else str(done.checksums),
            "sbom": None if done.sbom is None else str(done.sbom),
        })  # fmt: skip
        return
    say(
        f"{done.signature}: signed {count(len(done.files), 'file')} of {folder}", f"key  {done.key}"
    )
    if done.checksums is not None:
        say(f"{done.checksums}: for sglang's --model-checksum")
    if done.sbom is not None:
        say(f"{done.sbom}: the bill of materials")


@click.command(cls=Command)
@click.argument("folder", metavar="DIR", type=FolderPath())
@_KEY
@_SIGNATURE
@option_of(RunOptions, "follow_links")
@VERBOSITY
@JSON
def verify(
    folder: Path, key: Path, signature: Path | None, follow_links: bool, as_json: bool
) -> int:
    """Compare a folder with its signature.

    The signature is one of `qconvert sign`, or of model-signing with a key; each file of DIR is hashed.

    Exit code 3 if a file of DIR was changed, is missing, or is not among those that were signed; 1 if
    the signature is not one of this key.

    \b
    Examples:
      qconvert verify V3-bf16 --key key.pub
      qconvert verify V3-bf16 --key key.pub --signature V3-bf16.sig --json
    """
    from qconvert import api
    from qconvert.core.shown import count

    with Bar() as bar:
        found = api.verify(folder, key, signature=signature, follow_links=follow_links, events=bar)
    differs = {"changed": found.changed, "missing": found.missing, "extra": found.extra}
    if as_json:
        named = {"signature": str(found.signature), "key": found.key, "files": found.files}
        say_json({
            **named, "same": found.is_same, **{name: list(files) for name, files in differs.items()},
            "conversion": dict(found.conversion),
        })  # fmt: skip
        return 0 if found.is_same else FINDINGS
    says = {"changed": "was changed", "missing": "is missing", "extra": "was not signed"}
    say(*(f"{path}: {says[name]}" for name, files in differs.items() for path in files))
    wrong = sum(map(len, differs.values()))
    say(
        f"{folder}: {count(wrong, 'file')} not as signed" if wrong else
        f"{folder}: {count(found.files, 'file matches', 'files match')} the signature (key {found.key})"
    )  # fmt: skip
    return FINDINGS if wrong else 0
