"""int8: weights in INT8 for INT8 activations, as GPU runtimes load them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Unpack

import click

from qconvert.cli.command import Command
from qconvert.cli.convert import CONVERSION, RunOptions, convert, with_kv_scale
from qconvert.cli.options import (
    KV_SCALE,
    LINEAR_TARGETS,
    OUT,
    SHARED_EXPERTS,
    SOURCE,
    TP,
    from_options,
)


@click.command(cls=Command)
@SOURCE
@OUT
@LINEAR_TARGETS
@SHARED_EXPERTS
@TP
@KV_SCALE
@CONVERSION
def int8(
    source: str,
    out: Path | str,
    targets: tuple[str, ...],
    shared_experts: Literal["quantize", "keep"] | None,
    tp: int | None,
    kv_scale: float | None,
    **options: Unpack[RunOptions],
) -> None:
    """Quantize all linear layers of SRC, or its routed experts, to INT8 for INT8 activations (W8A8).

    Reads BF16, FP16, FP32, FP8 with scales, or packed INT4, and writes codes with a scale a row, in
    compressed-tensors' int-quantized form. They equal llm-compressor's for the same weights in BF16,
    byte for byte. Activations are scaled by token, by the runtime. (`w4a16 --bits 8` is packed, for BF16
    activations.) --targets takes `experts` and `Linear` (the default) only; sglang loads no experts so.

    \b
    Examples:
      qconvert int8 Qwen/Qwen3-32B out --dry-run
      qconvert int8 Qwen/Qwen3-30B-A3B out --tp 2
      qconvert int8 Qwen/Qwen3-30B-A3B out --targets experts
    """
    from qconvert.passes.int8 import ToInt8
    from qconvert.plan.pass_options import LINEAR
    from qconvert.recipe.recipe import Recipe

    with from_options():
        chosen = targets or (LINEAR,)
        step = ToInt8(chosen, shared_experts, tp)
    steps = with_kv_scale(step, kv_scale)
    convert(Recipe("int8", steps, options["max_shard_size"]), source, out, options)
