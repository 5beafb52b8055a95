"""plan, run, and a command for each conversion, which is a recipe in flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast

import click

from qconvert.cli.calibration import DATA, split_data
from qconvert.cli.options import (
    FOLLOW_LINKS,
    MOST,
    OUT,
    SOURCE,
    Folder,
    ModelId,
    PassName,
    Size,
    stacked,
)
from qconvert.core.say import say, say_all, say_json

if TYPE_CHECKING:
    from qconvert.checkpoint.checkpoint import Checkpoint
    from qconvert.plan.plan import Pass, Plan
    from qconvert.recipe.recipe import Recipe
    from qconvert.run.executor import Receipt
    from qconvert.run.prepare import Options, Prepared
    from qconvert.run.preview import Outlook
    from qconvert.validation.findings import Verdict

    MadeFolders = Sequence[tuple[Prepared, Path]]
    Folders = Sequence[tuple[Prepared, Path | None]]

F = TypeVar("F", bound=Callable[..., Any])


class RunOptions(TypedDict):
    """Options that every conversion has."""

    memory: int | None
    jobs: int | None
    max_shard_size: int | None
    sha256: bool
    verify: bool
    dry_run: bool
    print_recipe: bool
    dump_after: str | None
    base_model: str | None
    as_json: bool
    follow_links: bool


_PLANNING: Callable[[F], F] = stacked(
    click.option(
        "--memory", type=Size(), help="Memory of all processes, e.g. 512MiB. [default: 1 GiB, or "
        "what all cores need; at most half of what is free]",
    ),
    click.option("--jobs", type=click.IntRange(1, MOST), help="Worker processes. [default: auto]"),
    click.option("--max-shard-size", type=Size(), help="Largest output file. [default: 5GB]"),
    click.option(
        "--dump-after", metavar="PASS", type=PassName(),
        help="Print every tensor as it stands after PASS (`source`, `end`, or a pass) and stop.",
    ),
    click.option(
        "--base-model", metavar="ORG/NAME", type=ModelId(), help="The source's repo, for the model "
        "card. [default: what the source says]",
    ),
    FOLLOW_LINKS,
    click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout."),
)  # fmt: skip
RUNNING: Callable[[F], F] = stacked(
    _PLANNING,
    click.option("--sha256", is_flag=True, help="Also put each file's sha256 into the receipt."),
    click.option(
        "--verify",
        is_flag=True,
        help="Hash all that an earlier run left in OUT before building on it. "
        "[default: sizes, headers, small files, and what was written last]",
    ),
    click.option(
        "--dry-run",
        is_flag=True,
        help="Print the plan, say what the run would refuse, and write nothing.",
    ),
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
@click.argument("out", required=False, type=Folder())
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
    options = cast(
        RunOptions,
        {**rest, "sha256": False, "verify": False, "dry_run": True, "print_recipe": False},
    )
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
@click.option(
    "--allow-overflow",
    is_flag=True,
    help="Write weights beyond BF16 as infinite, instead of ending the run.",
)
@CONVERSION
def dequant(
    source: str, out: Path, drop_mtp: bool, allow_overflow: bool, **options: Unpack[RunOptions]
) -> None:
    """Turn the FP8 and NVFP4 weights of SRC into BF16, exactly: bf16(fp32(w) * fp32(s)).

    Block, per-channel and per-tensor scales of FP8, and NVFP4 in both dialects; MTP layers are kept
    unless dropped by --drop-mtp. A weight that BF16 cannot hold ends the run and is named; with
    --allow-overflow qconvert.json says so.

    \b
    Examples:
      qconvert dequant DeepSeek-V3 DeepSeek-V3-bf16 --dry-run
      qconvert dequant DeepSeek-V3 DeepSeek-V3-bf16 --memory 8GiB
      qconvert dequant Qwen/Qwen3-30B-A3B-FP8 out --print-recipe > mine.yaml
    """
    from qconvert.passes.dequant import Dequant
    from qconvert.passes.drop import Drop
    from qconvert.recipe.recipe import Recipe

    step = Dequant(allow_overflow)
    steps: tuple[Pass, ...] = (Drop(what="mtp"), step) if drop_mtp else (step,)
    convert(Recipe("dequant", steps, options["max_shard_size"]), source, out, options)


def convert(
    recipe: Recipe, source: str | Checkpoint, out: Path | None, options: RunOptions
) -> None:
    """Plan a recipe and, unless it is a dry run, carry it out, telling the user."""
    if options["print_recipe"]:
        say(*recipe.to_yaml().splitlines())
        return
    plan = planned(recipe, source, out, options)
    if plan is None:
        return
    (ready,), verdicts = prepared([plan], run_options(recipe, options), options["base_model"])
    show_plan([(ready, out)], options, verdicts)
    if not options["dry_run"]:
        assert out is not None
        carry_out([(ready, out)], options["as_json"])


def planned(
    recipe: Recipe, source: str | Checkpoint, out: Path | None, options: RunOptions
) -> Plan | None:
    """The recipe's plan, or None where only a dump of it was wanted."""
    from qconvert.checkpoint.checkpoint import Checkpoint
    from qconvert.checkpoint.open import open_source
    from qconvert.plan.plan import Plan, run_passes
    from qconvert.run.workspace import check_apart

    _check_dump(recipe, options["dump_after"])
    checkpoint = (
        source
        if isinstance(source, Checkpoint)
        else open_source(source, follow_links=options["follow_links"])
    )
    if out is not None and not options["dry_run"]:  # a dry run shows the plan first
        check_apart(out, checkpoint)
    start = Plan.identity(checkpoint)
    if options["dump_after"] is not None:
        _dump(_plan_after(start, recipe, options["dump_after"]), options["as_json"])
        return None
    return run_passes(start, recipe.passes)


