"""plan, run, and what every conversion command shares: options, the shown plan, the run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qconvert.cli import completion
from qconvert.cli.calibration import DATA, DATA_NAMES, calibration_from, flag, split, split_data
from qconvert.cli.carry_out import Started, carry_out
from qconvert.cli.command import (
    VERBOSITY,
    Command,
    columns,
    is_quiet,
    is_verbose,
    without_verbosity,
)
from qconvert.cli.options import (
    DRY_RUN,
    JSON,
    OPENING,
    OUT,
    SOURCE,
    FolderPath,
    from_options,
    options_of,
    stacked,
)
from qconvert.cli.profile import PROFILE, without_profile
from qconvert.core.options import option, options_in
from qconvert.core.say import say, say_all, say_json
from qconvert.run.work.options import PlanOptions, RunOptions

if TYPE_CHECKING:
    from qconvert.api import Planned, Share
    from qconvert.checkpoint.checkpoint import Checkpoint
    from qconvert.plan.plan import Pass, Plan
    from qconvert.recipe.recipe import Recipe
    from qconvert.validation.runner import Level

F = TypeVar("F", bound=Callable[..., Any])
P = TypeVar("P", bound="Planned")


@dataclass(frozen=True)
class CommandOptions(RunOptions):
    """Options that every conversion has: those of its run, and what its command shows."""

    dump_after: str | None = option(
        None, "Print every tensor as it is after PASS (`source`, `end`, or a pass) and stop.",
        kind="pass", metavar="PASS", rare=True, planning=True,
    )  # fmt: skip
    validate: Level | None = option(
        None, "Then check OUT against SRC, as `qconvert validate` does. What was lost is shown by role; "
        "exit code 3 on an error.", choices=("headers", "sample", "full"),
    )  # fmt: skip
    log_json: str | None = option(
        None, "Also add the progress to FILE (- for stderr), a JSON object a line: seconds, phase, "
        "bytes, the part that is done, seconds left, work by kind.",
        kind="log", metavar="FILE", rare=True,
    )  # fmt: skip
    print_recipe: bool = option(False, "Print this command as a YAML recipe and stop.", rare=True)
    as_json: bool = False
    dry_run: bool = False


_NAMES = [field.name for field in fields(CommandOptions)]


def _of_all(*, planning: bool) -> Callable[[F], F]:
    """Options of every command that plans, or of every one that runs as well. OPENING has
    `follow_links`, and a conversion alone a recipe to print."""
    apart = ("follow_links", "print_recipe")
    names = [
        name
        for name, (_, one) in options_in(CommandOptions).items()
        if one.command and one.planning == planning and name not in apart
    ]
    return options_of(CommandOptions, *names)


_PLANNING: Callable[[F], F] = stacked(_of_all(planning=True), OPENING, JSON, VERBOSITY)
RUNNING: Callable[[F], F] = stacked(_PLANNING, _of_all(planning=False), PROFILE, DRY_RUN)
CONVERSION: Callable[[F], F] = stacked(RUNNING, options_of(CommandOptions, "print_recipe"))


def conversion(
    *own: Callable[[Any], Any], group: click.Group | None = None, name: str | None = None
) -> Callable[[Callable[..., Pass | tuple[Pass, ...]]], click.Command]:
    """A command that converts SRC to OUT by the passes that a function makes of the command's `own`
    options: of those that were given or have a default, under the names of the pass's fields, and of
    `asked`, the given fields of a calibration, where --gptq is one. What the function refuses is a usage
    error, since no file is involved."""

    def decorate(function: Callable[..., Pass | tuple[Pass, ...]]) -> click.Command:
        @wraps(function)
        def command(source: str, out: Path | str, **given: Any) -> None:
            from qconvert.passes.kv_scale import KvScale
            from qconvert.recipe.recipe import Recipe

            asked, rest = split(given) if "data" in given else ({}, given)
            options = CommandOptions(**{n: rest.pop(n) for n in _NAMES if n in rest})
            kv_scale, own = rest.pop("kv_scale", None), None
            if kv_scale == "calibrated" and not given.get("gptq"):
                own = {name: asked.pop(name) for name in DATA_NAMES if name in asked}
            calibrate = None if own is None else calibration_from(own, gptq=True)
            if asked and "gptq" not in given:
                raise click.UsageError(f"{flag(next(iter(asked)))} needs --kv-scale calibrated")
            with from_options():
                made = function(**_fields(rest), **({"asked": asked} if "gptq" in given else {}))
                steps = made if isinstance(made, tuple) else (made,)
                if kv_scale is not None:
                    steps = (*steps, KvScale(kv_scale, calibrate))
            recipe = Recipe(function.__name__, steps, options.max_shard_size)
            convert(recipe, source, out, options)

        decorated: Any = stacked(SOURCE, OUT, *own, CONVERSION)(command)
        return (group or click).command(name, cls=Command)(decorated)

    return decorate


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that were given, or have a default, as a pass has them: paths as text."""
    found = {name: value for name, value in given.items() if value is not None and value != ()}
    return {name: str(v) if isinstance(v, Path) else v for name, v in found.items()}


