"""relabel: quantized weights in another form, without rounding."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

import click

from qconvert.cli.command import Command
from qconvert.cli.convert import CONVERSION, RunOptions, convert
from qconvert.cli.options import DIALECT_HELP, INPUT_SCALE, OUT, SOURCE, from_options

if TYPE_CHECKING:
    from qconvert.core.encodings import Dialect


@click.command(cls=Command)
@SOURCE
@OUT
@click.option(
    "--to", "form", required=True,
    type=click.Choice(["compressed-tensors", "gptq", "gptq-v2", "modelopt", "fp8", "nvfp4"]),
    help="The form to write.",
)  # fmt: skip
@click.option(
    "--dialect", type=click.Choice(["compressed-tensors", "modelopt"]), help=DIALECT_HELP,
)  # fmt: skip
@INPUT_SCALE
@click.option(
    "--nearest", is_flag=True,
    help="Between NVFP4's dialects: take the nearest float32 where a global scale has no exact "
    "reciprocal (2^-23 of it at most); otherwise such a scale ends the run.",
)  # fmt: skip
@CONVERSION
def relabel(
    source: str,
    out: Path | str,
    form: Literal["compressed-tensors", "gptq", "gptq-v2", "modelopt", "fp8", "nvfp4"],
    dialect: Dialect | None,
    input_scale: float | None,
    nearest: bool,
    **options: Unpack[RunOptions],
) -> None:
    """Write the quantized weights of SRC in another form, without rounding a number.

    Codes stay the numbers that they are: AutoAWQ's and GPTQ's become compressed-tensors' and GPTQ's two
    versions each other, NVFP4 goes between the dialects of modelopt and compressed-tensors, block FP8
    between the names of DeepSeek and of compressed-tensors, and MXFP4 becomes block FP8 (--to fp8) or
    NVFP4 (--to nvfp4; beside FP8 layers, as in DeepSeek-V4, runtimes need --input-scale then). What the
    other form cannot hold ends the run, with the tensor's name.

    \b
    Examples:
      qconvert relabel Qwen2.5-72B-Instruct-AWQ out --to compressed-tensors
      qconvert relabel Qwen3-30B-A3B-GPTQ-Int4 out --to gptq-v2 --dry-run
      qconvert relabel DeepSeek-V4-Flash out --to fp8
      qconvert relabel DeepSeek-V4-Flash out --to nvfp4 --dialect modelopt --input-scale 1.0
      qconvert relabel Qwen3-235B-A22B-NVFP4 out --to compressed-tensors --nearest
    """
    from qconvert.passes.relabel import Relabel
    from qconvert.recipe.recipe import Recipe

    if (form == "nvfp4") != (dialect is not None):
        raise click.UsageError("--to nvfp4 and --dialect go together: give both, or neither")
    if input_scale is not None and form != "nvfp4":
        raise click.UsageError("--input-scale is written with --to nvfp4 only: omit it")
    with from_options():
        step = Relabel(to=form, nearest=nearest, dialect=dialect, input_scale=input_scale)
    convert(Recipe("relabel", (step,), options["max_shard_size"]), source, out, options)
