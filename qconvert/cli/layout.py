"""fuse, unfuse, experts, prune, relabel, prepare, mtp, text: the same weights in another layout."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.calibration import calibration_from, split
from qconvert.cli.command import VERBOSITY, Command, is_quiet
from qconvert.cli.convert import (
    CONVERSION,
    RUNNING,
    CommandOptions,
    conversion,
    convert,
    planned_with,
)
from qconvert.cli.options import (
    INPUT_SCALE,
    NVFP4_DIALECT,
    OPENING,
    OUT,
    REPO_ID,
    SOURCE,
    SOURCE_GROUPS,
    SOURCE_NAME,
    STATS,
    Count,
    File,
    FolderPath,
    made_for,
    option_of,
    options_of,
)
from qconvert.cli.progress import Bar
from qconvert.core.say import say
from qconvert.samples.request import Calibration
from qconvert.validation.options import ValidateOptions

if TYPE_CHECKING:
    from qconvert.plan.plan import Pass


# --- relabel --------------------------------------------------------------------------------------


_OF_DRAFTS = ("to", "verifier", "tokens")


@conversion(
    click.option(
        "--to", required=True,
        type=click.Choice(
            [
                "compressed-tensors", "gptq", "gptq-v2", "awq", "modelopt", "fp8", "nvfp4", "quark",
                "speculators", "sglang",
            ]
        ),
        help="The form to write; of a draft (EAGLE3, DFlash): speculators or sglang.",
    ),
    click.option(
        "--verifier", type=REPO_ID, metavar="ORG/NAME",
        help="With --to speculators: the model that the draft is of.",
    ),
    click.option(
        "--tokens", type=Count(), metavar="N",
        help="With --to speculators: how many tokens are drafted at once. [default: 3 for EAGLE3, for "
        "DFlash its block less one]",
    ),
    NVFP4_DIALECT(),
    INPUT_SCALE,
    click.option(
        "--nearest", is_flag=True,
        help="Between NVFP4's dialects: take the nearest float32 where a global scale has no exact "
        "reciprocal (2^-23 of it at most); otherwise such a scale ends the run.",
    ),
)  # fmt: skip
def relabel(**fields: Any) -> Pass:
    """Rewrite codes, or a draft, in another form.

    No number is rounded.

    Codes stay the numbers that they are: AutoAWQ's, AutoRound's and GPTQ's become compressed-tensors',
    a group for each scheme, and those of 4 bits AutoAWQ's; GPTQ's two versions become each other, NVFP4
    goes between the dialects of modelopt and compressed-tensors, block FP8 between the names of
    DeepSeek and of compressed-tensors, and MXFP4 becomes block FP8 (--to fp8) or NVFP4 (--to nvfp4;
    beside FP8 layers, as in DeepSeek-V4, runtimes need --input-scale then). AMD Quark's MXFP4 and
    compressed-tensors' become each other, FP8 by tensor or row of Quark and modelopt
    compressed-tensors'. What the other form cannot hold ends the run, with the tensor's name.

    A draft that stands alone goes between the form of speculators, which vLLM reads, and the one of its
    authors, which sglang and vLLM read: its tensors as they are under the other names.

    \b
    Examples:
      qconvert relabel Qwen2.5-72B-Instruct-AWQ out --to compressed-tensors
      qconvert relabel Qwen3-30B-A3B-GPTQ-Int4 out --to gptq-v2 --dry-run
      qconvert relabel DeepSeek-V4-Flash out --to fp8
      qconvert relabel DeepSeek-V4-Flash out --to nvfp4 --dialect modelopt --input-scale 1.0
      qconvert relabel Qwen3-235B-A22B-NVFP4 out --to compressed-tensors --nearest
      qconvert relabel Llama-3.1-8B-speculator.eagle3 out --to sglang
      qconvert relabel Llama-3.1-8B-EAGLE3 out --to speculators --verifier meta-llama/Llama-3.1-8B
    """
    from qconvert.passes.draft_forms import RelabelDraft
    from qconvert.passes.relabel import Relabel

    if (fields["to"] == "speculators") != ("verifier" in fields):
        raise click.UsageError("--to speculators and --verifier go together: give both, or neither")
    if "tokens" in fields and fields["to"] != "speculators":
        raise click.UsageError("--tokens is written with --to speculators only: omit it")
    if fields["to"] in ("speculators", "sglang"):
        mine = {name: value for name, value in fields.items() if name in _OF_DRAFTS}
        other = next((name for name, value in fields.items() if name not in mine and value), None)
        if other is not None:
            raise click.UsageError(f"--{other.replace('_', '-')} is not of drafts: omit it")
        return RelabelDraft(**mine)
    if (fields["to"] == "nvfp4") != ("dialect" in fields):
        raise click.UsageError("--to nvfp4 and --dialect go together: give both, or neither")
    if "input_scale" in fields and fields["to"] != "nvfp4":
        raise click.UsageError("--input-scale is written with --to nvfp4 only: omit it")
    return Relabel(**fields)


# --- prepare and unprepare ------------------------------------------------------------------------


@click.group()
def prepare() -> None:
    """Do once what a load does (experimental).

    \b
    Example:
      qconvert prepare trtllm-gen DeepSeek-R1-FP4 DeepSeek-R1-FP4-prepared
    """


@conversion(group=prepare, name="trtllm-gen")
def trtllm_gen() -> Pass:
    """NVFP4 experts for TensorRT-LLM's MoE kernels.

    Experimental.

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
    """Undo `prepare`, byte for byte (experimental).

    \b
    Example:
      qconvert unprepare DeepSeek-R1-FP4-prepared DeepSeek-R1-FP4
    """
    from qconvert.contrib.trtllm_gen.prepare import Unprepare

    return Unprepare()


