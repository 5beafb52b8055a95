"""prepare and unprepare: experts in the layout of a kernel, made once instead of at every load."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import click

from qconvert.cli.command import Command
from qconvert.cli.convert import CONVERSION, RunOptions, convert
from qconvert.cli.options import OUT, SOURCE


@click.group()
def prepare() -> None:
    """Experimental: do once what a runtime does to the weights at every load.

    \b
    Example:
      qconvert prepare trtllm-gen DeepSeek-R1-FP4 DeepSeek-R1-FP4-prepared
    """


@prepare.command("trtllm-gen", cls=Command)
@SOURCE
@OUT
@CONVERSION
def trtllm_gen(source: str, out: Path | str, **options: Unpack[RunOptions]) -> None:
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
    from qconvert.recipe.recipe import Recipe

    recipe = Recipe("prepare-trtllm-gen", (Prepare(),), options["max_shard_size"])
    convert(recipe, source, out, options)


@click.command(cls=Command)
@SOURCE
@OUT
@CONVERSION
def unprepare(source: str, out: Path | str, **options: Unpack[RunOptions]) -> None:
    """Experimental: restore, byte for byte, the tensors that `qconvert prepare` read.

    \b
    Example:
      qconvert unprepare DeepSeek-R1-FP4-prepared DeepSeek-R1-FP4
    """
    from qconvert.contrib.trtllm_gen.unprepare import Unprepare
    from qconvert.recipe.recipe import Recipe

    convert(Recipe("unprepare", (Unprepare(),), options["max_shard_size"]), source, out, options)
