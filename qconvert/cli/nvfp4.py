"""nvfp4: weights in NVFP4, in either of the dialects that GPU runtimes load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from qconvert.cli.convert import CONVERSION, RunOptions, convert
from qconvert.cli.options import OUT, SOURCE, STATS, TARGETS, from_options

if TYPE_CHECKING:
    from qconvert.ops.fp4 import Dialect


@click.command()
@SOURCE
@OUT
@click.option(
    "--dialect", required=True, type=click.Choice(["compressed-tensors", "modelopt"]),
    help="Whose names, scales and config. The bytes differ too: one divides, the other multiplies.",
)  # fmt: skip
@TARGETS
@STATS
@click.option(
    "--weight-only", is_flag=True,
    help="No input scales: activations stay bf16. So it is without --stats anyway.",
)  # fmt: skip
@CONVERSION
def nvfp4(
    source: str,
    out: Path,
    dialect: Dialect,
    targets: tuple[str, ...],
    stats: Path | None,
    weight_only: bool,
    **options: Unpack[RunOptions],
) -> None:
    """Quantize the routed experts of SRC, or all its linear layers, to NVFP4.

    Reads BF16, FP16, FP32, FP8 with scales, or packed INT4, and writes what compressed-tensors or
    nvidia-modelopt would, byte for byte, with two exceptions. Gate and up of an expert always share
    their own scale, as runtimes need it. FP16 weights go through float32 in the compressed-tensors
    dialect: its own FP16 arithmetic overflows and loses small weights, so the bytes are those that it
    makes of the same weights in FP32. MXFP4 in compressed-tensors' form is relabelled without loss, or
    refused.
    MTP layers stay as they are: sglang loads them without NVFP4. A model whose family is not in layouts/
    is refused: nothing is quantized that is not known to be a linear layer.

    \b
    Examples:
      qconvert nvfp4 DeepSeek-V3 out --dialect modelopt --stats V3-stats --dry-run
      qconvert nvfp4 Qwen/Qwen3-30B-A3B out --dialect compressed-tensors
      qconvert nvfp4 Qwen/Qwen3-30B-A3B out --dialect modelopt --targets Linear --weight-only
    """
    from qconvert.passes.nvfp4 import ToNvfp4
    from qconvert.recipe.recipe import Recipe
    from qconvert.recipe.words import EXPERTS, fields_of

    if stats is not None and weight_only:
        raise click.UsageError("--weight-only stores no input scales: leave --stats out")
    with from_options():
        chosen = fields_of("nvfp4", {"targets": targets or (EXPERTS,)})["targets"]
        step = ToNvfp4(dialect, chosen, weight_only, None if stats is None else str(stats))
    convert(Recipe("nvfp4", (step,), options["max_shard_size"]), source, out, options)
