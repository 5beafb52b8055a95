"""mx: weights in MXFP4 or MXFP8, as GPU runtimes load them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Unpack

import click

from qconvert.cli.command import Command
from qconvert.cli.convert import CONVERSION, RunOptions, convert
from qconvert.cli.options import OUT, SHARED_EXPERTS, SOURCE, TARGETS, TP, from_options


@click.command(cls=Command)
@SOURCE
@OUT
@click.option(
    "--bits", type=click.Choice(["4", "8"]), default="4", show_default=True, help="Bits per code."
)
@TARGETS
@SHARED_EXPERTS
@TP
@CONVERSION
def mx(
    source: str,
    out: Path | str,
    bits: Literal["4", "8"],
    targets: tuple[str, ...],
    shared_experts: Literal["quantize", "keep"] | None,
    tp: int | None,
    **options: Unpack[RunOptions],
) -> None:
    """Quantize the routed experts of SRC, or all its linear layers, to MXFP4 or MXFP8.

    Reads BF16, FP16, FP32, FP8 with scales, or packed INT4, and writes codes with a power-of-two scale
    for 32 columns, in compressed-tensors' form: MXFP4, or with --bits 8 MXFP8. They equal
    llm-compressor's for the same weights in BF16, byte for byte. --targets takes `experts` (the default)
    and `Linear` only. vLLM loads all of it; sglang only MXFP4, and that of Kimi-K3 and
    DeepSeek-V4 alone.

    \b
    Examples:
      qconvert mx Qwen/Qwen3-30B-A3B out --dry-run
      qconvert mx Qwen/Qwen3-32B out --bits 8 --targets Linear
      qconvert mx DeepSeek-V3 out --tp 8
    """
    from qconvert.passes.mx import ToMx
    from qconvert.plan.pass_options import EXPERTS
    from qconvert.recipe.recipe import Recipe

    with from_options():
        chosen = targets or (EXPERTS,)
        step = ToMx("mxfp4" if bits == "4" else "mxfp8", chosen, shared_experts, tp)
    convert(Recipe("mx", (step,), options["max_shard_size"]), source, out, options)
