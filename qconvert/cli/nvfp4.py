"""nvfp4: weights in NVFP4, in one of the two dialects that GPU runtimes load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from qconvert.cli.calibration import CALIBRATION, calibration_from, split_options
from qconvert.cli.command import Command
from qconvert.cli.convert import CONVERSION, convert, with_kv_scale
from qconvert.cli.options import (
    DIALECT_HELP,
    INPUT_SCALE,
    KV_SCALE,
    OUT,
    SHARED_EXPERTS,
    SOURCE,
    STATS,
    TARGETS,
    TP,
    from_options,
)

if TYPE_CHECKING:
    from qconvert.core.encodings import Dialect


@click.command(cls=Command)
@SOURCE
@OUT
@click.option(
    "--dialect", required=True, type=click.Choice(["compressed-tensors", "modelopt"]),
    help=DIALECT_HELP,
)  # fmt: skip
@TARGETS
@SHARED_EXPERTS
@TP
@STATS
@click.option(
    "--weight-only", is_flag=True,
    help="Store no input scales: activations stay bf16, as without --stats and --input-scale.",
)  # fmt: skip
@INPUT_SCALE
@KV_SCALE
@CALIBRATION
@CONVERSION
def nvfp4(
    source: str,
    out: Path | str,
    dialect: Dialect,
    targets: tuple[str, ...],
    shared_experts: Literal["quantize", "keep"] | None,
    tp: int | None,
    stats: Path | None,
    weight_only: bool,
    input_scale: float | None,
    kv_scale: float | None,
    **given: Any,
) -> None:
    """Quantize the routed experts of SRC, or all its linear layers, to NVFP4.

    Reads BF16, FP16, FP32, FP8 with scales, or packed INT4, and writes what compressed-tensors or
    nvidia-modelopt would, byte for byte but for --scales search and --gptq, with two exceptions. Gate
    and up of an expert always share one global scale, which runtimes require. In the compressed-tensors
    dialect FP16 weights are converted to FP32 first: that library's FP16 arithmetic overflows and loses
    small weights. MXFP4 in the form of compressed-tensors is relabelled without loss, or refused. MTP
    layers are unchanged, but for the experts of Qwen3-Next's, which sglang loads in NVFP4 alone. A model
    whose family is not in layouts/ is refused, because its linear layers are not known. --targets takes
    `experts` and `Linear` only.

    \b
    Examples:
      qconvert nvfp4 DeepSeek-V3 out --dialect modelopt --stats V3-stats --dry-run
      qconvert nvfp4 Qwen/Qwen3-30B-A3B out --dialect compressed-tensors
      qconvert nvfp4 GLM-4.5-Air out --dialect modelopt --input-scale 1.0
      qconvert nvfp4 Qwen/Qwen3-30B-A3B out --dialect modelopt --gptq --data chats.jsonl
      qconvert nvfp4 Qwen/Qwen3-30B-A3B out --dialect modelopt --targets Linear --weight-only
    """
    from qconvert.passes.nvfp4 import ToNvfp4
    from qconvert.plan.pass_options import EXPERTS
    from qconvert.recipe.recipe import Recipe

    asked, options = split_options(given)
    scales = None
    if not asked["gptq"]:
        scales, asked["scales"] = asked["scales"], None
    elif asked["signs"] is not None:
        raise click.UsageError(
            "--set signs is of INT4: block scales of NVFP4 are above 0, so omit it"
        )
    if stats is not None and weight_only:
        raise click.UsageError("--weight-only stores no input scales: omit --stats")
    if input_scale is not None and (stats is not None or weight_only):
        other = "--stats" if stats is not None else "--weight-only"
        raise click.UsageError(f"--input-scale is a constant for all: omit {other}")
    with from_options():
        chosen = targets or (EXPERTS,)
        step = ToNvfp4(
            dialect, chosen, weight_only, None if stats is None else str(stats), shared_experts, tp,
            input_scale, scales or "amax", calibration_from(asked),
        )  # fmt: skip
    steps = with_kv_scale(step, kv_scale)
    convert(Recipe("nvfp4", steps, options["max_shard_size"]), source, out, options)
