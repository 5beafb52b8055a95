"""plan, run, and a command for each conversion, which is a recipe in flags."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast

import click

from qconvert.cli.calibration import DATA, split_data
from qconvert.cli.options import OUT, SOURCE, ModelId, Size, stacked

if TYPE_CHECKING:
    from qconvert.checkpoint.checkpoint import Checkpoint
    from qconvert.plan.plan import Pass, Plan
    from qconvert.recipe.recipe import Recipe
    from qconvert.run.executor import Options, Prepared, Receipt

    MadeFolders = Sequence[tuple[Prepared, Path]]
    Folders = Sequence[tuple[Prepared, Path | None]]

F = TypeVar("F", bound=Callable[..., Any])


class RunOptions(TypedDict):
    """Options that every conversion has."""

    memory: int | None
    jobs: int | None
    max_shard_size: int | None
    sha256: bool
    dry_run: bool
    print_recipe: bool
    dump_after: str | None
    base_model: str | None
    as_json: bool


_PLANNING: Callable[[F], F] = stacked(
    click.option(
        "--memory", type=Size(), help="Memory of all processes, e.g. 512MiB. [default: 1 GiB, or "
        "what all cores need; at most half of what is free]",
    ),
    click.option("--jobs", type=click.IntRange(min=1), help="Worker processes. [default: auto]"),
    click.option("--max-shard-size", type=Size(), help="Largest output file. [default: 5GB]"),
    click.option(
        "--dump-after", metavar="PASS",
        help="Print every tensor as it stands after PASS (`source`, `end`, or a pass) and stop.",
    ),
    click.option(
        "--base-model", metavar="ORG/NAME", type=ModelId(), help="The source's repo, for the model "
        "card. [default: what the source says]",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout."),
)  # fmt: skip
RUNNING: Callable[[F], F] = stacked(
    _PLANNING,
    click.option("--sha256", is_flag=True, help="Also put each file's sha256 into the receipt."),
    click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
)
CONVERSION: Callable[[F], F] = stacked(
    RUNNING,
    click.option(
        "--print-recipe", is_flag=True, help="Print this command as a YAML recipe and stop."
    ),
)


@click.command()
@click.argument("recipe")
@SOURCE
@click.argument("out", required=False, type=click.Path(path_type=Path))
@_PLANNING
@DATA
def plan(recipe: str, source: str, out: Path | None, **given: Any) -> None:
    """Show what RECIPE would make of SRC, from its headers alone.

    RECIPE is a YAML file, llm-compressor's too, or a built-in name. With OUT, the time is estimated
    with the write speed of its disk.

    \b
    Examples:
      qconvert plan dequant-fp8 DeepSeek-V3
      qconvert plan dequant-fp8 DeepSeek-V3 /data/out --json
      qconvert plan dequant-fp8 DeepSeek-V3 --dump-after dequant | less
    """
    from qconvert.recipe.recipe import load_recipe

    data, rest = split_data(given)
    options = cast(RunOptions, {**rest, "sha256": False, "dry_run": True, "print_recipe": False})
    convert(load_recipe(recipe, data), source, out, options)


@click.command()
@click.argument("recipe")
@SOURCE
@OUT
@RUNNING
@DATA
def run(recipe: str, source: str, out: Path, **given: Any) -> None:
    """Carry out RECIPE on SRC into the folder OUT.

    Interrupted, by anything, the same command goes on where it stopped. A recipe of llm-compressor's
    (GPTQModifier, QuantizationModifier) runs as it is; one that calibrates takes its data here.

    \b
    Examples:
      qconvert run dequant-fp8 DeepSeek-V3 DeepSeek-V3-bf16
      qconvert run ./mine.yaml Qwen/Qwen3-30B-A3B-FP8 out --memory 4GiB --jobs 8
      qconvert run ./llm-compressor.yaml Qwen3-30B-A3B out --data chats.jsonl --samples 256
    """
    from qconvert.recipe.recipe import load_recipe

    data, rest = split_data(given)
    options = cast(RunOptions, {**rest, "print_recipe": False})  # it is one already
    convert(load_recipe(recipe, data), source, out, options)


@click.command()
@SOURCE
@OUT
@click.option("--drop-mtp", is_flag=True, help="Leave the MTP (draft) layers out.")
@CONVERSION
def dequant(source: str, out: Path, drop_mtp: bool, **options: Unpack[RunOptions]) -> None:
    """Turn the FP8 weights of SRC into BF16, exactly: bf16(fp32(w) * fp32(s)).

    Block, per-channel and per-tensor scales; MTP layers are kept unless dropped by --drop-mtp.

    \b
    Examples:
      qconvert dequant DeepSeek-V3 DeepSeek-V3-bf16 --dry-run
      qconvert dequant DeepSeek-V3 DeepSeek-V3-bf16 --memory 8GiB
      qconvert dequant Qwen/Qwen3-30B-A3B-FP8 out --print-recipe > mine.yaml
    """
    from qconvert.passes.dequant import Dequant
    from qconvert.passes.drop import Drop
    from qconvert.recipe.recipe import Recipe

    steps: tuple[Pass, ...] = (Drop(what="mtp"), Dequant()) if drop_mtp else (Dequant(),)
    convert(Recipe("dequant", steps, options["max_shard_size"]), source, out, options)


def convert(
    recipe: Recipe, source: str | Checkpoint, out: Path | None, options: RunOptions
) -> None:
    """Plan a recipe and, unless it is a dry run, carry it out, telling the user."""
    if options["print_recipe"]:
        click.echo(recipe.to_yaml(), nl=False)
        return
    from qconvert.hub.card.of_plan import with_card
    from qconvert.run.executor import prepare

    plan = planned(recipe, source, out, options)
    if plan is None:
        return
    ready = prepare(with_card(plan, options["base_model"]), run_options(recipe, options))
    show_plan([(ready, out)], options)
    if not options["dry_run"]:
        assert out is not None
        carry_out([(ready, out)], options["as_json"])


def planned(
    recipe: Recipe, source: str | Checkpoint, out: Path | None, options: RunOptions
) -> Plan | None:
    """The recipe's plan, or None where only a dump of it was wanted."""
    from qconvert.checkpoint.checkpoint import Checkpoint
    from qconvert.passes.stages import open_source
    from qconvert.plan.plan import Plan, run_passes
    from qconvert.run.workspace import check_apart

    checkpoint = source if isinstance(source, Checkpoint) else open_source(source)
    if out is not None:
        check_apart(out, checkpoint)
    start = Plan.identity(checkpoint)
    if options["dump_after"] is not None:
        _dump(_plan_after(start, recipe, options["dump_after"]), options["as_json"])
        return None
    return run_passes(start, recipe.passes)


