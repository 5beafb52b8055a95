"""merge, delta, apply: adapters added to a model, what changed between two, and the new from the old."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from qconvert.cli.command import VERBOSITY, Command
from qconvert.cli.convert import CONVERSION, RUNNING, CommandOptions, convert, planned_with
from qconvert.cli.options import JSON, OPENING, OUT, OUT_FOLDER, SOURCE, SOURCE_NAME, from_options
from qconvert.core.say import say, say_json


@click.command(cls=Command)
@click.argument("source", metavar="BASE", type=SOURCE_NAME)
@click.argument("adapters", metavar="ADAPTER...", nargs=-1, required=True, type=SOURCE_NAME)
@OUT
@click.option(
    "--scale", multiple=True, type=float, default=(1.0,), show_default=False, metavar="X",
    help="Multiply what an adapter adds: one number for all, or one for each ADAPTER in turn. "
    "Repeatable. [default: 1]",
)  # fmt: skip
@click.option(
    "--requantize", type=click.Choice(["same", "bf16"]), default="same", show_default=True,
    help="Quantized matrices that change: quantize them in their scheme again, or write the whole model "
    "in BF16.",
)  # fmt: skip
@CONVERSION
def merge(
    source: str,
    adapters: tuple[str, ...],
    out: Path | str,
    scale: tuple[float, ...],
    requantize: Literal["same", "bf16"],
    **given: Any,
) -> None:
    """Add adapters (LoRA) to a model's weights.

    ADAPTER is a folder of peft (LoRA, rsLoRA, DoRA, modules_to_save), or of deltas of weights under
    BASE's names.

    Sums are computed in float32 and rounded once. All other tensors keep their bytes. A target that
    BASE has not, or has in another shape, is refused.

    \b
    Examples:
      qconvert merge Qwen/Qwen3-8B my-lora Qwen3-8B-mine
      qconvert merge Qwen/Qwen3-8B style code out --scale 1 --scale 0.5 --dry-run
      qconvert merge Qwen/Qwen3-30B-A3B-FP8 my-lora out
      qconvert merge Qwen/Qwen3-30B-A3B-FP8 my-lora out --requantize bf16
      qconvert validate out --against Qwen/Qwen3-30B-A3B-FP8 --adapter my-lora --level full
    """
    from qconvert.passes.merge import Merge
    from qconvert.recipe.recipe import Recipe

    options = CommandOptions(**given)
    with from_options():
        step = Merge(adapters, scale, requantize)
    convert(Recipe("merge", (step,), options.max_shard_size), source, out, options)


@click.command(cls=Command)
@click.argument("old", metavar="OLD", type=SOURCE_NAME)
@click.argument("new", metavar="NEW", type=SOURCE_NAME)
@OUT_FOLDER
@OPENING
@JSON
@VERBOSITY
def delta(old: str, new: str, out: Path, follow_links: bool, as_json: bool) -> None:
    """Write what changed between two checkpoints.

    OUT is a folder that turns OLD into NEW: the bytes that changed, in any encoding. A tensor that
    changed in few places is stored as these and their new values, 4 bytes for a BF16 weight; one
    that did not, as its hash. `apply` makes NEW of OLD and OUT, each tensor byte for byte. A run that is
    interrupted begins anew.

    \b
    Examples:
      qconvert delta step-100 step-200 step-200-delta
      qconvert delta ORG/NAME my-fine-tune fine-tune-delta --json
    """
    from qconvert import api
    from qconvert.cli.progress import Bar
    from qconvert.core.shown import count, format_size

    with Bar() as bar:
        made = api.write_delta(old, new, out, follow_links=follow_links, events=bar)
    tensors = len(made.delta.tensors)
    if as_json:
        say_json({
            "out": str(made.out), "tensors": tensors, "changed": made.changed, "bytes": made.nbytes,
            "of_bytes": made.of_bytes,
        })  # fmt: skip
        return
    share = 100 * made.nbytes / max(1, made.of_bytes)
    say(
        f"{out}: {made.changed} of {count(tensors, 'tensor')} changed, {format_size(made.nbytes)} "
        f"({share:.2f} % of NEW)",
        f"next    qconvert apply {old} {out} FOLDER    (to be made)",
    )


@click.command(cls=Command)
@SOURCE
@click.argument("delta", metavar="DELTA", type=SOURCE_NAME)
@OUT
@RUNNING
def apply(source: str, delta: str, out: Path | str, **given: Any) -> None:
    """Write the checkpoint that a delta makes.

    DELTA is a folder of `qconvert delta`; OUT has the bytes that the new checkpoint had in each
    tensor, whatever its files. Each changed part of SRC is compared by hash before and after, and
    each tensor before OUT appears. Either may be on the Hub or in a store: of DELTA and SRC ranges
    are read.

    \b
    Examples:
      qconvert apply step-100 step-200-delta step-200
      qconvert apply ORG/NAME fine-tune-delta out --dry-run
    """
    from qconvert import api

    planned_with(api.plan_patched, source, delta, out, CommandOptions(**given))


# It compares each tensor with its hash itself.
apply.params = [param for param in apply.params if param.name != "validate"]
