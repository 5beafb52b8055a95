"""mtp, text: the parts of a model apart: its draft layers, its text model."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click

from qconvert.cli.carry_out import carry_out
from qconvert.cli.command import Command
from qconvert.cli.convert import CONVERSION, RUNNING, RunOptions, convert, plan_options, show_plan
from qconvert.cli.options import OUT, SOURCE, SourceName


@click.group()
def mtp() -> None:
    """Draft (MTP) layers: as a folder of their own, put into a model, or left out.

    \b
    Examples:
      qconvert mtp extract DeepSeek-V3 DeepSeek-V3-draft
      qconvert mtp graft Qwen3.5-w4a16 Qwen/Qwen3.5-35B-A3B out
      qconvert mtp drop Qwen/Qwen3.5-35B-A3B out
    """


@mtp.command(cls=Command)
@SOURCE
@OUT
@CONVERSION
def extract(source: str, out: Path | str, **options: Unpack[RunOptions]) -> None:
    """Write a folder of the draft layers of SRC, with embeddings and head where they have none.

    sglang takes it as --speculative-draft-model-path, vLLM as the model of --speculative-config. Names
    and config.json are those of SRC: runtimes look for the draft's layer behind the model's last.

    \b
    Examples:
      qconvert mtp extract DeepSeek-V3 DeepSeek-V3-draft
      qconvert mtp extract Qwen/Qwen3.5-35B-A3B-FP8 draft --dry-run
    """
    from qconvert.passes.drafts import ExtractDraft
    from qconvert.recipe.recipe import Recipe

    recipe = Recipe("mtp-extract", (ExtractDraft(),), options["max_shard_size"])
    convert(recipe, source, out, options)


@mtp.command(cls=Command)
@SOURCE
@OUT
@CONVERSION
def drop(source: str, out: Path | str, **options: Unpack[RunOptions]) -> None:
    """Write SRC without its draft layers; config.json counts none.

    \b
    Example:
      qconvert mtp drop Qwen/Qwen3.5-35B-A3B out
    """
    from qconvert.passes.drop import Drop
    from qconvert.recipe.recipe import Recipe

    convert(
        Recipe("mtp-drop", (Drop(what="mtp"),), options["max_shard_size"]), source, out, options
    )


@mtp.command(cls=Command)
@SOURCE
@click.argument("draft", metavar="DRAFT", type=SourceName())
@OUT
@RUNNING
def graft(source: str, draft: str, out: Path | str, **given: Unpack[RunOptions]) -> None:
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

    options: RunOptions = {**given, "print_recipe": False}  # two folders are no recipe
    if options["dump_after"] is not None:
        raise click.UsageError("--dump-after is not supported with two sources; see `mtp extract`")
    planned = api.plan_graft(source, draft, out, **plan_options(options))
    show_plan(planned, options)
    if not options["dry_run"]:
        carry_out(planned, options, source, draft)


@click.command(cls=Command)
@SOURCE
@OUT
@CONVERSION
def text(source: str, out: Path | str, **options: Unpack[RunOptions]) -> None:
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
    from qconvert.recipe.recipe import Recipe

    convert(Recipe("text", (TextOnly(),), options["max_shard_size"]), source, out, options)