@click.command(cls=Command)
@click.argument("recipe", shell_complete=completion.recipes_or_files)
@SOURCE
@click.argument("out", required=False, type=FolderPath(urls=True))
@_PLANNING
@DATA
def plan(recipe: str, source: str, out: Path | str | None, **given: Any) -> None:
    """Show what a recipe would do, from headers.

    RECIPE is a YAML file, of qconvert or llm-compressor, or a built-in name. With OUT, the time is
    estimated from the write speed of its disk.

    \b
    Examples:
      qconvert plan dequant-fp8 DeepSeek-V3
      qconvert plan dequant-fp8 DeepSeek-V3 /data/out --json
      qconvert plan dequant-fp8 DeepSeek-V3 --dump-after dequant | less
    """
    from qconvert.recipe.recipe import load_recipe

    data, options = split_data({**given, "dry_run": True})
    convert(load_recipe(recipe, data), source, out, options)


@click.command(cls=Command)
@click.argument("recipe", shell_complete=completion.recipes_or_files)
@SOURCE
@OUT
@RUNNING
@DATA
def run(recipe: str, source: str, out: Path | str, **given: Any) -> None:
    """Run a recipe and write a folder.

    After any interruption the same command continues where it stopped. Recipes of llm-compressor
    (GPTQModifier, QuantizationModifier) run unchanged; one that calibrates takes its data from --data.

    \b
    Examples:
      qconvert run dequant-fp8 DeepSeek-V3 DeepSeek-V3-bf16
      qconvert run ./mine.yaml Qwen/Qwen3-30B-A3B-FP8 out --memory 4GiB --jobs 8
      qconvert run ./llm-compressor.yaml Qwen3-30B-A3B out --data chats.jsonl --samples 256
    """
    from qconvert.recipe.recipe import load_recipe

    data, options = split_data(given)
    convert(load_recipe(recipe, data), source, out, options)


@conversion(
    click.option("--drop-mtp", is_flag=True, help="Drop the MTP (draft) layers."),
    click.option(
        "--allow-overflow", is_flag=True,
        help="Write weights that exceed BF16 as infinity, instead of failing.",
    ),
    click.option(
        "--dtype", type=click.Choice(["bf16", "f16", "f32"]), default="bf16", show_default=True,
        help="What weights become: f16 for a model whose other weights are FP16, f32 without rounding.",
    ),
)  # fmt: skip
def dequant(drop_mtp: bool, **fields: Any) -> tuple[Pass, ...]:
    """Dequantize all weights to BF16, F16 or F32.

    Each weight is rounded once: bf16(fp32(w) * fp32(s)).

    Reads FP8 (block, per-channel, per-tensor and MX scales), NVFP4 of both dialects, MXFP4 of
    compressed-tensors, DeepSeek-V4 and gpt-oss, INT4 and INT8 of compressed-tensors, GPTQ's and
    AutoAWQ's forms, torchao's 8-bit classes, GGUF files. MTP layers are kept without --drop-mtp, and
    scales of a KV cache stay. A weight that exceeds BF16 ends the run with its name; with
    --allow-overflow it is noted in qconvert.json.

    \b
    Examples:
      qconvert dequant DeepSeek-V3 DeepSeek-V3-bf16 --dry-run
      qconvert dequant DeepSeek-V3 DeepSeek-V3-bf16 --memory 8GiB
      qconvert dequant Qwen/Qwen3-30B-A3B-FP8 out --print-recipe > mine.yaml
      qconvert dequant Qwen2.5-72B-Instruct-AWQ out --dtype f16
      qconvert dequant Qwen3-8B-Q4_K_M.gguf Qwen3-8B-bf16
    """
    from qconvert.passes.dequant import Dequant
    from qconvert.passes.drop import Drop

    step = Dequant(**fields)
    return (Drop(what="mtp"), step) if drop_mtp else (step,)