# --- mtp, text ------------------------------------------------------------------------------------


@click.group()
def mtp() -> None:
    """Draft (MTP) layers: extract, graft, drop.

    As a folder of their own, put into a model that lost them, or left out.

    \b
    Examples:
      qconvert mtp extract DeepSeek-V3 DeepSeek-V3-draft
      qconvert mtp graft Qwen3.5-w4a16 Qwen/Qwen3.5-35B-A3B out
      qconvert mtp drop Qwen/Qwen3.5-35B-A3B out
    """


@conversion(group=mtp)
def extract() -> Pass:
    """Write a folder of the draft layers alone.

    With embeddings and head where they have none.

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
    """Write a model without its draft layers.

    config.json counts none.

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
    """Put draft layers back into a model.

    Writes SRC, which has none, with those of DRAFT: of the original model, or of a folder that
    `mtp extract` made.

    Refused where names, sizes or encodings do not fit. Layers that are not quantized in a model that is
    are added to config.json's list of such modules.

    \b
    Examples:
      qconvert mtp graft Qwen3.5-w4a16 Qwen/Qwen3.5-35B-A3B out
      qconvert mtp graft DeepSeek-V3-without DeepSeek-V3-draft out --dry-run
      qconvert validate out --against Qwen3.5-w4a16 --draft Qwen/Qwen3.5-35B-A3B --level full
    """
    from qconvert import api

    planned_with(api.plan_graft, source, draft, out, CommandOptions(**given), draft=draft)


