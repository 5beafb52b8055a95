"""fp8: weights in FP8, as GPU runtimes load them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Unpack

import click

from qconvert.cli.command import Command
from qconvert.cli.consumer import made_for
from qconvert.cli.convert import CONVERSION, RunOptions, convert, with_kv_scale
from qconvert.cli.options import (
    INPUT_SCALE,
    KV_SCALE,
    LINEAR_TARGETS,
    OUT,
    SHARED_EXPERTS,
    SOURCE,
    STATS,
    TP,
    from_options,
)


@click.command(cls=Command)
@SOURCE
@OUT
@click.option(
    "--compressed-tensors", "packed", is_flag=True,
    help="Write compressed-tensors' names, scales and config, not those that DeepSeek and Qwen publish "
    "(implied by --channel).",
)  # fmt: skip
@click.option(
    "--block", type=click.IntRange(min=1), default=None, show_default="128",
    help="Rows and columns that share a scale.",
)  # fmt: skip
@click.option("--channel", is_flag=True, help="Store a scale for each row instead.")
@click.option("--tensor", is_flag=True, help="Store a scale for each matrix instead.")
@click.option(
    "--ue8m0", is_flag=True,
    help="Store scales that are powers of two, rounded up before codes are rounded (scale_fmt: ue8m0).",
)  # fmt: skip
@LINEAR_TARGETS
@SHARED_EXPERTS
@TP
@STATS
@INPUT_SCALE
@KV_SCALE
@made_for("sglang or vllm", "sglang", "vllm")
@CONVERSION
def fp8(
    source: str,
    out: Path | str,
    packed: bool,
    block: int | None,
    channel: bool,
    tensor: bool,
    ue8m0: bool,
    targets: tuple[str, ...],
    shared_experts: Literal["quantize", "keep"] | None,
    tp: int | None,
    stats: Path | None,
    input_scale: float | None,
    kv_scale: float | None,
    consumer: str | None,
    **options: Unpack[RunOptions],
) -> None:
    """Quantize all linear layers of SRC that runtimes load so, or its routed experts, to FP8.

    Reads BF16, FP16, FP32, FP8 with other scales, or packed INT4, and writes E4M3 codes, rounded with
    the scale that is stored. In compressed-tensors' dialect they equal llm-compressor's for the same
    weights in BF16, byte for byte; but with --tensor q, k and v share a scale, as gate and up do, since
    runtimes keep one of them. Embeddings, head, norms and routers are unchanged. Activations are scaled
    by the runtime, by the constant of --input-scale, or, for `--targets experts`, by scales of inputs
    that --stats saw. --targets takes `experts` and `Linear` (the default) only. With --for, a class of
    that runtime that is known not to read scales of blocks as DeepSeek publishes them (sglang's of
    Llama, Mistral and Phi-3) gets compressed-tensors' form.

    \b
    Examples:
      qconvert fp8 Qwen/Qwen3-235B-A22B out --dry-run
      qconvert fp8 meta-llama/Llama-3.3-70B-Instruct out --for sglang
      qconvert fp8 DeepSeek-V3-bf16 out --ue8m0
      qconvert fp8 Qwen/Qwen3-32B out --channel
      qconvert fp8 Qwen/Qwen3-32B out --tensor --input-scale 1.0
      qconvert fp8 GLM-4.5-Air out --targets experts --tp 8
      qconvert fp8 Qwen/Qwen3-30B-A3B out --tensor --targets experts --stats Qwen3-stats
    """
    from qconvert.passes.fp8 import BLOCK, ToFp8
    from qconvert.plan.pass_options import LINEAR
    from qconvert.recipe.recipe import Recipe

    if channel and block is not None:
        raise click.UsageError("--channel stores a scale a row: omit --block")
    if tensor and (channel or block is not None):
        other = "--channel" if channel else "--block"
        raise click.UsageError(f"--tensor stores a scale a matrix: omit {other}")
    if input_scale is not None and not tensor:
        raise click.UsageError(
            "runtimes take --input-scale beside a scale a matrix only: add --tensor"
        )
    if stats is not None and not tensor:
        raise click.UsageError("runtimes take --stats beside a scale a matrix only: add --tensor")
    if stats is not None and input_scale is not None:
        raise click.UsageError("--input-scale is a constant for all: omit --stats")
    with from_options():
        step = ToFp8(
            dialect="compressed-tensors" if packed or channel else "fp8",
            block=None if channel else block or BLOCK,
            exponents=ue8m0,
            targets=targets or (LINEAR,),
            shared_experts=shared_experts,
            tp=tp,
            tensor=tensor,
            input_scale=input_scale,
            stats=None if stats is None else str(stats),
            consumer=consumer,
        )
    steps = with_kv_scale(step, kv_scale)
    convert(Recipe("fp8", steps, options["max_shard_size"]), source, out, options)