def convert(
    recipe: Recipe,
    source: str | Checkpoint,
    out: Path | str | None,
    options: CommandOptions,
    *,
    show: Callable[[Planned, CommandOptions], None] | None = None,
) -> Planned | None:
    """Plan a recipe, show the plan (by `show`, None: as one folder is shown) and, unless it is a dry
    run, carry it out. None if only the recipe or a dump was requested."""
    if options.print_recipe:
        say(*recipe.to_yaml().splitlines())
        return None
    if options.dump_after is not None:
        dump_after(recipe, source, options)
        return None
    from qconvert import api

    if isinstance(source, str):
        _note_folder(source, out)
    return planned_and_run(
        lambda opened, more: api.plan(recipe, opened, out, **more), source, options, recipe.passes,
        show=show,
    )  # fmt: skip


def planned_and_run(
    plan: Callable[[Checkpoint, PlanOptions], P],
    source: str | Checkpoint,
    options: CommandOptions,
    steps: Sequence[Pass] = (),
    *,
    draft: str | None = None,
    show: Callable[[P, CommandOptions], None] | None = None,
) -> P:
    """Open the source, plan, show the plan (by `show`, None: as one folder or a pair is shown) and,
    unless it is a dry run, carry it out. `steps` say whether anything is calibrated; `draft` is what is
    grafted to the source."""
    from qconvert import api

    opened = source
    if isinstance(opened, str):
        opened = api.open_checkpoint(opened, follow_links=options.follow_links)
    with workers_ahead(opened, options), gpu_workers_ahead(steps, options):
        with uncollected():
            planned = plan(opened, plan_options(options))
            (show or show_plan)(planned, options)
        for part in () if options.dry_run else planned.parts:
            carry_out(part, options, opened, draft, part=not planned.together)
    return planned


def planned_with(
    plan: Callable[..., Planned], source: str, other: str, out: Path | str, options: CommandOptions,
    *, draft: str | None = None,
) -> None:  # fmt: skip
    """As `planned_and_run`, by a function of the API that reads another folder beside the source."""
    if options.dump_after is not None:
        raise click.UsageError("--dump-after is not supported with two sources")
    planned_and_run(
        lambda opened, more: plan(opened, other, out, **more), source, options, draft=draft
    )


def _note_folder(source: str, out: Path | str | None) -> None:
    """Say that an OUT is a folder where it looks like the repo that SRC is one of."""
    if not isinstance(out, Path) or out.is_absolute() or len(out.parts) != 2:
        return
    if not out.parent.exists() and not Path(source).exists():
        say(f"note    OUT is the folder {out}; a repo on the Hub is hf://{out}", err=True)


