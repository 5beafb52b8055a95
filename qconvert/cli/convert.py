"""plan, run, and what every conversion command shares: options, the shown plan, the run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, cast

import click

from qconvert.cli import completion
from qconvert.cli.calibration import DATA, split_data
from qconvert.cli.carry_out import Started, carry_out
from qconvert.cli.command import Command
from qconvert.cli.options import (
    DISK_BUDGET,
    DRY_RUN,
    JSON,
    LOG_JSON,
    OPENING,
    OUT,
    PRIVATE,
    SHARD,
    SOURCE,
    UNTIL,
    WORK_FOLDER,
    Address,
    OutName,
    PassName,
    Size,
    base_model,
    jobs,
    memory,
    stacked,
)
from qconvert.cli.profile import PROFILE, without_profile
from qconvert.cli.verbosity import VERBOSITY, columns, is_quiet, is_verbose, without_verbosity
from qconvert.core.extras import pip_line
from qconvert.core.say import say, say_all, say_json

if TYPE_CHECKING:
    from qconvert.api import Planned, PlanOptions, Share
    from qconvert.checkpoint.checkpoint import Checkpoint
    from qconvert.plan.plan import Pass, Plan
    from qconvert.recipe.recipe import Recipe
    from qconvert.run.cluster import EngineName
    from qconvert.validation.runner import Level

F = TypeVar("F", bound=Callable[..., Any])


class RunOptions(TypedDict):
    """Options that every conversion has."""

    memory: int | None
    jobs: int | None
    max_shard_size: int | None
    sha256: bool
    verify: bool
    validate: Level | None
    shard: str | None
    engine: EngineName
    address: str | None
    until: str | None
    log_json: str | None
    work_dir: Path | None
    disk_budget: int | None
    private: bool
    dry_run: bool
    print_recipe: bool
    dump_after: str | None
    base_model: str | None
    as_json: bool
    follow_links: bool


def _engine_checked(function: F) -> F:
    """Options of an engine that exclude one another are refused before a file is opened."""

    @wraps(function)
    def checked(*words: Any, **given: Any) -> Any:
        from qconvert.run.cluster import check_engine

        check_engine(given["engine"], given["address"], given["shard"])
        return function(*words, **given)

    return cast(F, checked)


_PLANNING: Callable[[F], F] = stacked(
    memory("1 GiB, or what all cores need; at most half of what is free"),
    jobs("as many cores as pay"),
    click.option(
        "--max-shard-size", type=Size(), metavar="SIZE", help="Largest output file. [default: 5GB]"
    ),
    click.option(
        "--dump-after", metavar="PASS", type=PassName(),
        help="Print every tensor as it is after PASS (`source`, `end`, or a pass) and stop.",
    ),
    base_model("what the source names"),
    OPENING,
    JSON,
    VERBOSITY,
)  # fmt: skip
RUNNING: Callable[[F], F] = stacked(
    _PLANNING,
    click.option("--sha256", is_flag=True, help="Also write each file's sha256 to the receipt."),
    click.option(
        "--verify",
        is_flag=True,
        help="Hash everything that an earlier run left in OUT before continuing it. "
        "[default: sizes, headers, small files, and what was written last]",
    ),
    click.option(
        "--validate",
        type=click.Choice(["headers", "sample", "full"]),
        help="Then check OUT against SRC, as `qconvert validate` does. What was lost is shown by role; "
        "exit code 3 on an error.",
    ),
    SHARD,
    UNTIL,
    LOG_JSON,
    click.option(
        "--engine",
        type=click.Choice(["local", "ray"]),
        default="local",
        show_default=True,
        help="Where the work is done: by processes of this machine, or on the nodes of a Ray cluster. "
        "All must see SRC and OUT under the same paths (a shared file system); --memory is what each "
        "machine gives, --jobs the workers of all nodes. "
        f"[ray: {pip_line('ray')}]",
    ),
    click.option(
        "--address",
        type=Address(),
        metavar="HOST:PORT",
        help="The head of the Ray cluster; `local` starts one of this machine alone. [with --engine "
        "ray; default: RAY_ADDRESS, or the cluster that this machine belongs to]",
    ),
    WORK_FOLDER,
    DISK_BUDGET,
    PRIVATE,
    PROFILE,
    DRY_RUN,
    _engine_checked,
)
CONVERSION: Callable[[F], F] = stacked(
    RUNNING,
    click.option(
        "--print-recipe", is_flag=True, help="Print this command as a YAML recipe and stop."
    ),
)


@click.command(cls=Command)
@click.argument("recipe", shell_complete=completion.recipes_or_files)
@SOURCE
@click.argument("out", required=False, type=OutName())
@_PLANNING
@DISK_BUDGET
@DATA
def plan(
    recipe: str, source: str, out: Path | str | None, disk_budget: int | None, **given: Any
) -> None:
    """Show the plan of RECIPE for SRC, from its headers alone.

    RECIPE is a YAML file, of qconvert or llm-compressor, or a built-in name. With OUT, the time is
    estimated from the write speed of its disk.

    \b
    Examples:
      qconvert plan dequant-fp8 DeepSeek-V3
      qconvert plan dequant-fp8 DeepSeek-V3 /data/out --json
      qconvert plan dequant-fp8 DeepSeek-V3 --dump-after dequant | less
    """
    from qconvert.recipe.recipe import load_recipe

    data, rest = split_data(given)
    running = {"sha256": False, "verify": False, "validate": None, "shard": None, "dry_run": True}
    here = {"engine": "local", "address": None, "print_recipe": False, "work_dir": None}
    here |= {"until": None, "log_json": None, "disk_budget": None, "private": False}
    options = cast(RunOptions, {**rest, **running, **here})
    options["disk_budget"] = disk_budget
    convert(load_recipe(recipe, data), source, out, options)


@click.command(cls=Command)
@click.argument("recipe", shell_complete=completion.recipes_or_files)
@SOURCE
@OUT
@RUNNING
@DATA
def run(recipe: str, source: str, out: Path | str, **given: Any) -> None:
    """Run RECIPE on SRC and write the folder OUT.

    After any interruption the same command continues where it stopped. Recipes of llm-compressor
    (GPTQModifier, QuantizationModifier) run unchanged; one that calibrates takes its data from --data.

    \b
    Examples:
      qconvert run dequant-fp8 DeepSeek-V3 DeepSeek-V3-bf16
      qconvert run ./mine.yaml Qwen/Qwen3-30B-A3B-FP8 out --memory 4GiB --jobs 8
      qconvert run ./llm-compressor.yaml Qwen3-30B-A3B out --data chats.jsonl --samples 256
    """
    from qconvert.recipe.recipe import load_recipe

    data, rest = split_data(given)
    options = cast(RunOptions, {**rest, "print_recipe": False})  # it is a recipe already
    convert(load_recipe(recipe, data), source, out, options)


@click.command(cls=Command)
@SOURCE
@OUT
@click.option("--drop-mtp", is_flag=True, help="Drop the MTP (draft) layers.")
@click.option(
    "--allow-overflow",
    is_flag=True,
    help="Write weights that exceed BF16 as infinity, instead of failing.",
)
@click.option(
    "--dtype", type=click.Choice(["bf16", "f16", "f32"]), default="bf16", show_default=True,
    help="What weights become: f16 for a model whose other weights are FP16, f32 without rounding.",
)  # fmt: skip
@CONVERSION
def dequant(
    source: str,
    out: Path | str,
    drop_mtp: bool,
    allow_overflow: bool,
    dtype: Literal["bf16", "f16", "f32"],
    **options: Unpack[RunOptions],
) -> None:
    """Dequantize all weights of SRC to BF16, each rounded once: bf16(fp32(w) * fp32(s)).

    Reads FP8 (block, per-channel, per-tensor and MX scales), NVFP4 of both dialects, MXFP4 of
    compressed-tensors, DeepSeek-V4 and gpt-oss, INT4 and INT8 of compressed-tensors, GPTQ's and
    AutoAWQ's forms. MTP layers are kept without --drop-mtp, and scales of a KV cache stay. A weight that
    exceeds BF16 ends the run with its name; with --allow-overflow it is noted in qconvert.json.

    \b
    Examples:
      qconvert dequant DeepSeek-V3 DeepSeek-V3-bf16 --dry-run
      qconvert dequant DeepSeek-V3 DeepSeek-V3-bf16 --memory 8GiB
      qconvert dequant Qwen/Qwen3-30B-A3B-FP8 out --print-recipe > mine.yaml
      qconvert dequant Qwen2.5-72B-Instruct-AWQ out --dtype f16
    """
    from qconvert.passes.dequant import Dequant
    from qconvert.passes.drop import Drop
    from qconvert.recipe.recipe import Recipe

    step = Dequant(allow_overflow, dtype)
    steps: tuple[Pass, ...] = (Drop(what="mtp"), step) if drop_mtp else (step,)
    convert(Recipe("dequant", steps, options["max_shard_size"]), source, out, options)


def with_kv_scale(step: Pass, value: float | None) -> tuple[Pass, ...]:
    """A conversion's steps with --kv-scale."""
    from qconvert.passes.kv_scale import KvScale

    return (step,) if value is None else (step, KvScale(value))


