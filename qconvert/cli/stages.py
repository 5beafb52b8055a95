"""split and join: folders of pipeline stages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import click

from qconvert.cli.calibration import DATA, split_data
from qconvert.cli.consumer import ConsumerName
from qconvert.cli.convert import (
    RUNNING,
    RunOptions,
    carry_out,
    convert,
    outlooks,
    planned,
    prepared,
    refuse_foreseen,
    run_options,
)
from qconvert.cli.options import OUT, SOURCE, Folder, Partition
from qconvert.core.say import say, say_json

if TYPE_CHECKING:
    from qconvert.recipe.recipe import Recipe
    from qconvert.run.prepare import Prepared
    from qconvert.run.preview import Outlook
    from qconvert.validation.findings import Verdict


def convert_stages(
    recipe: Recipe,
    source: str,
    out: Path,
    pp: str,
    runtime: str | None,
    options: RunOptions,
    *,
    link: bool,
) -> None:
    """Plan a recipe, cut the result into pipeline stages, and make each stage's folder."""
    from dataclasses import replace

    from qconvert.cli.plan_report import drop_lines, loss_lines, outlook_json, outlook_lines
    from qconvert.passes.stages import split_plan
    from qconvert.runtimes.consumers import parse_consumer
    from qconvert.runtimes.pipeline import VARIABLE, Runtime, check_runtime, partition_of

    if "," not in pp and runtime is None:
        raise click.UsageError("each runtime cuts differently: say --for sglang or --for vllm")
    whole = planned(recipe, source, out, options)
    if whole is None:
        return
    known: Runtime | None = check_runtime(runtime)
    unchecked = None if runtime is None else parse_consumer(runtime).unchecked
    notes = [] if unchecked is None else [unchecked]
    partition = partition_of(pp, whole.census.dims.num_layers, known)
    chosen = replace(run_options(recipe, options), link_near=out if link else None)
    plans = [plan.check() for plan in split_plan(whole, partition, known)]
    parts, verdicts = prepared(
        plans, chosen, options["base_model"], together=False, source=whole.checkpoint
    )
    stages = [(out / part.plan.facts["stage"]["folder"], part) for part in parts]
    looks = _foreseen(out, stages) if options["dry_run"] else []
    if not options["dry_run"]:
        _check_room(out, stages)
    sizes = ",".join(map(str, partition))
    variables = [VARIABLE[known]] if known else list(VARIABLE.values())
    settings = [f"{variable}={sizes}" for variable in variables]
    if options["as_json"]:
        listed = _stages_json(stages, partition, settings, notes, verdicts)
        if options["dry_run"]:
            listed["refusals"] = [text for look in looks for text in look.refusals]
            for entry, look in zip(listed["stages"], looks[1:], strict=True):
                entry.update(outlook_json(look))
        say_json(listed)
    else:
        for line in (whole.checkpoint.model_line, *drop_lines(whole), *loss_lines(whole)):
            say(line, err=not options["dry_run"])
        for note in notes:
            say(f"warning {note}", err=not options["dry_run"])
        _show_stages(stages, verdicts, err=not options["dry_run"])
        for line in (line for look in looks for line in outlook_lines(look)):
            say(line)
    refuse_foreseen(looks)
    if not options["dry_run"]:
        for folder, ready in stages:
            carry_out([(ready, folder)], as_json=False, quiet=options["as_json"])
    if not options["as_json"]:
        say("set " + " or ".join(settings))


def _foreseen(out: Path, stages: list[tuple[Path, Prepared]]) -> list[Outlook]:
    """Of the folder of all stages, then of each: what a run would find, and refuse."""
    from qconvert.core.errors import QConvertError
    from qconvert.run.preview import Outlook

    try:
        _check_room(out, stages)
        refusals: tuple[str, ...] = ()
    except QConvertError as error:
        refusals = (str(error),)
    each = [look for folder, ready in stages for look in outlooks([(ready, folder)])]
    return [Outlook(out, None, 0, 0, refusals), *filter(None, each)]


def _check_room(out: Path, stages: list[tuple[Path, Prepared]]) -> None:
    """All stages must fit before the first is begun, and nothing else may lie in their folder."""
    from qconvert.core.errors import OutputError
    from qconvert.run.prepare import disk_bytes
    from qconvert.run.workspace import check_disk

    names = {folder.name for folder, _ in stages}
    foreign = sorted(set(os.listdir(out)) - names) if out.is_dir() else []
    if foreign:
        raise OutputError(
            f"{out} holds {foreign[0]}, which is not of this split; choose an empty or new folder"
        )
    check_disk(out, sum(disk_bytes(ready) for folder, ready in stages if not folder.exists()))


