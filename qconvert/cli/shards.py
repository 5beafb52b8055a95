"""finish and status: conversions that many machines share."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.command import VERBOSITY, Command, is_quiet
from qconvert.cli.options import JSON, OUT_FOLDER
from qconvert.cli.profile import PROFILE
from qconvert.core.say import say, say_json

if TYPE_CHECKING:
    from qconvert.run.folder.status import FolderStatus

# What a folder that is anyone's must not ask for: to run a file or program of its choice, to read beyond
# a source, to write elsewhere (commands are noted without --profile, --log-json, --loader), to take
# orders of a cluster. A --work-dir is taken: the folder below it must be OUT itself, or nothing is made
# (carry_out.py).
REFUSED = (
    "--family", "--follow-links", "--profile", "--log-json", "--save-stats", "--engine", "--address",
    "--distributed", "--loader",
)  # fmt: skip


@click.command(cls=Command)
@OUT_FOLDER
@PROFILE
@JSON
@VERBOSITY
@click.pass_context
def finish(ctx: click.Context, out: Path, as_json: bool) -> None:
    """Publish OUT when all shards of a conversion with --shard are done.

    The command of the shards, which their journals hold, is planned again; their work is checked as
    that of an interrupted run would be; a few units at the borders of shards are run; then OUT is
    published, byte for byte as one machine would. What misses is named with the command to run.

    \b
    Example:
      qconvert finish DeepSeek-V3-bf16
    """
    from qconvert import api
    from qconvert.cli.carry_out import Started
    from qconvert.core.errors import OutputError
    from qconvert.run.engines.shard import without_shard
    from qconvert.run.folder.status import finished_in, folders_of, recorded

    if finished_in(out):
        api.clean(out)  # of what a process left that was killed as it removed its work folder
        say_json({"out": str(out), "already_done": True}) if as_json else say(
            f"{out} is finished; nothing to do"
        )
        return
    found = recorded(out)
    if found is None:
        raise OutputError(
            f"{out}: no work of shards is there; after a run without --shard, the same command goes on"
        )
    words, folder = without_shard(found[0]), found[1]
    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    if not _is_conversion(group, words):
        raise OutputError(
            f"{out}: its journal names no conversion; run the command of the shards without --shard"
        )
    for option in REFUSED:
        if any(word.partition("=")[0] == option for word in words):
            raise OutputError(
                f"{out}: the shards were run with {option}, which is not taken from a journal; run "
                "their command without --shard"
            )
    if not is_quiet():
        say(f"command {shlex.join(['qconvert', *words])}", err=True)
    here = out.absolute()
    more = ["--json"] if as_json and "--json" not in words else []
    if is_quiet():
        more.append("-q")
    before = Path.cwd()
    if folder and Path(folder).is_dir():
        os.chdir(folder)
    try:
        started = Started(tuple(words), finishing=here)
        with group.make_context(ctx.find_root().info_name, [*words, *more], obj=started) as inner:
            group.invoke(inner)
    finally:
        os.chdir(before)
    if folders_of(here):
        raise OutputError(
            f"{out}: the command in its journals does not finish it; run the command of the shards "
            "without --shard"
        )


def _is_conversion(group: click.Group, words: Sequence[str]) -> bool:
    """Return whether words name a conversion, which takes --shard: no other command is run from a
    journal."""
    command: click.Command | None = group
    for word in words:
        if not isinstance(command, click.Group):
            break
        command = command.commands.get(word)
    names = set() if command is None else {param.name for param in command.params}
    return "shard" in names


@click.command(cls=Command)
@OUT_FOLDER
@JSON
def status(out: Path, as_json: bool) -> None:
    """Show who did what in OUT, a folder that shards fill: host, process, units and bytes, and the
    last sign of life.

    A shard of another machine is `unknown` until it has ended: its last sign of life, which comes every
    few seconds, is in the time of the file server.

    \b
    Examples:
      qconvert status DeepSeek-V3-bf16
      qconvert status DeepSeek-V3-bf16 --json
    """
    from qconvert import api

    found = api.status(out)
    if as_json:
        listed = [_as_json(folder) for folder in found]
        say_json(listed if len(listed) > 1 else listed[0])
        return
    for folder in found:
        say(*_lines(folder))


def _as_json(folder: FolderStatus) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(folder), "out": str(folder.out), "complete": folder.complete}


def _lines(folder: FolderStatus) -> list[str]:
    from qconvert.core.shown import count, format_size

    if folder.state == "finished":
        return [f"{folder.out} is finished"]
    if folder.state == "unfinished":
        done = count(folder.units_done or 0, "unit")
        line = f"{folder.out}: a run without --shard, or `finish`, has done {done}; "
        return [line + "the same command without --shard goes on"]
    units = f"{folder.units_done} of {count(folder.units or 0, 'unit')}"
    sizes = f"{format_size(folder.bytes_done or 0)} of {format_size(folder.bytes or 0)}"
    lines = [f"{folder.out}: {units}, {sizes}"]
    for row in folder.shards:
        who = "" if row.host is None else f"  {row.host} process {row.pid}, {row.last_sign}"
        lines.append(
            f"shard {row.shard}  {row.state:<9}  {row.units_done} of {count(row.units, 'unit')}, "
            f"{format_size(row.bytes_done)} of {format_size(row.bytes)}{who}"
        )
    number, nbytes = folder.rest
    if number:
        lines.append(f"left to finish: {count(number, 'unit')}, {format_size(nbytes)}")
    if folder.complete:
        lines.append(f"all shards are done: qconvert finish {folder.out}")
    return lines
