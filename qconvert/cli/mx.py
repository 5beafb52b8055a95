"""mx: weights in MXFP4 or MXFP8, as GPU runtimes load them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

import click

from qconvert.cli.convert import CONVERSION, RunOptions, convert
from qconvert.cli.options import OUT, SHARED_EXPERTS, SOURCE, TARGETS, TP, from_options

if TYPE_CHECKING:
    from qconvert.formats.mx.config import Format


@click.command()
@SOURCE
@OUT
@click.option(
    "--format", "form", required=True, type=click.Choice(["mxfp4", "mxfp8"]),
    help="4-bit codes, or 8-bit ones, which vLLM alone loads in this form.",
)  # fmt: skip
@TARGETS
@SHARED_EXPERTS
@TP
@CONVERSION
def mx(
    source: str,
    out: Path,
    form: Format,
    targets: tuple[str, ...],
    shared_experts: Literal["quantize", "keep"] | None,
    tp: int | None,
    **options: Unpack[RunOptions],
) -> None:
    """Quantize the routed experts of SRC, or all its linear layers, to MXFP4 or MXFP8.

    Reads BF16, FP16, FP32, FP8 with scales, or packed INT4, and writes codes with a power-of-two scale
    for 32 columns, in compressed-tensors' form. They equal llm-compressor's for the same weights in
    BF16, byte for byte. --targets takes `experts` (the default) and `Linear` only; sglang loads MXFP4
    experts alone.

    \b
    Examples:
      qconvert mx Qwen/Qwen3-30B-A3B out --format mxfp4 --dry-run
      qconvert mx Qwen/Qwen3-32B out --format mxfp8 --targets Linear
      qconvert mx DeepSeek-V3 out --format mxfp4 --tp 8
    """
    from qconvert.passes.mx import ToMx
    from qconvert.recipe.recipe import Recipe
    from qconvert.recipe.words import EXPERTS, fields_of

    with from_options():
        chosen = fields_of("mx", {"targets": targets or (EXPERTS,)})["targets"]
        step = ToMx(form, chosen, shared_experts, tp)
    convert(Recipe("mx", (step,), options["max_shard_size"]), source, out, options)