def _stages_json(
    stages: list[tuple[Path, Prepared]],
    partition: Sequence[int],
    settings: list[str],
    notes: list[str],
    verdicts: Sequence[Verdict],
) -> dict[str, Any]:
    return {
        "partition": list(partition),
        "environment": settings,
        "notes": notes,
        "stages": [
            {
                "folder": str(folder),
                "layers": ready.plan.facts["stage"]["layers"],
                "tensors": len(ready.plan.tensors),
                "bytes": ready.plan.bytes_out,
                "linked_files": sum(file.link is not None for file in ready.layout.files),
                "files": len(ready.layout.files),
                "findings": verdict.as_json(),
            }
            for (folder, ready), verdict in zip(stages, verdicts, strict=True)
        ],
    }


def _show_stages(
    stages: list[tuple[Path, Prepared]], verdicts: Sequence[Verdict], *, err: bool
) -> None:
    from qconvert.core.shown import count
    from qconvert.core.sizes import format_size

    for line in dict.fromkeys(line for verdict in verdicts for line in verdict.lines()):
        say(f"warning {line}", err=err)
    for folder, ready in stages:
        first, stop = ready.plan.facts["stage"]["layers"]
        linked = sum(file.link is not None for file in ready.layout.files)
        say(
            f"{folder.name}  layers {first}-{stop - 1}  {count(len(ready.plan.tensors), 'tensor')}, "
            f"{format_size(ready.plan.bytes_out)}, {count(len(ready.layout.files), 'file')}, "
            f"{linked} of them hard links; {format_size(ready.share.total)} memory, "
            f"{format_size(ready.layout.written)} disk",
            err=err,
        )


@click.command()
@SOURCE
@OUT
@click.option(
    "--pp",
    required=True,
    type=Partition(),
    metavar="15,15,15,16|N",
    help="Layers of each stage, or a number of stages to cut as the runtime would.",
)
@click.option(
    "--for",
    "consumer",
    type=ConsumerName("sglang", "vllm"),
    metavar="sglang|vllm",
    help="The runtime. [needed with --pp N]",
)
@click.option("--recipe", metavar="RECIPE", help="Passes to apply in the same read.")
@click.option("--copy", is_flag=True, help="Copy shards that could be hard links to the source's.")
@RUNNING
@DATA
def split(
    source: str,
    out: Path,
    pp: str,
    consumer: str | None,
    recipe: str | None,
    copy: bool,
    **given: Any,
) -> None:
    """Cut a checkpoint into a folder for each pipeline stage, each complete in itself.

    Whole shards that belong to one stage unchanged are hard links to the source's files where that
    is possible. The environment variable to set is printed, and stands in every qconvert.json.

    \b
    Examples:
      qconvert split DeepSeek-V3 stages --pp 15,15,15,16 --for sglang
      qconvert split Qwen/Qwen3.5-397B-A17B-FP8 stages --pp 4 --for vllm
      qconvert split Qwen/Qwen3.5-35B-A3B-FP8 stages --pp 4 --for sglang --recipe dequant-fp8
      qconvert split Qwen3-30B-A3B out --pp 24,24 --recipe ./llm-compressor.yaml --data chats.jsonl
    """
    from qconvert.recipe.recipe import Recipe, load_recipe

    data, rest = split_data(given)
    if data and recipe is None:
        raise click.UsageError("calibration data goes with a --recipe that calibrates")
    options = cast(RunOptions, {**rest, "print_recipe": False})  # stages are no recipe
    passes = load_recipe(recipe, data) if recipe else Recipe("split", (), options["max_shard_size"])
    convert_stages(passes, source, out, pp, consumer, options, link=not copy)


@click.command()
@click.argument("stages", type=Folder())
@OUT
@RUNNING
def join(stages: Path, out: Path, **options: Unpack[RunOptions]) -> None:
    """Put the stages that `split` made together again.

    \b
    Example:
      qconvert join stages DeepSeek-V3-again
    """
    from qconvert.checkpoint.open import open_stages
    from qconvert.recipe.recipe import Recipe

    options["print_recipe"] = False  # stages are no recipe
    recipe = Recipe("join", (), options["max_shard_size"])
    opened = open_stages(stages, follow_links=options["follow_links"])
    convert(recipe, opened, out, options)
