"""repair: metadata made true to the weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.command import Command
from qconvert.cli.options import (
    DRY_RUN,
    FINDINGS,
    JSON,
    OPENING,
    SOURCE_NAME,
    TP,
    FolderPath,
    made_for,
    option_of,
)
from qconvert.core.say import say, say_json
from qconvert.core.shown import count
from qconvert.validation.options import ValidateOptions

if TYPE_CHECKING:
    from qconvert.api import Repair


_MOST_LINES = 40  # of a diff: an ignore list may have a line a layer


@click.command(cls=Command)
@click.argument("source", metavar="REPO", type=SOURCE_NAME)
@click.option(
    "--out",
    type=FolderPath(),
    metavar="DIR",
    help="Write the changed files here, and leave REPO as it is. Needed for a repo on the Hub.",
)
@made_for("sglang, whose loader is simulated: an H200 without other options", "sglang")
@TP
@option_of(ValidateOptions, "loader")
@DRY_RUN
@OPENING
@JSON
def repair(
    source: str,
    out: Path | None,
    consumer: str | None,
    tp: int | None,
    loader: str | None,
    dry_run: bool,
    follow_links: bool,
    as_json: bool,
) -> int:
    """Make the metadata of a converted folder true to its weights, which are not touched.

    Mends config.json (quantization blocks that describe no tensor, ignore lists, what is block FP8), the
    index, hf_quant_config.json and the model card, and seals manifest and receipt again with the hashes
    before and after. The result is validated before anything is written; what only a new conversion can
    mend is refused. Of a repo on the Hub headers are fetched, and the changed files are written to a
    folder that can be uploaded.

    \b
    Examples:
      qconvert repair GLM-4.5-Air-int4 --dry-run
      qconvert repair GLM-4.5-Air-int4 --for sglang==0.5.23 --tp 4
      qconvert repair ORG/GLM-4.5-Air-int4 --out mended

    Exit code 3 with --dry-run if errors would remain.
    """
    from qconvert import api

    if consumer is None and tp is not None:
        raise click.UsageError("--tp is a size of a runtime: give --for NAME")
    found = api.repair(
        source, out, runtime=consumer, tp=tp or 1, loader=loader, dry_run=dry_run,
        follow_links=follow_links, notice=lambda text: say(text, err=True),
    )  # fmt: skip
    if as_json:
        say_json([_as_json(one) for one in found])
    else:
        for one in found:
            _show(one, out, dry_run=dry_run)
    return FINDINGS if any(one.left for one in found) else 0


def _as_json(one: Repair) -> dict[str, Any]:
    return {
        "folder": str(one.folder),
        "changes": [
            {"file": change.file, "why": list(change.why), "diff": change.diff()}
            for change in one.changes
        ],
        "fixed": [f"{f.rule}: {f.where}: {f.message}" for f in one.fixed],
        "left": [f"{f.rule}: {f.where}: {f.message}" for f in one.left],
    }


def _show(one: Repair, out: Path | None, *, dry_run: bool) -> None:
    if not one.changes and not one.left:
        say(f"{one.folder}: nothing to repair")
        return
    for change in one.changes:
        say(f"{change.file}:", *(f"  {reason}" for reason in change.why))
        lines = change.diff()
        say(*(f"    {line}" for line in lines[:_MOST_LINES]))
        if len(lines) > _MOST_LINES:
            say(f"    ... {count(len(lines) - _MOST_LINES, 'more line')} (--json shows all)")
    for finding in one.fixed:
        say(f"ends {finding.rule}: {finding.where}: {finding.message}")
    for finding in one.left:
        say(f"left {finding.rule}: {finding.where}: {finding.message}")
    files = count(len(one.changes), "file")
    say(f"would change {files}" if dry_run else f"changed {files} in {out or one.folder}")