def run_options(recipe: Recipe, options: RunOptions) -> Options:
    from qconvert.run.executor import Options
    from qconvert.run.shards import DEFAULT_SHARD_BYTES

    shard_size = options["max_shard_size"] or recipe.max_shard_size or DEFAULT_SHARD_BYTES
    return Options(options["memory"], options["jobs"], shard_size, options["sha256"])


def _dump(plan: Plan, as_json: bool) -> None:
    from qconvert.cli.plan_report import dump, expression

    if as_json:
        listed = {
            name: {
                "dtype": output.type.dtype,
                "shape": list(output.type.shape),
                "from": expression(output),
            }
            for name, output in plan.tensors.items()
        }
        click.echo(json.dumps(listed, indent=2))
    else:
        click.echo(dump(plan))


def _plan_after(start: Plan, recipe: Recipe, wanted: str) -> Plan:
    from qconvert.core.errors import RecipeError
    from qconvert.plan.plan import run_passes

    names = [step.name for step in recipe.passes]
    if wanted == "source":
        return start
    if wanted == "end":
        return run_passes(start, recipe.passes)
    if wanted not in names:
        known = ", ".join(["source", *names, "end"])
        raise RecipeError(f"--dump-after {wanted}: the recipe has no such pass; choose of {known}")
    plan = start
    for step in recipe.passes[: names.index(wanted) + 1]:
        plan = step(plan)
    return plan


def show_plan(folders: Folders, options: RunOptions) -> None:
    """The plan of each folder goes to stdout where it is the result, to stderr where a run follows.
    How fast this machine is gets measured for the first only: the run itself will soon tell."""
    from qconvert.cli.plan_report import Rates, plan_json, plan_text
    from qconvert.run.probe import read_rate, write_rate

    if options["as_json"] and not options["dry_run"]:
        return
    found = []
    for ready, out in folders:
        rates = Rates(None, None)
        if options["dry_run"]:
            write = write_rate(out) if out is not None else None
            rates = Rates(read_rate(ready.plan.checkpoint), write)
        if options["as_json"]:
            found.append(plan_json(ready, rates))
        else:
            text = plan_text(ready, None if out is None else str(out), rates)
            click.echo(text, err=not options["dry_run"])
    if options["as_json"]:
        click.echo(json.dumps(found if len(found) > 1 else found[0], indent=2))


def carry_out(folders: MadeFolders, as_json: bool, quiet: bool = False) -> None:
    """Run what was planned, folders together, and tell the user."""
    import time

    from qconvert.calibrate.maker import maker_for
    from qconvert.cli.progress import Bar
    from qconvert.run.executor import run_together

    begin = time.monotonic()
    memory = folders[0][0].options.memory
    maker = maker_for([ready.plan for ready, _ in folders], memory)
    with Bar() as bar:
        receipts = run_together(folders, events=bar, maker=maker)
    seconds = time.monotonic() - begin
    for remark in receipts[0].remarks:
        click.echo(f"remark  {remark}", err=True)
    if quiet:
        return
    if as_json:
        summaries = [
            {
                "out": str(receipt.out), "fingerprint": receipt.fingerprint,
                "files": list(receipt.files), "bytes": receipt.nbytes, "seconds": seconds,
                "remarks": list(receipt.remarks), "already_done": receipt.already_done,
                "resumed_units": receipt.resumed_units,
            }
            for receipt in receipts
        ]  # fmt: skip
        click.echo(json.dumps(summaries if len(summaries) > 1 else summaries[0], indent=2))
        return
    for receipt in receipts:
        click.echo(_ending(receipt, seconds))


def _ending(receipt: Receipt, seconds: float) -> str:
    from qconvert.recipe.recipe import format_size

    if receipt.already_done:
        return f"{receipt.out} already holds this very result; nothing to do"
    resumed = f", {receipt.resumed_units} units from before" if receipt.resumed_units else ""
    return (
        f"wrote {receipt.out}: {format_size(receipt.nbytes)} in {seconds:.1f} s "
        f"({format_size(receipt.nbytes / seconds)}/s){resumed}"
    )
