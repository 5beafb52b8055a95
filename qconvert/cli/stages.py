"""split and join: folders of pipeline stages. status and finish: folders that shards of a run fill."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli import completion
from qconvert.cli.calibration import DATA, split_data
from qconvert.cli.carry_out import checked, end_with, tell_next
from qconvert.cli.command import VERBOSITY, Command, is_quiet, is_verbose
from qconvert.cli.convert import (
    RUNNING,
    CommandOptions,
    convert,
    dump_after,
    planned_and_run,
    share_line,
)
from qconvert.cli.options import (
    JSON,
    OUT,
    OUT_FOLDER,
    PARTITION,
    SOURCE,
    SOURCE_NAME,
    Count,
    FolderPath,
    from_options,
    made_for,
)
from qconvert.cli.profile import PROFILE
from qconvert.core.say import say, say_json

if TYPE_CHECKING:
    from qconvert.api import DryRun, PlannedStages
    from qconvert.run.folder.status import FolderStatus


def _show(planned: PlannedStages, options: CommandOptions) -> None:
    """As `show_plan` shows one folder: a line a stage, and what the run would find and refuse."""
    from qconvert.api import check_dry_run

    looks = planned.dry_run() if options.dry_run else ()
    _say(planned, looks, options)
    check_dry_run(looks)


def _say(planned: PlannedStages, looks: tuple[DryRun, ...], options: CommandOptions) -> None:
    from qconvert.cli.plan_report import drop_lines, dry_run_json, dry_run_lines, loss_lines

    err = not options.dry_run
    if options.as_json:
        listed = _stages_json(planned)
        if looks:
            listed["refusals"] = [text for look in looks for text in look.refusals]
            for entry, look in zip(listed["stages"], looks[1:], strict=True):
                entry.update(dry_run_json(look))
        say_json(listed)
        return
    assert planned.whole is not None
    notes = [f"warning {note}" for note in planned.notes]
    lines = (*drop_lines(planned.whole, every=is_verbose()), *loss_lines(planned.whole), *notes)
    shown = (*lines, *_stage_lines(planned), *_loads_lines(planned), *_balance_lines(planned))
    shown = (planned.source.model_line, *shown, *map(share_line, planned.shares))
    if err and is_quiet():
        shown = tuple(line for line in shown if line.startswith("warning "))
    say(*shown, err=err)
    for line in (line for look in looks for line in dry_run_lines(look)):
        say(line)


def _loads_lines(planned: PlannedStages) -> list[str]:
    """Words of the runtimes that the stages are cut for, once where they are of all."""
    from qconvert.runtimes.pipeline import VARIABLE

    told = {one.partition("=")[0] for one in planned.environment}
    said: dict[str, list[str]] = {}
    for number, folder in enumerate(planned.folders):
        for text in folder.verdict.loads:
            if VARIABLE.get(text.partition(" ")[0]) in told:
                said.setdefault(text, []).append(str(number))
    every = len(planned.folders)
    return [
        f"loads   {text}" if len(stages) == every else f"loads   stage {', '.join(stages)}: {text}"
        for text, stages in said.items()
    ]


def _balance_lines(planned: PlannedStages) -> list[str]:
    """Bytes of weights of each stage as the runtime would cut, and as it is told to."""
    from qconvert.core.shown import format_size

    lines = []
    for label, cut in (("instead of", planned.unbalanced), ("balanced", planned.balanced)):
        if cut is not None:
            held = ", ".join(map(format_size, cut.held))
            sizes = ",".join(map(str, cut.partition))
            lines.append(f"{label} {sizes}: {held}; the fullest holds {format_size(cut.fullest)}")
    return lines


def _stages_json(planned: PlannedStages) -> dict[str, Any]:
    cuts = {"unbalanced": planned.unbalanced, "balanced": planned.balanced}
    return {
        "partition": list(planned.partition),
        **{
            name: {"partition": list(cut.partition), "bytes": list(cut.held)}
            for name, cut in cuts.items()
            if cut is not None
        },
        "environment": list(planned.environment),
        "notes": list(planned.notes),
        **({"shares": [asdict(share) for share in planned.shares]} if planned.shares else {}),
        "stages": [
            {
                "folder": folder.name,
                "layers": folder.ready.plan.facts["stage"]["layers"],
                "tensors": folder.tensors,
                "bytes": folder.nbytes,
                "linked_files": sum(file.link is not None for file in folder.ready.layout.files),
                "files": len(folder.ready.layout.files),
                "findings": folder.verdict.as_json(),
            }
            for folder in planned.folders
        ],
    }


def _stage_lines(planned: PlannedStages) -> list[str]:
    from qconvert.core.shown import count, format_size

    warned = (line for folder in planned.folders for line in folder.verdict.lines())
    lines = [f"warning {line}" for line in dict.fromkeys(warned)]
    for folder in planned.folders:
        ready, stage = folder.ready, folder.ready.plan.facts["stage"]
        first, stop = stage["layers"]
        layers = f"layers {first}-{stop - 1}" if stop - first > 1 else f"layer {first}"
        linked = sum(file.link is not None for file in ready.layout.files)
        lines.append(
            f"{stage['folder']}  {layers}  {count(folder.tensors, 'tensor')}, "
            f"{format_size(folder.nbytes)}, {count(len(ready.layout.files), 'file')}, "
            f"{linked} of them hard links; {format_size(ready.share.total)} memory, "
            f"{format_size(ready.layout.written)} disk"
        )
    return lines


@click.command(cls=Command)
@SOURCE
@click.argument("out", type=FolderPath(repos=True))
@click.option(
    "--pp", type=PARTITION, metavar="15,15,15,16|N",
    help="Layers of each stage, or a number of stages to split as the runtime would.",
)  # fmt: skip
@click.option(
    "--numa", type=Count(),
    help="NUMA nodes of the serving machine; the runtime must be started with the same count.",
)  # fmt: skip
@click.option(
    "--tp", type=Count(), metavar="N",
    help="Tensor-parallel ranks: a folder for each, as vLLM's loader of sharded states takes it.",
)  # fmt: skip
@click.option(
    "--ep", type=Count(), metavar="N", help="Groups of experts among the tensor-parallel ranks."
)
@made_for("sglang or vllm; needed with --pp N", "sglang", "vllm")
@click.option(
    "--balance", is_flag=True,
    help="Cut the N stages so that the fullest one holds least: embeddings, head and draft are counted.",
)  # fmt: skip
@click.option(
    "--recipe", metavar="RECIPE", shell_complete=completion.recipes_or_files,
    help="Recipe to apply in the same read.",
)  # fmt: skip
@click.option(
    "--copy", is_flag=True, help="Copy shards instead of hard-linking them to the source's."
)
@RUNNING
@DATA
def split(
    source: str,
    out: Path | str,
    pp: str | None,
    numa: int | None,
    tp: int | None,
    ep: int | None,
    consumer: str | None,
    balance: bool,
    recipe: str | None,
    copy: bool,
    **given: Any,
) -> None:
    """Split a model into pipeline stages.

    One folder per stage, each complete in itself; or, where OUT is a repo on the Hub (hf://ORG/NAME),
    one repo per stage, ORG/NAME-stage-NN-of-NN.

    A shard that belongs to one stage unchanged is hard-linked to the source's file where possible. The
    environment variable to set is printed, and written to every qconvert.json.

    With --numa SRC is a folder of `amx`, and OUT one of the same experts, cut for another number of NUMA
    nodes without the model. [docs/ktransformers.md]

    \b
    Examples:
      qconvert split DeepSeek-V3 stages --pp 15,15,15,16 --for sglang
      qconvert split Qwen/Qwen3.5-397B-A17B-FP8 stages --pp 4 --for vllm
      qconvert split DeepSeek-V3 stages --pp 4 --for sglang --balance --dry-run
      qconvert split Qwen/Qwen3.5-35B-A3B-FP8 stages --pp 4 --for sglang --recipe dequant-fp8
      qconvert split Qwen3-30B-A3B out --pp 24,24 --recipe ./llm-compressor.yaml --data chats.jsonl
      qconvert split V3-cpu V3-cpu-4 --numa 4
    """
    from qconvert import api

    data, options = split_data(given)
    if sum(one is not None for one in (pp, numa, tp)) != 1:
        raise click.UsageError(
            "say how to cut, by one of: --pp for pipeline stages, --tp for ranks, --numa for NUMA nodes"
        )
    if ep is not None and tp is None:
        raise click.UsageError("--ep is of ranks: it needs --tp N")
    if tp is not None:
        _split_ranks(source, out, tp, ep or 1, consumer, balance, copy, recipe, options, data)
        return
    if numa is not None:
        others = {
            "--for": consumer, "--balance": balance, "--recipe": recipe, "--copy": copy,
            "calibration data": data,
        }  # fmt: skip
        if name := next((name for name, value in others.items() if value), None):
            raise click.UsageError(f"{name} is of pipeline stages (--pp): omit it with --numa")
        from qconvert.passes.recut import RecutTiles

        with from_options():
            steps = (RecutTiles(numa),)
        convert(api.Recipe("split", steps, options.max_shard_size), source, out, options)
        return
    assert pp is not None
    if data and recipe is None:
        raise click.UsageError("calibration data needs a --recipe that calibrates")
    if "," not in pp and consumer is None:
        raise click.UsageError("runtimes split differently: add --for sglang or --for vllm")
    if balance and "," in pp:
        raise click.UsageError(f"--balance chooses the layers of each stage: give --pp N, not {pp}")
    if options.validate is not None and isinstance(out, str):
        raise click.UsageError(
            "--validate: stages on the Hub are validated each by itself, afterwards"
        )
    if options.validate is not None and options.as_json:
        raise click.UsageError("--validate and --json: split first, then `validate STAGES --json`")
    passes = api.load_recipe(recipe, data) if recipe else api.Recipe("split", ())
    if options.dump_after is not None:
        dump_after(passes, source, options)
        return
    planned = planned_and_run(
        lambda opened, more: api.plan_stages(
            passes, opened, out, pp, consumer, link=not copy, balance=balance, **more
        ),
        source, options, passes.passes, show=_show,
    )  # fmt: skip
    if not options.as_json:
        say("set " + " or ".join(planned.environment))
    if options.validate and not options.dry_run and options.shard is None:
        end_with([checked(out, source, options)])
    silent = options.dry_run or options.as_json or options.shard is not None
    if not silent and options.validate is None:
        tell_next([str(out)], source, None, validated=False)


def _split_ranks(
    source: str, out: Path | str, tp: int, ep: int, consumer: str | None, balance: bool,
    copy: bool, recipe: str | None, options: CommandOptions, data: Any,
) -> None:  # fmt: skip
    """Make a folder for each rank, and print the line that serves them."""
    from qconvert import api
    from qconvert.core.versions import VLLM, is_release
    from qconvert.runtimes.consumers import parse_consumer
    from qconvert.runtimes.serving import launch_ranks

    named = parse_consumer(consumer or "vllm")
    if balance or copy or isinstance(out, str) or named.name != "vllm":
        raise click.UsageError(
            "ranks are cut for vLLM alone, to a folder of this machine: sglang's loaders of such files "
            "take weights that its kernels' preparation has changed; omit --for, --balance, --copy, hf://"
        )
    if named.version is not None and not is_release(named.version, VLLM.version):
        raise click.UsageError(
            f"ranks are cut as the loader of {VLLM} reads them, and --for names {named.version}, whose "
            f"loader was not compared; omit =={named.version} to cut for {VLLM}"
        )
    passes = api.load_recipe(recipe, data) if recipe else api.Recipe("split", ())
    if options.dump_after is not None:
        dump_after(passes, source, options)
        return
    planned = planned_and_run(
        lambda opened, more: api.plan_ranks(passes, opened, out, tp, ep, **more),
        source, options, passes.passes,
    )  # fmt: skip
    line, folders = launch_ranks(str(out), tp, ep), [str(one.out) for one in planned.folders]
    if options.as_json and not options.dry_run:
        say_json({"out": str(out), "folders": folders, "serve": line})
    say("", "serve with:", line, err=options.as_json)
    if options.dry_run or options.shard is not None:
        return
    if options.validate is not None:
        end_with([checked(folder, source, options) for folder in folders])
    elif not options.as_json:
        tell_next(folders[:1], source, None, validated=False)


@click.command(cls=Command)
@click.argument("parts", type=SOURCE_NAME)
@OUT
@RUNNING
def join(parts: str, out: Path | str, **given: Any) -> None:
    """Join stages, or files of TP ranks.

    PARTS is a folder of stages that `split` made, or a checkpoint in files of tensor-parallel ranks
    (*-TP-000.safetensors), as Grok-2 is published. sglang reads such files right in that number of ranks
    alone, and in fewer leaves out experts' parts without an error; OUT is served in any.

    \b
    Examples:
      qconvert join stages DeepSeek-V3-again
      qconvert join xai-org/grok-2 grok-2-whole --dry-run
      qconvert join xai-org/grok-2 grok-2-whole
    """
    from qconvert.checkpoint.open import local, open_source, open_stages
    from qconvert.checkpoint.ranks import is_of_ranks
    from qconvert.passes.join_ranks import JoinRanks
    from qconvert.recipe.recipe import Recipe

    options, folder = CommandOptions(**given), local(parts)
    of_ranks = is_of_ranks(folder)
    opener = open_source if of_ranks else open_stages
    steps = (JoinRanks(),) if of_ranks else ()
    opened = opener(folder, follow_links=options.follow_links)
    convert(Recipe("join", steps, options.max_shard_size), opened, out, options)


# What a folder that is anyone's must not ask for: to run a file or program of its choice, to read beyond
# a source, to write elsewhere (commands are noted without --profile, --log-json, --loader), to take
# orders of a cluster. A --work-dir is taken: the folder below it must be OUT itself, or nothing is made
# (carry_out.py).
REFUSED = (
    "--family", "--follow-links", "--profile", "--log-json", "--save-stats", "--engine", "--address",
    "--distributed", "--loader", "--measured",
)  # fmt: skip


@click.command(cls=Command)
@OUT_FOLDER
@PROFILE
@JSON
@VERBOSITY
@click.pass_context
def finish(ctx: click.Context, out: Path, as_json: bool) -> None:
    """Publish a folder when all shards are done.

    Those of a conversion with --shard.

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
    """Show who did what in a folder of shards.

    Host, process, units and bytes, and the last sign of life.

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
        return [
            f"{folder.out}: unfinished, {done} done; the command that began it, run again, does the rest"
        ]
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
