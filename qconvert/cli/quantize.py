"""The commands that quantize for GPUs: quantize, mx, int8, nvfp4, fp8 and w4a16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from qconvert.cli.calibration import CALIBRATION, SAMPLES, Asked, calibration_from, flag
from qconvert.cli.convert import conversion
from qconvert.cli.options import (
    INPUT_SCALE,
    KV_SCALE,
    NVFP4_DIALECT,
    STATS,
    Count,
    Rare,
    dialect,
    made_for,
    quantizing,
    rare,
)
from qconvert.core.int_scheme import DEFAULT_GROUP

if TYPE_CHECKING:
    from qconvert.plan.plan import Pass

_BITS = click.option(
    "--bits", type=click.Choice(["4", "8"]), default="4", show_default=True, help="Bits per code."
)


@conversion(
    click.option(
        "--format", "form", required=True, metavar="NAME",
        help="Format to write, such as mxfp8 or int8, or one that another package adds; a name that is "
        "none lists them.",
    ),
    quantizing("experts"),
)  # fmt: skip
def quantize(form: str, **fields: Any) -> Pass:
    """Quantize to any format, by its name.

    The routed experts, or what --targets names.

    Reads BF16, FP16, FP32, FP8 with scales, or packed INT4, and writes any format that looks at a row of
    a matrix at a time, in compressed-tensors' form: those of qconvert, and those of other packages
    (CONTRIBUTING.md, a format). FP8, NVFP4 and packed INT4 have commands of their own.

    \b
    Examples:
      qconvert quantize Qwen/Qwen3-30B-A3B out --format mxfp4 --dry-run
      qconvert quantize Qwen/Qwen3-32B out --format mxfp8 --targets Linear
      qconvert quantize Qwen/Qwen3-30B-A3B out --format int8 --targets o_proj
    """
    from qconvert.passes.quantize import Quantize

    return Quantize(form, **fields)


@conversion(
    _BITS, quantizing("experts"),
    dialect(
        "AMD Quark's is of MXFP4, for an MI355, with inputs in MXFP4 too",
        "compressed-tensors", "quark", kind=Rare,
    ),
)  # fmt: skip
def mx(bits: Literal["4", "8"], **fields: Any) -> Pass:
    """Quantize to MXFP4 or MXFP8.

    The routed experts, or all linear layers (--targets Linear).

    Reads BF16, FP16, FP32, FP8 with scales, or packed INT4, and writes codes with a power-of-two scale
    for 32 columns, in compressed-tensors' form: MXFP4, or with --bits 8 MXFP8. They equal
    llm-compressor's for the same weights in BF16, byte for byte. vLLM loads all; sglang only MXFP4,
    and that of Kimi-K3 and DeepSeek-V4 alone, or Quark's dialect on an MI355.

    \b
    Examples:
      qconvert mx Qwen/Qwen3-30B-A3B out --dry-run
      qconvert mx Qwen/Qwen3-32B out --bits 8 --targets Linear
      qconvert mx DeepSeek-V3 out --tp 8
      qconvert mx Qwen/Qwen3-30B-A3B out --dialect quark
    """
    from qconvert.passes.quantize import ToMx

    return ToMx("mxfp4" if bits == "4" else "mxfp8", **fields)


@conversion(
    quantizing("Linear"), KV_SCALE, SAMPLES,
    dialect(
        "msmodelslim's is W8A8_DYNAMIC, for Ascend NPUs",
        "compressed-tensors", "msmodelslim", kind=Rare,
    ),
)  # fmt: skip
def int8(**fields: Any) -> Pass:
    """Quantize to INT8 for INT8 activations.

    W8A8: all linear layers, or the routed experts (--targets experts).

    Reads BF16, FP16, FP32, FP8 with scales, or packed INT4, and writes codes with a scale a row, in
    compressed-tensors' int-quantized form. They equal llm-compressor's for the same weights in BF16,
    byte for byte. Activations are scaled by token, by the runtime. (`w4a16 --bits 8` is packed, for BF16
    activations.) sglang loads no experts so.
    --dialect msmodelslim writes the same codes with quant_model_description.json, for vllm-ascend.

    \b
    Examples:
      qconvert int8 Qwen/Qwen3-32B out --dry-run
      qconvert int8 Qwen/Qwen3-30B-A3B out --tp 2
      qconvert int8 Qwen/Qwen3-30B-A3B out --targets experts
    """
    from qconvert.passes.quantize import ToInt8

    return ToInt8(**fields)


@conversion(
    NVFP4_DIALECT(required=True),
    quantizing("experts"),
    STATS,
    click.option(
        "--weight-only", is_flag=True,
        help="Store no input scales: activations stay bf16, as without --stats and --input-scale.",
    ),
    INPUT_SCALE,
    KV_SCALE,
    CALIBRATION,
)  # fmt: skip
def nvfp4(weight_only: bool, gptq: bool, asked: Asked, **fields: Any) -> Pass:
    """Quantize to NVFP4.

    The routed experts, or all linear layers (--targets Linear).

    Reads BF16, FP16, FP32, FP8 with scales, or packed INT4, and writes what compressed-tensors or
    nvidia-modelopt would, byte for byte but for --scales search and --gptq, with two exceptions. Gate
    and up of an expert always share one global scale, which runtimes require. In the compressed-tensors
    dialect FP16 weights are converted to FP32 first: that library's FP16 arithmetic overflows and loses
    small weights. MXFP4 in the form of compressed-tensors is relabelled without loss, or refused. MTP
    layers are unchanged, but for the experts of Qwen3-Next's, which sglang loads in NVFP4 alone. A model
    whose family is not in layouts/ is refused, because its linear layers are not known. --targets takes
    modules by name in the dialect of compressed-tensors only.

    \b
    Examples:
      qconvert nvfp4 DeepSeek-V3 out --dialect modelopt --stats V3-stats --dry-run
      qconvert nvfp4 Qwen/Qwen3-30B-A3B out --dialect compressed-tensors
      qconvert nvfp4 GLM-4.5-Air out --dialect modelopt --input-scale 1.0
      qconvert nvfp4 Qwen/Qwen3-30B-A3B out --dialect modelopt --gptq --data chats.jsonl
      qconvert nvfp4 Qwen/Qwen3-30B-A3B out --dialect modelopt --targets Linear --weight-only
    """
    from qconvert.passes.nvfp4 import ToNvfp4

    if not gptq and "scales" in asked:
        fields["scales"] = asked.pop("scales")
    if gptq and "signs" in asked:
        raise click.UsageError(
            "--set signs is of INT4: block scales of NVFP4 are above 0, so omit it"
        )
    if "stats" in fields and weight_only:
        raise click.UsageError("--weight-only stores no input scales: omit --stats")
    if "input_scale" in fields and ("stats" in fields or weight_only):
        other = "--stats" if "stats" in fields else "--weight-only"
        raise click.UsageError(f"--input-scale is a constant for all: omit {other}")
    calibrate = calibration_from(asked, gptq=gptq)
    return ToNvfp4(weight_only=weight_only, calibrate=calibrate, **fields)


@conversion(
    dialect(
        "fp8: as DeepSeek and Qwen publish it; --channel implies compressed-tensors",
        "fp8", "compressed-tensors",
    ),
    click.option(
        "--block", type=Count(), default=None,
        help="Rows and columns that share a scale. [default: 128]",
    ),
    click.option("--channel", is_flag=True, help="Store a scale for each row instead."),
    click.option("--tensor", is_flag=True, help="Store a scale for each matrix instead."),
    click.option(
        "--ue8m0", is_flag=True,
        help="Store scales that are powers of two, rounded up before codes are rounded (scale_fmt: "
        "ue8m0).",
    ),
    quantizing("Linear"),
    STATS,
    INPUT_SCALE,
    KV_SCALE,
    SAMPLES,
    made_for("sglang or vllm", "sglang", "vllm"),
)  # fmt: skip
def fp8(channel: bool, tensor: bool, ue8m0: bool, **fields: Any) -> Pass:
    """Quantize to FP8, by block, row or tensor.

    All linear layers that runtimes load so, or the routed experts (--targets experts).

    Reads BF16, FP16, FP32, FP8 with other scales, or packed INT4, and writes E4M3 codes, rounded with
    the scale that is stored. In compressed-tensors' dialect they equal llm-compressor's for the same
    weights in BF16, byte for byte; but with --tensor q, k and v share a scale, as gate and up do, since
    runtimes keep one of them. Embeddings, head, norms and routers are unchanged. Activations are scaled
    by the runtime, by the constant of --input-scale, or, for `--targets experts`, by scales of inputs
    that --stats saw. --targets takes modules by name in the dialect of compressed-tensors only. With
    --for, a class of that runtime that is known not to read scales of blocks as DeepSeek publishes them
    (sglang's of Llama, Mistral and Phi-3) gets compressed-tensors' form.

    \b
    Examples:
      qconvert fp8 Qwen/Qwen3-235B-A22B out --dry-run
      qconvert fp8 meta-llama/Llama-3.3-70B-Instruct out --for sglang
      qconvert fp8 DeepSeek-V3-bf16 out --ue8m0
      qconvert fp8 Qwen/Qwen3-32B out --channel --kv-scale calibrated --data chats.jsonl
      qconvert fp8 Qwen/Qwen3-32B out --tensor --input-scale 1.0
      qconvert fp8 GLM-4.5-Air out --targets experts --tp 8
      qconvert fp8 Qwen/Qwen3-30B-A3B out --tensor --targets experts --stats Qwen3-stats
    """
    from qconvert.passes.fp8 import ToFp8

    if channel and "block" in fields:
        raise click.UsageError("--channel stores a scale a row: omit --block")
    if tensor and (channel or "block" in fields):
        other = "--channel" if channel else "--block"
        raise click.UsageError(f"--tensor stores a scale a matrix: omit {other}")
    for name in ("input_scale", "stats") if not tensor else ():
        if name in fields:
            word = name.replace("_", "-")
            raise click.UsageError(
                f"runtimes take --{word} beside a scale a matrix only: add --tensor"
            )
    if "stats" in fields and "input_scale" in fields:
        raise click.UsageError("--input-scale is a constant for all: omit --stats")
    if channel:
        fields["block"] = None
        fields.setdefault("dialect", "compressed-tensors")
    return ToFp8(exponents=ue8m0, tensor=tensor, **fields)


@conversion(
    click.option(
        "--rtn", is_flag=True, help="Round to nearest, without data. [the source is read once]"
    ),
    _BITS,
    click.option(
        "--group-size", type=click.Choice(["32", "64", "128", "channel"]),
        default=str(DEFAULT_GROUP), show_default=True,
        help="Columns that share a scale; `channel`: a whole row.",
    ),
    click.option("--asymmetric", is_flag=True, help="Store a zero point with each scale."),
    click.option(
        "--packing",
        type=click.Choice(["compressed-tensors", "gptq", "gptq-v2", "awq"]),
        default="compressed-tensors",
        show_default=True,
        help="How codes are packed; gptq and gptq-v2 differ in how zero points are stored; awq "
        "(AutoAWQ's form) needs --asymmetric.",
    ),
    quantizing("experts"),
    rare(
        "--leave-bf16", is_flag=True,
        help="Leave a linear layer unquantized whose columns are not whole groups, instead of refusing.",
    ),
    rare(
        "--actorder", type=click.Choice(["static", "group"]), default=None,
        help="Order in which --gptq solves columns: by importance within unchanged groups (static), or "
        "with groups of columns of like importance, which needs g_idx and a runtime that supports it "
        "(group).",
    ),
    KV_SCALE,
    CALIBRATION,
)  # fmt: skip
def w4a16(
    rtn: bool, gptq: bool, bits: str, group_size: str, asymmetric: bool, asked: Asked, **fields: Any
) -> Pass:
    """Quantize to packed INT4 or INT8.

    The routed experts, or what --targets names, by rounding (--rtn) or with data (--gptq).

    All other layers are unchanged, FP8 included, and the config says which is which. Compressed-tensors
    results, symmetric and asymmetric, equal llm-compressor's for the same weights in BF16, byte for byte
    (FP16 and FP32 are rounded to BF16 first), but for --scales search. The plan lists the
    tensor-parallel sizes at which the result loads.

    \b
    Examples:
      qconvert w4a16 Qwen/Qwen3-235B-A22B out --rtn --tp 4 --dry-run
      qconvert w4a16 GLM-4.5-Air out --rtn --group-size 32 --scales search --tp 4
      qconvert w4a16 Qwen/Qwen3-32B out --gptq --targets Linear --data chats.jsonl
      qconvert w4a16 Qwen3-30B-A3B out --rtn --packing gptq
      qconvert w4a16 Qwen3-30B-A3B out --rtn --bits 8 --group-size channel --targets Linear
      qconvert w4a16 Qwen/Qwen3-Next-80B-A3B-Instruct out --gptq --data chats.jsonl --memory 48GiB
    """
    from qconvert.passes.w4a16 import ExpertsToW4A16

    if rtn == gptq:
        raise click.UsageError("choose how weights are rounded: --rtn, or --gptq with --data")
    if rtn and "actorder" in fields:
        raise click.UsageError("--actorder needs --gptq")
    if rtn:
        fields |= {name: asked.pop(name) for name in ("scales", "signs") if name in asked}
        if "signs" in fields and fields.get("scales") != "search":
            raise click.UsageError("--set signs needs --gptq, or --rtn with --scales search")
    for name in ("scales", "signs", "refit") if asymmetric and gptq else ():
        if name in asked:
            raise click.UsageError(
                f"{flag(name)} is of symmetric codes: --gptq keeps an observer's scales and zero "
                "points of asymmetric ones, so omit one of the two"
            )
    return ExpertsToW4A16(
        group_size=None if group_size == "channel" else int(group_size),
        bits=8 if bits == "8" else 4,
        symmetric=not asymmetric,
        calibrate=calibration_from(asked, gptq=gptq),
        **fields,
    )
