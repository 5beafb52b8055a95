"""fuse, unfuse, experts, relabel, prepare, mtp, text: the same weights in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.command import Command
from qconvert.cli.convert import (
    CONVERSION,
    RUNNING,
    CommandOptions,
    conversion,
    convert,
    planned_and_run,
)
from qconvert.cli.options import (
    DIALECT_HELP,
    INPUT_SCALE,
    OUT,
    SOURCE,
    SOURCE_GROUPS,
    SOURCE_NAME,
    Count,
    made_for,
)

if TYPE_CHECKING:
    from qconvert.plan.plan import Pass


# --- relabel --------------------------------------------------------------------------------------


@conversion(
    click.option(
        "--to", required=True,
        type=click.Choice(
            ["compressed-tensors", "gptq", "gptq-v2", "awq", "modelopt", "fp8", "nvfp4"]
        ),
        help="The form to write.",
    ),
    click.option(
        "--dialect", type=click.Choice(["compressed-tensors", "modelopt"]), help=DIALECT_HELP,
    ),
    INPUT_SCALE,
    click.option(
        "--nearest", is_flag=True,
        help="Between NVFP4's dialects: take the nearest float32 where a global scale has no exact "
        "reciprocal (2^-23 of it at most); otherwise such a scale ends the run.",
    ),
)  # fmt: skip
def relabel(**fields: Any) -> Pass:
    """Write the quantized weights of SRC in another form, without rounding a number.

    Codes stay the numbers that they are: AutoAWQ's, AutoRound's and GPTQ's become compressed-tensors', a
    group for each scheme, and those of 4 bits AutoAWQ's; GPTQ's two versions become each other. NVFP4
    goes between the dialects of modelopt and compressed-tensors, block FP8 between the names of DeepSeek
    and of compressed-tensors, and MXFP4 becomes block FP8 (--to fp8) or NVFP4 (--to nvfp4; beside FP8
    layers, as in DeepSeek-V4, runtimes need --input-scale then). What the other form cannot hold ends
    the run, with the tensor's name.

    \b
    Examples:
      qconvert relabel Qwen2.5-72B-Instruct-AWQ out --to compressed-tensors
      qconvert relabel Qwen3-30B-A3B-GPTQ-Int4 out --to gptq-v2 --dry-run
      qconvert relabel DeepSeek-V4-Flash out --to fp8
      qconvert relabel DeepSeek-V4-Flash out --to nvfp4 --dialect modelopt --input-scale 1.0
      qconvert relabel Qwen3-235B-A22B-NVFP4 out --to compressed-tensors --nearest
    """
    from qconvert.passes.relabel import Relabel

    if (fields["to"] == "nvfp4") != ("dialect" in fields):
        raise click.UsageError("--to nvfp4 and --dialect go together: give both, or neither")
    if "input_scale" in fields and fields["to"] != "nvfp4":
        raise click.UsageError("--input-scale is written with --to nvfp4 only: omit it")
    return Relabel(**fields)


# --- prepare and unprepare ------------------------------------------------------------------------


@click.group()
def prepare() -> None:
    """Experimental: do once what a runtime does to the weights at every load.

    \b
    Example:
      qconvert prepare trtllm-gen DeepSeek-R1-FP4 DeepSeek-R1-FP4-prepared
    """


@conversion(group=prepare, name="trtllm-gen")
def trtllm_gen() -> Pass:
    """Experimental: NVFP4 experts in the layout of TensorRT-LLM's MoE kernels.

    sglang runs these in its flashinfer_trtllm backend. The same bytes in another order, for every
    tensor-parallel size that divides them. A stock server refuses the folder, by design;
    OUT/PREPARED.md says how to serve it. The kernels have not been run on such a folder yet.

    \b
    Examples:
      qconvert prepare trtllm-gen DeepSeek-R1-FP4 out --dry-run
      qconvert prepare trtllm-gen DeepSeek-R1-FP4 out
    """
    from qconvert.contrib.trtllm_gen.prepare import Prepare

    return Prepare()


@conversion()
def unprepare() -> Pass:
    """Experimental: restore, byte for byte, the tensors that `qconvert prepare` read.

    \b
    Example:
      qconvert unprepare DeepSeek-R1-FP4-prepared DeepSeek-R1-FP4
    """
    from qconvert.contrib.trtllm_gen.unprepare import Unprepare

    return Unprepare()


# --- mtp, text ------------------------------------------------------------------------------------


@click.group()
def mtp() -> None:
    """Draft (MTP) layers: as a folder of their own, put into a model, or left out.

    \b
    Examples:
      qconvert mtp extract DeepSeek-V3 DeepSeek-V3-draft
      qconvert mtp graft Qwen3.5-w4a16 Qwen/Qwen3.5-35B-A3B out
      qconvert mtp drop Qwen/Qwen3.5-35B-A3B out
    """


@conversion(group=mtp)
def extract() -> Pass:
    """Write a folder of the draft layers of SRC, with embeddings and head where they have none.

    sglang takes it as --speculative-draft-model-path, vLLM as the model of --speculative-config. Names
    and config.json are those of SRC: runtimes look for the draft's layer behind the model's last.

    \b
    Examples:
      qconvert mtp extract DeepSeek-V3 DeepSeek-V3-draft
      qconvert mtp extract Qwen/Qwen3.5-35B-A3B-FP8 draft --dry-run
    """
    from qconvert.passes.drafts import ExtractDraft

    return ExtractDraft()


@conversion(group=mtp)
def drop() -> Pass:
    """Write SRC without its draft layers; config.json counts none.

    \b
    Example:
      qconvert mtp drop Qwen/Qwen3.5-35B-A3B out
    """
    from qconvert.passes.drop import Drop

    return Drop(what="mtp")


@mtp.command(cls=Command)
@SOURCE
@click.argument("draft", metavar="DRAFT", type=SOURCE_NAME)
@OUT
@RUNNING
def graft(source: str, draft: str, out: Path | str, **given: Any) -> None:
    """Write SRC, which has no draft layers, with those of DRAFT: of the original model, or of a folder
    that `mtp extract` made.

    Refused where names, sizes or encodings do not fit. Layers that are not quantized in a model that is
    are added to config.json's list of such modules.

    \b
    Examples:
      qconvert mtp graft Qwen3.5-w4a16 Qwen/Qwen3.5-35B-A3B out
      qconvert mtp graft DeepSeek-V3-without DeepSeek-V3-draft out --dry-run
      qconvert validate out --against Qwen3.5-w4a16 --draft Qwen/Qwen3.5-35B-A3B --level full
    """
    from qconvert import api

    options = CommandOptions(**given)
    if options.dump_after is not None:
        raise click.UsageError("--dump-after is not supported with two sources; see `mtp extract`")
    planned_and_run(
        lambda opened, more: api.plan_graft(opened, draft, out, **more),
        source,
        options,
        draft=draft,
    )


@conversion()
def text() -> Pass:
    """Write the text model of a multi-modal SRC under its own class: without towers, renamed, with a
    flat config.json.

    The class is the one that transformers has for SRC's text_config; where it has none, SRC is refused.
    Draft layers are kept.

    \b
    Examples:
      qconvert text Qwen/Qwen3.5-35B-A3B out
      qconvert text google/gemma-3-27b-it gemma-3-27b-text --dry-run
    """
    from qconvert.passes.text_only import TextOnly

    return TextOnly()


# --- Steps that make one model class of another ---------------------------------------------------


def steps_for(step: Pass, consumer: str | None, family: str) -> tuple[Pass, ...]:
    """The step, and those that make the consumer's model class of a source of that family. Raises
    PlanError for an unknown consumer."""
    from qconvert.passes.as_class import AsClass
    from qconvert.passes.experts import Unstack
    from qconvert.runtimes.consumers import parse_consumer

    name = None if consumer is None else parse_consumer(consumer).name
    if name == "qwen3-next" and family == "qwen3_5":
        return Unstack(optional=True), step, AsClass("qwen3_next")
    if name == "qwen3.5" and family == "qwen3_next":
        return step, AsClass("qwen3_5_text")
    return (step,)


def _convert_for(
    step: Pass, consumer: str | None, source: str, out: Path | str, options: CommandOptions
) -> None:
    """Convert with the steps that the source's family needs."""
    from qconvert.api import open_checkpoint
    from qconvert.recipe.recipe import Recipe

    checkpoint = open_checkpoint(source, follow_links=options.follow_links)
    steps = steps_for(step, consumer, checkpoint.family.name)
    convert(Recipe(step.name, steps, options.max_shard_size), checkpoint, out, options)