@contextmanager
def uncollected() -> Iterator[None]:
    """Within this no cycles are looked for, and afterwards none in what was made. A plan has none, and
    looking for them among Kimi-K2's 6 million objects took 3 of 21 CPU s."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was:
            gc.enable()


def workers_ahead(source: Checkpoint, options: CommandOptions) -> AbstractContextManager[None]:
    """Within this, what workers import is imported while the plan is made."""
    from qconvert.checkpoint.checkpoint import imports_of
    from qconvert.run.work.forkserver import started_early

    return (
        nullcontext()
        if options.dry_run or options.jobs == 1 or options.engine != "local"
        else started_early(source.nbytes, options.memory, imports_of(source.shards))
    )


def gpu_workers_ahead(
    steps: Sequence[Pass], options: CommandOptions
) -> AbstractContextManager[None]:
    """Within this, processes of GPUs that calibrate import what they need while the plan is made."""
    asked = [one for step in steps if (one := getattr(step, "calibrate", None)) is not None]
    if options.dry_run or not asked:
        return nullcontext()
    from qconvert.calibrate.gpu_workers import started_for

    return started_for(asked[0])


def plan_options(options: CommandOptions) -> PlanOptions:
    """The options for planning. A dry run shows the plan before it refuses."""
    from qconvert.run.engines.shard import without_option

    started = Started.now()
    words: Sequence[str] = without_profile(started.words)
    for name in ("--until", "--log-json", "--loader"):  # of this start alone
        words = without_option(words, name)
    return {
        **options.keywords(), "for_run": not options.dry_run,
        "finish": started.finishing is not None, "command": tuple(without_verbosity(words)),
    }  # fmt: skip


def dump_after(recipe: Recipe, source: str | Checkpoint, options: CommandOptions) -> None:
    """Print every tensor with its expression, as it is after a pass."""
    from qconvert import api
    from qconvert.cli.plan_report import dump, expression

    wanted, follow = str(options.dump_after), options.follow_links
    plan: Plan = api.plan_after(recipe, source, wanted, follow_links=follow)
    if options.as_json:
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


def show_plan(planned: Planned, options: CommandOptions) -> None:
    """Print the plan of each folder: to stdout in a dry run, to stderr before a run. A dry run also
    measures the speed of this machine, and raises OutputError, after printing, where the run would
    refuse."""
    from qconvert.api import check_dry_run
    from qconvert.cli.plan_report import Rates, dry_run_json, dry_run_lines, plan_json, plan_lines
    from qconvert.run.work.estimate import read_rate, write_rate

    dry = options.dry_run
    if options.as_json and not dry:
        return
    looks = planned.dry_run() if dry else ()
    refused = any(look.refusals for look in looks)
    found = []
    for folder, look in zip(planned.folders, looks or [None] * len(planned.folders), strict=True):
        out, rates = folder.out, Rates(None, None)
        if dry:
            write = write_rate(out) if out is not None and not refused else None
            rates = Rates(read_rate(planned.source), write)
        if options.as_json:
            report = plan_json(folder.ready, rates, folder.verdict)
            found.append({**report, **dry_run_json(look)})
        else:
            lines = plan_lines(
                folder.ready,
                folder.name,
                rates,
                folder.verdict,
                every=is_verbose(),
                columns=columns(sys.stdout if dry else sys.stderr),
            )
            if is_quiet() and not dry:
                lines = [line for line in lines if line.startswith("warning ")]
            say(*lines, *dry_run_lines(look), err=not dry)
    for share in planned.shares:
        if options.as_json:
            found[0]["share"] = asdict(share)
        elif dry or not is_quiet():
            say(share_line(share), err=not dry)
    if options.as_json:
        say_json(found if len(found) > 1 else found[0])
    check_dry_run(looks)


def share_line(share: Share) -> str:
    """Return what a shard does, in a line of the plan."""
    from qconvert.core.shown import count, format_size

    rest = ""
    if share.rest_units:
        units = count(share.rest_units, "unit")
        rest = f"; {units} ({format_size(share.rest_bytes)}) between shards are left to finish"
    uneven = ""
    if share.most > 2 * max(share.least, 1):
        sizes = f"{format_size(share.least)} to {format_size(share.most)}"
        uneven = f"; shares are uneven, {sizes}: the units are large for so many shards"
    return (
        f"shard   {share.shard}: {share.units} of {count(share.of_units, 'unit')}, "
        f"{format_size(share.nbytes)} to write{rest}{uneven}"
    )