def convert(
    recipe: Recipe, source: str | Checkpoint, out: Path | str | None, options: RunOptions
) -> Planned | None:
    """Plan a recipe, show the plan and, unless it is a dry run, carry it out. None if only the recipe or
    a dump was requested."""
    if options["print_recipe"]:
        say(*recipe.to_yaml().splitlines())
        return None
    if options["dump_after"] is not None:
        dump_after(recipe, source, options)
        return None
    from qconvert import api

    if isinstance(source, str):
        _note_folder(source, out)
        source = api.open_checkpoint(source, follow_links=options["follow_links"])
    with workers_ahead(source, options), gpu_workers_ahead(recipe.passes, options):
        with uncollected():
            planned = api.plan(recipe, source, out, **plan_options(options))
            show_plan(planned, options)
        if not options["dry_run"]:
            carry_out(planned, options, source)
    return planned


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


def workers_ahead(source: Checkpoint, options: RunOptions) -> AbstractContextManager[None]:
    """Within this, what workers import is imported while the plan is made."""
    from qconvert.checkpoint.checkpoint import imports_of
    from qconvert.run.forkserver import started_early

    return (
        nullcontext()
        if options["dry_run"] or options["jobs"] == 1 or options["engine"] != "local"
        else started_early(source.nbytes, options["memory"], imports_of(source.shards))
    )