@click.command(cls=Command)
@SOURCE
@OUT
@made_for("sglang, vllm, transformers; qwen3-next: a model class")
@click.option(
    "--groups", type=Count(), metavar="N",
    help="Number of groups in which rows are ordered, for your own loader.",
)  # fmt: skip
@SOURCE_GROUPS
@click.option(
    "--what", type=click.Choice(["gdn", "gate_up", "qkv"]), default="gdn", show_default=True,
    help="Projections to fuse.",
)  # fmt: skip
@CONVERSION
def fuse(
    source: str,
    out: Path | str,
    consumer: str | None,
    groups: int | None,
    source_groups: int | None,
    what: str,
    **given: Any,
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
    from qconvert.passes.fuse import Fuse

    if consumer is None and groups is None:
        raise click.UsageError("name the consumer, --for NAME, or the number of groups, --groups N")
    step = Fuse(consumer, groups, source_groups, what)  # type: ignore[arg-type]
    _convert_for(step, consumer, source, out, CommandOptions(**given))


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
    **given: Any,
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
    from qconvert.passes.fuse import Unfuse

    options = CommandOptions(**given)
    _convert_for(Unfuse(source_groups, consumer), consumer, source, out, options)


@click.group()
def experts() -> None:
    """Routed experts as 3-D stacks, or one matrix per expert.

    \b
    Examples:
      qconvert experts unstack Qwen/Qwen3.5-35B-A3B out
      qconvert experts stack Qwen/Qwen3.5-35B-A3B-FP8 out
    """


@conversion(group=experts)
def stack() -> Pass:
    """Stack one matrix per expert to [E, 2I, H] and [E, H, I].

    \b
    Example:
      qconvert experts stack Qwen/Qwen3.5-35B-A3B-FP8 out
    """
    from qconvert.passes.experts import Stack

    return Stack()


@conversion(group=experts)
def unstack() -> Pass:
    """Split stacks [E, 2I, H] and [E, H, I] to one matrix per expert, without reading a whole stack.

    \b
    Example:
      qconvert experts unstack Qwen/Qwen3.5-35B-A3B out
    """
    from qconvert.passes.experts import Unstack

    return Unstack()