def _check_dump(recipe: Recipe, wanted: str | None) -> None:
    known = ["source", *(step.name for step in recipe.passes), "end"]
    if wanted is not None and wanted not in known:
        raise click.UsageError(
            f"--dump-after {wanted}: the recipe has no such pass; choose one of {', '.join(known)}"
        )


def prepared(
    plans: Sequence[Plan],
    chosen: Options,
    base_model: str | None,
    *,
    together: bool = True,
    source: Checkpoint | None = None,
) -> tuple[list[Prepared], list[Verdict]]:
    """Plans with their cards, ready to run, and what the header rules say of the folders they lead to.
    Every conversion goes through here. `together`: from one read. `source` is what the plans are of,
    where each has a part of it only. Raises PlanError for a folder that would not validate."""
    from qconvert.hub.card.of_plan import with_card
    from qconvert.run.prepare import prepare_together
    from qconvert.validation.judgement import judged

    carded = [with_card(plan, base_model) for plan in plans]
    groups = [carded] if together else [[plan] for plan in carded]
    ready = [part for group in groups for part in prepare_together(group, chosen)]
    return ready, judged(ready, source or plans[0].checkpoint)


def run_options(recipe: Recipe, options: RunOptions) -> Options:
    from qconvert.run.prepare import Options
    from qconvert.run.shards import DEFAULT_SHARD_BYTES

    shard_size = options["max_shard_size"] or recipe.max_shard_size or DEFAULT_SHARD_BYTES
    return Options(
        options["memory"], options["jobs"], shard_size, options["sha256"], verify=options["verify"]
    )


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
        say_json(listed)
    else:
        say_all(dump(plan))


def _plan_after(start: Plan, recipe: Recipe, wanted: str) -> Plan:
    from qconvert.plan.plan import run_passes

    names = [step.name for step in recipe.passes]
    if wanted == "source":
        return start
    if wanted == "end":
        return run_passes(start, recipe.passes)
    plan = start
    for step in recipe.passes[: names.index(wanted) + 1]:
        plan = step(plan)
    return plan


