"""split and join: folders of pipeline stages."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli import completion
from qconvert.cli.calibration import DATA, split_data
from qconvert.cli.carry_out import checked, end_with, tell_next
from qconvert.cli.command import Command, is_quiet, is_verbose
from qconvert.cli.convert import (
    RUNNING,
    CommandOptions,
    convert,
    dump_after,
    planned_and_run,
    share_line,
)
from qconvert.cli.options import OUT, PARTITION, SOURCE, SOURCE_NAME, FolderPath, made_for
from qconvert.core.say import say, say_json

if TYPE_CHECKING:
    from qconvert.api import DryRun, PlannedStages


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
    shown = (*lines, *_stage_lines(planned), *_balance_lines(planned))
    shown = (planned.source.model_line, *shown, *map(share_line, planned.shares))
    if err and is_quiet():
        shown = tuple(line for line in shown if line.startswith("warning "))
    say(*shown, err=err)
    for line in (line for look in looks for line in dry_run_lines(look)):
        say(line)


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
        linked = sum(file.link is not None for file in ready.layout.files)
        lines.append(
            f"{stage['folder']}  layers {first}-{stop - 1}  {count(folder.tensors, 'tensor')}, "
            f"{format_size(folder.nbytes)}, {count(len(ready.layout.files), 'file')}, "
            f"{linked} of them hard links; {format_size(ready.share.total)} memory, "
            f"{format_size(ready.layout.written)} disk"
        )
    return lines


@click.command(cls=Command)
@SOURCE
@click.argument("out", type=FolderPath(repos=True))
@click.option(
    "--pp", required=True, type=PARTITION, metavar="15,15,15,16|N",
    help="Layers of each stage, or a number of stages to split as the runtime would.",
)  # fmt: skip
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
    pp: str,
    consumer: str | None,
    balance: bool,
    recipe: str | None,
    copy: bool,
    **given: Any,
) -> None:
    """Split a checkpoint into one folder per pipeline stage, each complete in itself; or, where OUT is
    a repo on the Hub (hf://ORG/NAME), one repo per stage, ORG/NAME-stage-NN-of-NN.

    A shard that belongs to one stage unchanged is hard-linked to the source's file where possible. The
    environment variable to set is printed, and written to every qconvert.json.

    \b
    Examples:
      qconvert split DeepSeek-V3 stages --pp 15,15,15,16 --for sglang
      qconvert split Qwen/Qwen3.5-397B-A17B-FP8 stages --pp 4 --for vllm
      qconvert split DeepSeek-V3 stages --pp 4 --for sglang --balance --dry-run
      qconvert split Qwen/Qwen3.5-35B-A3B-FP8 stages --pp 4 --for sglang --recipe dequant-fp8
      qconvert split Qwen3-30B-A3B out --pp 24,24 --recipe ./llm-compressor.yaml --data chats.jsonl
    """
    from qconvert import api

    data, options = split_data(given)
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


@click.command(cls=Command)
@click.argument("stages", type=SOURCE_NAME)
@OUT
@RUNNING
def join(stages: str, out: Path | str, **given: Any) -> None:
    """Join the stages that `split` made.

    \b
    Example:
      qconvert join stages DeepSeek-V3-again
    """
    from qconvert.checkpoint.open import local, open_stages
    from qconvert.recipe.recipe import Recipe

    options = CommandOptions(**given)
    recipe = Recipe("join", (), options.max_shard_size)
    opened = open_stages(local(stages), follow_links=options.follow_links)
    convert(recipe, opened, out, options)