def gpu_workers_ahead(steps: Sequence[Pass], options: RunOptions) -> AbstractContextManager[None]:
    """Within this, processes of GPUs that calibrate import what they need while the plan is made."""
    asked = [one for step in steps if (one := getattr(step, "calibrate", None)) is not None]
    if options["dry_run"] or not asked:
        return nullcontext()
    from qconvert.calibrate.gpu_workers import started_for

    return started_for(asked[0])


def plan_options(options: RunOptions) -> PlanOptions:
    """The options for planning. A dry run shows the plan before it refuses."""
    from qconvert.core.command_line import without_option
    from qconvert.run.until import Until

    started = Started.now()
    words: Sequence[str] = without_profile(started.words)
    for option in ("--until", "--log-json"):  # of this start alone
        words = without_option(words, option)
    words = without_verbosity(words)
    return {
        "memory": options["memory"], "jobs": options["jobs"],
        "max_shard_size": options["max_shard_size"], "sha256": options["sha256"],
        "verify": options["verify"], "base_model": options["base_model"],
        "follow_links": options["follow_links"], "for_run": not options["dry_run"],
        "shard": options["shard"], "finish": started.finishing is not None,
        "command": tuple(words),
        "engine": options["engine"], "until": Until.of(options["until"]),
        "address": options["address"], "work_dir": options["work_dir"],
        "disk_budget": options["disk_budget"], "private": options["private"],
    }  # fmt: skip


def dump_after(recipe: Recipe, source: str | Checkpoint, options: RunOptions) -> None:
    """Print every tensor with its expression, as it is after a pass."""
    from qconvert import api
    from qconvert.cli.plan_report import dump, expression

    wanted, follow = str(options["dump_after"]), options["follow_links"]
    plan: Plan = api.plan_after(recipe, source, wanted, follow_links=follow)
    if options["as_json"]:
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


def show_plan(planned: Planned, options: RunOptions) -> None:
    """Print the plan of each folder: to stdout in a dry run, to stderr before a run. A dry run also
    measures the speed of this machine, and raises OutputError, after printing, where the run would
    refuse."""
    from qconvert.api import check_foreseen
    from qconvert.cli.plan_report import Rates, outlook_json, outlook_lines, plan_json, plan_lines
    from qconvert.run.probe import read_rate, write_rate

    dry = options["dry_run"]
    if options["as_json"] and not dry:
        return
    looks = planned.foreseen() if dry else ()
    refused = any(look.refusals for look in looks)
    found = []
    for folder, look in zip(planned.folders, looks or [None] * len(planned.folders), strict=True):
        out, rates = folder.out, Rates(None, None)
        if dry:
            write = write_rate(out) if out is not None and not refused else None
            rates = Rates(read_rate(planned.source), write)
        if options["as_json"]:
            report = plan_json(folder.ready, rates, folder.verdict)
            found.append({**report, **outlook_json(look)})
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
            say(*lines, *outlook_lines(look), err=not dry)
    for share in planned.shares:
        if options["as_json"]:
            found[0]["share"] = asdict(share)
        elif dry or not is_quiet():
            say(share_line(share), err=not dry)
    if options["as_json"]:
        say_json(found if len(found) > 1 else found[0])
    check_foreseen(looks)


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