def show_plan(folders: Folders, options: RunOptions, verdicts: Sequence[Verdict]) -> None:
    """The plan of each folder goes to stdout where it is the result, to stderr where a run follows.
    How fast this machine is gets measured for the first only: the run itself will soon tell. Raises
    OutputError, after that, for a dry run of what the run would refuse."""
    from qconvert.cli.plan_report import Rates, outlook_json, outlook_lines, plan_json, plan_lines
    from qconvert.run.probe import read_rate, write_rate

    if options["as_json"] and not options["dry_run"]:
        return
    looks = outlooks(folders) if options["dry_run"] else [None] * len(folders)
    refused = any(look is not None and look.refusals for look in looks)
    found = []
    for (ready, out), look, verdict in zip(folders, looks, verdicts, strict=True):
        rates = Rates(None, None)
        if options["dry_run"]:
            write = write_rate(out) if out is not None and not refused else None
            rates = Rates(read_rate(ready.plan.checkpoint), write)
        if options["as_json"]:
            found.append({**plan_json(ready, rates, verdict), **outlook_json(look)})
        else:
            lines = plan_lines(ready, None if out is None else str(out), rates, verdict)
            say(*lines, *outlook_lines(look), err=not options["dry_run"])
    if options["as_json"]:
        say_json(found if len(found) > 1 else found[0])
    refuse_foreseen(looks)


def outlooks(folders: Folders) -> Sequence[Outlook | None]:
    """What a run of the plans together would find in their folders, None where none was named."""
    from qconvert.calibrate.backend import backend_for
    from qconvert.run.preview import foreseen

    parts = [(ready, out) for ready, out in folders if out is not None]
    if len(parts) < len(folders):
        return [None] * len(folders)
    return foreseen(parts, backend=backend_for([ready.plan for ready, _ in parts]))


def refuse_foreseen(looks: Sequence[Outlook | None]) -> None:
    """Raise OutputError where any folder would be refused: a dry run ends as the run would."""
    from qconvert.core.errors import OutputError

    refusals = [text for look in looks if look is not None for text in look.refusals]
    if refusals:
        raise OutputError("; ".join(dict.fromkeys(refusals)))


def carry_out(folders: MadeFolders, as_json: bool, quiet: bool = False) -> None:
    """Run what was planned, folders together, and tell the user."""
    import time

    from qconvert.calibrate.backend import backend_for
    from qconvert.cli.progress import Bar
    from qconvert.run.executor import run_together

    begin = time.monotonic()
    backend = backend_for([ready.plan for ready, _ in folders])
    with Bar() as bar:
        receipts = run_together(folders, events=bar, backend=backend)
    seconds = time.monotonic() - begin
    for remark in receipts[0].remarks:
        say(f"remark  {remark}", err=True)
    if quiet:
        return
    if as_json:
        summaries = [
            {
                "out": str(receipt.out), "fingerprint": receipt.fingerprint,
                "files": list(receipt.files), "bytes": receipt.nbytes, "seconds": seconds,
                "remarks": list(receipt.remarks), "already_done": receipt.already_done,
                "resumed_units": receipt.resumed_units, "repaired": dict(receipt.repaired),
            }
            for receipt in receipts
        ]  # fmt: skip
        say_json(summaries if len(summaries) > 1 else summaries[0])
        return
    for receipt in receipts:
        say(_ending(receipt, seconds))


def _ending(receipt: Receipt, seconds: float) -> str:
    from qconvert.core.shown import count, message
    from qconvert.core.sizes import format_size

    if receipt.already_done:
        return f"{receipt.out} already holds this very result; nothing to do"
    if receipt.repaired:
        shown = ", ".join(f"{name} ({why})" for name, why in list(receipt.repaired.items())[:3])
        more = f" and {len(receipt.repaired) - 3} more" if len(receipt.repaired) > 3 else ""
        return message(f"repaired {receipt.out}: {shown}{more}")
    units = count(receipt.resumed_units, "unit")
    resumed = f", {units} from before" if receipt.resumed_units else ""
    return (
        f"wrote {receipt.out}: {format_size(receipt.nbytes)} in {seconds:.1f} s "
        f"({format_size(receipt.nbytes / seconds)}/s){resumed}"
    )