@conversion()
def text() -> Pass:
    """Write a multi-modal model's text model.

    Under its own class: without towers, renamed, with a flat config.json.

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
    """Fuse Gated DeltaNet projections.

    Of Qwen3.5 and Qwen3-Next, in the row order that a consumer expects.

    Fusing saves sglang work at load and makes each projection one range of a file; inference
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
    """Split fused Gated DeltaNet projections.

    As vLLM and transformers expect them for Qwen3.5.

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
    """Stack, unstack or count routed experts.

    \b
    Examples:
      qconvert experts unstack Qwen/Qwen3.5-35B-A3B out
      qconvert experts stack Qwen/Qwen3.5-35B-A3B-FP8 out
    """


@conversion(group=experts)
def stack() -> Pass:
    """Stack matrices to [E, 2I, H] and [E, H, I].

    \b
    Example:
      qconvert experts stack Qwen/Qwen3.5-35B-A3B-FP8 out
    """
    from qconvert.passes.experts import Stack

    return Stack()


@conversion(group=experts)
def unstack() -> Pass:
    """Split stacks to one matrix per expert.

    From [E, 2I, H] and [E, H, I], without reading a whole stack.

    \b
    Example:
      qconvert experts unstack Qwen/Qwen3.5-35B-A3B out
    """
    from qconvert.passes.experts import Unstack

    return Unstack()


@experts.command(name="stats", cls=Command)
@SOURCE
@click.argument("folder", metavar="DIR", type=FolderPath())
@options_of(
    Calibration, "data", "synthetic", "samples", "length", "seed", "column", "devices", given=True
)
@option_of(ValidateOptions, "memory", default="half of what is free")
@OPENING
@VERBOSITY
def stats(source: str, folder: Path, memory: int | None, follow_links: bool, **given: Any) -> None:
    """Count what routed experts see.

    SRC is run over samples as it is. DIR gets the tokens that each expert was given, REAP's saliency,
    moments of activations, and a map of hot experts.

    A decoder layer is in memory at a time. It is what --save-stats of a calibration writes, of the
    unquantized model: for `prune` and `nvfp4 --stats DIR`, and for --init-expert-location. After an
    interruption the same command goes on at its layer.

    \b
    Examples:
      qconvert experts stats Qwen/Qwen3-30B-A3B stats --data chats.jsonl
      qconvert experts stats GLM-4.5-Air stats --data chats.jsonl --samples 128 --memory 48GiB
    """
    from qconvert import api

    asked = calibration_from({**split(given)[0], "save_stats": str(folder)}, gptq=True)
    assert asked is not None
    with Bar(" layers") as bar:
        api.expert_statistics(
            source, asked, memory=memory, follow_links=follow_links, events=bar,
            notice=lambda text: say(f"qconvert: {text}", err=True),
        )  # fmt: skip
    say(f"wrote {folder}")
    if not is_quiet():
        words = ["qconvert", "prune", source, "OUT", "--experts", "N", "--stats", str(folder)]
        say(f"next    {shlex.join(words)}", err=True)


@conversion(
    click.option(
        "--experts", type=Count(), metavar="N",
        help="How many experts stay in each layer. [default: as many as the lists of --keep]",
    ),
    click.option(
        "--keep", type=File(exists=False), metavar="FILE",
        help='The experts that stay, as JSON: {"layers": {"3": [0, 5, ...], ...}}, draft layers '
        "numbered on from the model's own. In layers without a list --stats decides.",
    ),
    STATS,
    click.option(
        "--by", type=click.Choice(["reap", "frequency"]), default="reap", show_default=True,
        help="Rank by REAP's saliency (the router's weight times the norm of the answer, over an "
        "expert's tokens), or by how many tokens chose it.",
    ),
)  # fmt: skip
def prune(**fields: Any) -> Pass:
    """Leave routed experts out; others stay as is.

    N stay in each layer, byte for byte, under new numbers. Router rows, biases, correction terms,
    the config's count and the lists of its quantization block follow. Where a router chooses among
    groups first (n_group), each group keeps as many. Runtimes read one number of experts for all
    layers, draft (MTP) layers too: list those in --keep, or leave the draft out first (`qconvert
    mtp drop`). `qconvert eval OUT --against SRC` says what it cost.

    \b
    Examples:
      qconvert prune Qwen/Qwen3-30B-A3B out --experts 96 --stats stats --dry-run
      qconvert prune Qwen/Qwen3-30B-A3B out --keep experts.json
      qconvert prune GLM-4.5-Air out --experts 96 --stats stats --by frequency
    """
    from qconvert.passes.prune import Prune

    if "stats" in fields and "experts" not in fields:
        raise click.UsageError("--stats needs --experts N: how many stay in each layer")
    if not fields.keys() & {"keep", "stats"}:
        raise click.UsageError(
            "say which experts stay: --stats DIR with --experts N, or --keep FILE"
        )
    return Prune(**fields)
