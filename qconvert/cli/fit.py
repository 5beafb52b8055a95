"""fit: the best checkpoint under a budget of bytes, and what was measured for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.command import Command
from qconvert.cli.convert import CONVERSION, CommandOptions, convert, show_plan
from qconvert.cli.options import (
    CAPABILITY,
    GPU_MEMORY,
    OUT,
    SIZE,
    SOURCE,
    Count,
    FolderPath,
    from_options,
    made_for,
    option_of,
    options_of,
    rare,
    stacked,
)
from qconvert.cli.progress import Bar
from qconvert.core.say import say, say_json
from qconvert.core.shown import count, format_size
from qconvert.fit import NAMES
from qconvert.samples.request import Calibration, DataSpec

if TYPE_CHECKING:
    from qconvert.api import Fit, Planned
    from qconvert.fit.fitting import Estimate

_SHOWN = 8  # uniform formats in the table
_BUDGET: Callable[[Any], Any] = stacked(
    click.option("--bytes", "nbytes", type=SIZE, help="Budget: the weights' files, such as 60GiB."),
    click.option(
        "--bits", type=click.FloatRange(1, 16), metavar="N",
        help="Budget: bits a weight, of all matrices that can be quantized.",
    ),
    click.option("--gpus", type=Count(), metavar="N", help="GPUs. [a budget, with --gpu-memory]"),
    click.option("--gpu-memory", type=GPU_MEMORY, help="Memory of each GPU. [with --gpus]"),
    click.option(
        "--context", type=Count(), metavar="T",
        help="Tokens of KV cache to leave room for. [with --gpus; default: a quarter of each GPU]",
    ),
)  # fmt: skip


@click.command(cls=Command)
@SOURCE
@OUT
@_BUDGET
@made_for("default: vllm", "sglang", "vllm")
@click.option(
    "--tp",
    type=Count(),
    metavar="N",
    help="Tensor-parallel ranks of the server. [which load what is chosen; default: --gpus, else 1]",
)
@option_of(DataSpec, "data")
@click.option(
    "--rtn", is_flag=True,
    help="Round to nearest; without --data, measure on random token ids, for trials.",
)  # fmt: skip
@option_of(DataSpec, "samples", given=True, default="16")
@option_of(DataSpec, "length", given=True, default="512")
@options_of(DataSpec, "seed", "column", given=True)
@click.option(
    "--formats", "formats", multiple=True, metavar="NAME", type=click.Choice(NAMES),
    help=f"Format to choose from, beside BF16: {', '.join(NAMES)}. Repeatable. [default: all that the "
    "runtime loads]",
)  # fmt: skip
@click.option(
    "--choose-only",
    is_flag=True,
    help="Measure, show what is chosen, and stop: OUT is not written.",
)
@rare(
    "--measured",
    type=FolderPath(),
    metavar="DIR",
    help="Where what is measured is kept. [default: ~/.cache/qconvert/fit]",
)
@rare("--capability", **CAPABILITY)
@option_of(Calibration, "devices", rare=True)
@CONVERSION
def fit(
    source: str,
    out: Path | str,
    nbytes: int | None,
    bits: float | None,
    gpus: int | None,
    gpu_memory: int | None,
    context: int | None,
    consumer: str | None,
    rtn: bool,
    formats: tuple[str, ...],
    choose_only: bool,
    measured: Path | None,
    capability: tuple[int, int],
    devices: tuple[str, ...],
    tp: int | None,
    **given: Any,
) -> None:
    """Choose formats layer by layer, for a budget.

    The mixture with the least KL divergence under so many bytes, that the runtime loads.

    A few samples run through the model, a decoder layer in memory at a time: what each format costs each
    group of matrices that a runtime loads as one. The best choice under the budget is then exact, is run
    as a whole for its own KL, and converted. With --data INT4 codes, and NVFP4 codes of routed experts,
    are those that --gptq finds. What was measured is kept: another budget takes no second measurement.

    \b
    Examples:
      qconvert fit Qwen/Qwen3-30B-A3B out --bits 4.5 --data wiki.txt
      qconvert fit Qwen/Qwen3-30B-A3B out --bytes 18GiB --for sglang --rtn
      qconvert fit DeepSeek-V3 out --gpus 8 --gpu-memory 80GB --context 65536 --data chats.jsonl
      qconvert fit Qwen/Qwen3-30B-A3B out --bits 5 --data wiki.txt --formats fp8 --formats w4a16-g32
      qconvert fit Qwen/Qwen3-30B-A3B out --bits 4.25 --data wiki.txt --choose-only
    """
    from qconvert import api
    from qconvert.recipe.recipe import Recipe

    spec = {name: given.pop(name) for name in ("data", "samples", "length", "seed", "column")}
    options = CommandOptions(**given)
    if not rtn and spec["data"] is None:
        raise click.UsageError("give --data FILE, or --rtn, which runs random token ids")
    with from_options():
        budget = api.Budget(nbytes, bits, gpus, gpu_memory, context)
        checkpoint = api.open_checkpoint(source, follow_links=options.follow_links)
        fitting = api.fitting(
            checkpoint, runtime=consumer or "vllm", formats=formats, rtn=rtn, tp=tp or gpus or 1,
            capability=capability, memory=options.memory, devices=devices,
            loader=options.loader, work_dir=measured, notice=_notice,
            data=spec.pop("data"), **{n: v for n, v in spec.items() if v is not None},
        )  # fmt: skip
    if options.dry_run and fitting.kept() is None:
        _say_estimate(fitting.estimate(), fitting.base, as_json=options.as_json)
        return
    with Bar(" samples") as bar:
        found = fitting.fit(budget, events=bar)
    told = options.as_json and (choose_only or options.dry_run)
    if choose_only:
        if told:
            say_json(found.as_object())
        else:
            say(*lines_of(found))
        return
    if not told and not options.print_recipe:
        say(*lines_of(found), err=not options.dry_run)

    def show(planned: Planned, options: CommandOptions) -> None:
        if told:
            say_json(found.as_object())
        else:
            show_plan(planned, options)

    recipe = Recipe("fit", found.steps, options.max_shard_size)
    convert(recipe, checkpoint, out, options, show=show)


def _notice(text: str) -> None:
    say(f"qconvert: {text}", err=True)


def _say_estimate(found: Estimate, folder: Path, *, as_json: bool) -> None:
    if as_json:
        say_json({"measured": False, **found.as_object()})
        return
    took = (
        f"about {duration(found.reading)} to read and decode weights, and what the GPUs compute"
        if found.seconds is None
        else f"about {duration(found.seconds)} on this CPU"
    )
    say(
        f"to measure: {count(found.forwards, 'run')} of a layer over all samples, "
        f"{found.operations:.3g} operations, {took}; {format_size(found.disk)} of disk in "
        f"{folder} (--measured) meanwhile, for hidden states"
        + (
            f" and codes; before it {count(found.calibrations, 'calibration')}, whose time is not in "
            "this"
            if found.calibrations
            else ""
        ),
        "measure and show the choice with --choose-only, or convert without --dry-run",
    )


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def lines_of(found: Fit) -> Iterator[str]:
    """The choice for people."""
    from qconvert.fit.groups import said

    yield f"fit     {found.budget} for {found.consumer.name}, tp {found.tp}"
    yield (
        f"        {found.bits:.4g} bits a weight, files of {format_size(found.nbytes)}"
        + (f", {format_size(found.rank_bytes)} on the fullest rank" if found.rank_bytes else "")
        + (f", {format_size(found.cache_bytes)} of KV cache" if found.cache_bytes else "")
    )
    yield (
        f"        KL {found.measured:.4g} nats a token over {found.tokens:,} tokens, predicted "
        f"{found.predicted:.4g}; "
        + (
            "no choice within the budget is predicted lower"
            if not found.solution.gap
            else f"another choice may be {found.solution.gap:.2%} lower"
        )
    )
    if found.solved:
        solved = sum(map(len, found.solved.values()))
        yield (
            f"        codes of {count(solved, 'group')} ({', '.join(found.solved)}) are calibrated, for "
            "these figures in each format alone, and anew as the mixture is written"
        )
    for name, groups in found.chosen.items():
        for number, line in enumerate(said(found.model, groups)):
            yield f"  {name if not number else '':<12} {line}"
    yield "  uniform       bits    KL predicted"
    for one in found.uniform[:_SHOWN]:
        yield f"  {one.form:<12} {one.bits:>6.3f}  {one.kl:.4g}"
    for note in found.notes:
        yield f"  note    {note}"
    if found.line:
        yield f"    {found.line}"
