"""fuse, unfuse, experts: the same weights in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click

from qconvert.cli.command import Command
from qconvert.cli.consumer import made_for
from qconvert.cli.convert import CONVERSION, RunOptions, convert
from qconvert.cli.options import OUT, SOURCE, SOURCE_GROUPS, Count


@click.command(cls=Command)
@SOURCE
@OUT
@made_for("sglang, vllm, transformers; qwen3-next: a model class")
@click.option(
    "--groups",
    type=Count(),
    metavar="N",
    help="Number of groups in which rows are ordered, for your own loader.",
)
@SOURCE_GROUPS
@click.option(
    "--what",
    type=click.Choice(["gdn", "gate_up", "qkv"]),
    default="gdn",
    show_default=True,
    help="Projections to fuse.",
)
@CONVERSION
def fuse(
    source: str,
    out: Path | str,
    consumer: str | None,
    groups: int | None,
    source_groups: int | None,
    what: str,
    **options: Unpack[RunOptions],
) -> None:
    """Fuse Gated DeltaNet projections (Qwen3.5, Qwen3-Next) in the row order that a consumer expects.

    Fusing saves sglang and vLLM work at load and makes each projection one range of a file; inference
    is not faster. FP8 stays FP8: block scales move with their rows, or the plan is refused.
    `--for qwen3-next` on a Qwen3.5 source converts the model class, text only.

    \b
    Examples:
      qconvert fuse Qwen/Qwen3.5-35B-A3B-FP8 out --for sglang
      qconvert fuse Qwen/Qwen3.5-35B-A3B out --for qwen3-next --dry-run
      qconvert fuse my-model out --groups 4
    """
    from qconvert.api import open_checkpoint
    from qconvert.passes.fuse import Fuse
    from qconvert.recipe.model_class import steps_for
    from qconvert.recipe.recipe import Recipe

    if consumer is None and groups is None:
        raise click.UsageError("name the consumer, --for NAME, or the number of groups, --groups N")
    step = Fuse(consumer, groups, source_groups, what)  # type: ignore[arg-type]
    checkpoint = open_checkpoint(source, follow_links=options["follow_links"])
    steps = steps_for(step, consumer, checkpoint.family.name)
    convert(Recipe("fuse", steps, options["max_shard_size"]), checkpoint, out, options)


@click.command(cls=Command)
@SOURCE
@OUT
@made_for("sglang, vllm, transformers; qwen3.5: a model class")
@SOURCE_GROUPS
@CONVERSION
def unfuse(
    source: str,
    out: Path | str,
    consumer: str | None,
    source_groups: int | None,
    **options: Unpack[RunOptions],
) -> None:
    """Split fused Gated DeltaNet projections, as vLLM and transformers expect them for Qwen3.5.

    The source's row order is read from its qconvert.json, its family, or --source-groups. No loader of
    Qwen3-Next takes split projections: `--for qwen3.5` converts the model class as well.

    \b
    Examples:
      qconvert unfuse fused-for-sglang out
      qconvert unfuse fused-for-sglang out --for vllm
      qconvert unfuse Qwen/Qwen3-Next-80B-A3B-Instruct out --for qwen3.5
    """
    from qconvert.api import open_checkpoint
    from qconvert.passes.fuse import Unfuse
    from qconvert.recipe.model_class import steps_for
    from qconvert.recipe.recipe import Recipe

    checkpoint = open_checkpoint(source, follow_links=options["follow_links"])
    steps = steps_for(Unfuse(source_groups, consumer), consumer, checkpoint.family.name)
    convert(Recipe("unfuse", steps, options["max_shard_size"]), checkpoint, out, options)


@click.group()
def experts() -> None:
    """Routed experts as 3-D stacks, or one matrix per expert.

    \b
    Examples:
      qconvert experts unstack Qwen/Qwen3.5-35B-A3B out
      qconvert experts stack Qwen/Qwen3.5-35B-A3B-FP8 out
    """


@experts.command(cls=Command)
@SOURCE
@OUT
@CONVERSION
def stack(source: str, out: Path | str, **options: Unpack[RunOptions]) -> None:
    """Stack one matrix per expert to [E, 2I, H] and [E, H, I].

    \b
    Example:
      qconvert experts stack Qwen/Qwen3.5-35B-A3B-FP8 out
    """
    from qconvert.passes.experts import Stack
    from qconvert.recipe.recipe import Recipe

    convert(Recipe("stack", (Stack(),), options["max_shard_size"]), source, out, options)


@experts.command(cls=Command)
@SOURCE
@OUT
@CONVERSION
def unstack(source: str, out: Path | str, **options: Unpack[RunOptions]) -> None:
    """Split stacks [E, 2I, H] and [E, H, I] to one matrix per expert, without reading a whole stack.

    \b
    Example:
      qconvert experts unstack Qwen/Qwen3.5-35B-A3B out
    """
    from qconvert.passes.experts import Unstack
    from qconvert.recipe.recipe import Recipe

    convert(Recipe("unstack", (Unstack(),), options["max_shard_size"]), source, out, options)
