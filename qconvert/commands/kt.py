"""amx: routed experts for KTransformers' CPU kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Unpack

import click

from qconvert.commands.convert import CONVERSION, RunOptions, convert
from qconvert.commands.options import OUT, SOURCE

_METHOD = click.Choice(["int4", "int8"])
_NUMA = click.option(
    "--numa", required=True, type=click.IntRange(min=1),
    help="NUMA nodes of the machine that will serve; the runtime is started with the same count.",
)  # fmt: skip
_ROUNDING = click.option(
    "--rounding", type=click.Choice(["peer", "search"]), default="peer", show_default=True,
    help="`peer`: the bytes kt-kernel's own converter writes. `search`: the same format, each row's "
    "step searched for the least error; slower.",
)  # fmt: skip
_MTP = click.option(
    "--mtp", type=click.Choice(["keep", "drop"]), default="keep", show_default=True,
    help="Experts of the MTP (draft) layers.",
)  # fmt: skip


@click.command()
@SOURCE
@OUT
@click.option("--method", required=True, type=_METHOD, help="AMXINT4 or AMXINT8.")
@_NUMA
@_ROUNDING
@_MTP
@CONVERSION
def amx(
    source: str,
    out: Path,
    method: Literal["int4", "int8"],
    numa: int,
    rounding: Literal["peer", "search"],
    mtp: Literal["keep", "drop"],
    **options: Unpack[RunOptions],
) -> None:
    """Quantize the routed experts of SRC to AMXINT4 or AMXINT8, in NUMA shards, for KTransformers.

    Reads BF16, FP16, FP32, FP8 with scales, or Kimi's INT4, in one pass. OUT holds experts only: the
    runtime reads the other layers from SRC itself (`qconvert kt` prints how to start it).

    \b
    Examples:
      qconvert amx DeepSeek-V3 DeepSeek-V3-amx --method int4 --numa 2 --dry-run
      qconvert amx Qwen/Qwen3-Next-80B-A3B-Instruct out --method int8 --numa 1
      qconvert amx DeepSeek-V3 out --method int4 --numa 2 --rounding search --mtp drop
    """
    from qconvert.passes.amx import ExpertsToAmx
    from qconvert.recipe import Recipe

    steps = (ExpertsToAmx(method, numa, rounding, mtp),)
    convert(Recipe("amx", steps, options["max_shard_size"]), source, out, options)
