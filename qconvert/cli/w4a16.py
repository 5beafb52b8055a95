"""w4a16: weights in packed INT4 or INT8, as GPU runtimes load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from qconvert.cli.calibration import CALIBRATION, calibration_from, flag, split_options
from qconvert.cli.command import Command
from qconvert.cli.convert import CONVERSION, convert, with_kv_scale
from qconvert.cli.options import (
    IGNORE,
    KV_SCALE,
    OUT,
    SHARED_EXPERTS,
    SOURCE,
    TARGETS,
    TP,
    from_options,
)


def _group(context: click.Context, parameter: click.Parameter, text: str) -> int | None:
    """A group size, None for `channel`."""
    return None if text == "channel" else int(text)


@click.command(cls=Command)
@SOURCE
@OUT
@click.option(
    "--rtn", is_flag=True, help="Round to nearest: needs no data, and reads the source once."
)
@click.option(
    "--bits", type=click.Choice(["4", "8"]), default="4", show_default=True, help="Bits per code."
)
@click.option(
    "--group-size", type=click.Choice(["32", "64", "128", "channel"]), default="128",
    callback=_group, show_default=True, help="Columns that share a scale; `channel`: a whole row.",
)  # fmt: skip
@click.option("--asymmetric", is_flag=True, help="Store a zero point with each scale.")
@click.option(
    "--packing",
    type=click.Choice(["compressed-tensors", "gptq", "gptq-v2"]), default="compressed-tensors",
    show_default=True,
    help="How codes are packed; gptq and gptq-v2 differ in how zero points are stored.",
)  # fmt: skip
@TARGETS
@IGNORE
@SHARED_EXPERTS
@TP
@click.option(
    "--leave-bf16", is_flag=True,
    help="Leave a linear layer unquantized whose columns are not whole groups, instead of refusing.",
)  # fmt: skip
@click.option(
    "--actorder", type=click.Choice(["static", "group"]), default=None,
    help="Order in which --gptq solves columns: by importance within unchanged groups (static), or with "
    "groups of columns of like importance, which needs g_idx and a runtime that supports it (group).",
)  # fmt: skip
@KV_SCALE
@CALIBRATION
@CONVERSION
def w4a16(
    source: str,
    out: Path | str,
    rtn: bool,
    bits: Literal["4", "8"],
    group_size: int | None,
    asymmetric: bool,
    packing: Literal["compressed-tensors", "gptq", "gptq-v2"],
    targets: tuple[str, ...],
    ignore: tuple[str, ...],
    shared_experts: Literal["quantize", "keep"] | None,
    tp: int | None,
    leave_bf16: bool,
    actorder: Literal["static", "group"] | None,
    kv_scale: float | None,
    **given: Any,
) -> None:
    """Quantize the routed experts of SRC, or what --targets names, to packed INT4 or INT8.

    All other layers are unchanged, FP8 included, and the config says which is which. Compressed-tensors
    results, symmetric and asymmetric, equal llm-compressor's for the same weights in BF16, byte for byte
    (FP16 and FP32 are rounded to BF16 first), but for --scales search. The plan lists the
    tensor-parallel sizes at which the result loads.

    \b
    Examples:
      qconvert w4a16 Qwen/Qwen3-235B-A22B out --rtn --tp 4 --dry-run
      qconvert w4a16 GLM-4.5-Air out --rtn --group-size 32 --scales search --tp 4
      qconvert w4a16 Qwen3-30B-A3B out --rtn --packing gptq
      qconvert w4a16 Qwen3-30B-A3B out --rtn --bits 8 --group-size channel --targets Linear
      qconvert w4a16 Qwen/Qwen3-Next-80B-A3B-Instruct out --gptq --data chats.jsonl --memory 48GiB
      qconvert w4a16 Qwen/Qwen3-32B out --gptq --targets Linear --data chats.jsonl
    """
    from qconvert.passes.w4a16 import ExpertsToW4A16
    from qconvert.plan.pass_options import EXPERTS
    from qconvert.recipe.recipe import Recipe

    asked, options = split_options(given)
    if rtn == asked["gptq"]:
        raise click.UsageError("choose how weights are rounded: --rtn, or --gptq with --data")
    if rtn and actorder is not None:
        raise click.UsageError("--actorder needs --gptq")
    scales, signs = None, None
    if rtn:
        scales, asked["scales"] = asked["scales"], None
        signs, asked["signs"] = asked["signs"], None
        if signs is not None and scales != "search":
            raise click.UsageError("--set signs needs --gptq, or --rtn with --scales search")
    if asymmetric and asked["gptq"]:
        for name in ("scales", "signs", "refit"):
            if asked[name] is not None:
                raise click.UsageError(
                    f"{flag(name)} is of symmetric codes: --gptq keeps an observer's scales and zero "
                    "points of asymmetric ones, so omit one of the two"
                )
    with from_options():
        step = ExpertsToW4A16(
            group_size=group_size,
            bits=8 if bits == "8" else 4,
            symmetric=not asymmetric,
            packing=packing,
            targets=targets or (EXPERTS,),
            ignore=ignore,
            leave_bf16=leave_bf16,
            tp=tp,
            actorder=actorder,
            calibrate=calibration_from(asked),
            shared_experts=shared_experts,
            scales=scales or "amax",
            signs=signs or "both",
        )
    steps = with_kv_scale(step, kv_scale)
    convert(Recipe("w4a16", steps, options["max_shard_size"]), source, out, options)
