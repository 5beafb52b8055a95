"""amx and kt: routed experts for KTransformers' CPU kernels, alone and with their GPU side."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

import click

from qconvert.cli.calibration import CALIBRATION, Asked, calibration_from, split
from qconvert.cli.command import Command
from qconvert.cli.convert import (
    RUNNING,
    CommandOptions,
    conversion,
    convert,
    planned_and_run,
    show_plan,
)
from qconvert.cli.options import SOURCE, TP, Count, FolderPath
from qconvert.core.int_scheme import DEFAULT_GROUP
from qconvert.core.say import say
from qconvert.runtimes.ktransformers import NATIVE

if TYPE_CHECKING:
    from qconvert.checkpoint.checkpoint import Checkpoint
    from qconvert.passes.amx import ExpertsToAmx
    from qconvert.plan.plan import Pass
    from qconvert.runtimes.ktransformers import Native
    from qconvert.samples.request import Calibration

_METHOD = click.Choice(["int4", "int8"])
_NUMA = click.option(
    "--numa", required=True, type=Count(),
    help="NUMA nodes of the serving machine; the runtime must be started with the same count.",
)  # fmt: skip
_ROUNDING = click.option(
    "--rounding", type=click.Choice(["reference", "search"]),
    default="reference", show_default=True,
    help="`reference`: bytes as kt-kernel's converter writes them; `search`: least squared error, "
    "measured worse in int4. [docs/ktransformers.md]",
)  # fmt: skip
_MTP = click.option(
    "--mtp", type=click.Choice(["keep", "drop"]), default="keep", show_default=True,
    help="Keep or drop experts of the MTP (draft) layers; with `kt --gpu w4a16`, those layers entirely.",
)  # fmt: skip


@conversion(
    click.option("--method", required=True, type=_METHOD, help="AMXINT4 or AMXINT8."),
    _NUMA, _ROUNDING, _MTP, CALIBRATION,
)  # fmt: skip
def amx(gptq: bool, asked: Asked, **fields: Any) -> Pass:
    """Quantize experts for KTransformers' CPUs.

    To AMXINT4 or AMXINT8, in NUMA shards.

    Reads BF16, FP16, FP32, FP8 with scales, or Kimi's INT4, in one pass. OUT holds the experts only: the
    runtime reads all other layers from SRC (`qconvert kt` prints the launch command). With --gptq codes
    are calibrated; the format is the same.

    \b
    Examples:
      qconvert amx DeepSeek-V3 DeepSeek-V3-amx --method int4 --numa 2 --dry-run
      qconvert amx Qwen/Qwen3-Next-80B-A3B-Instruct out --method int8 --numa 1
      qconvert amx DeepSeek-V3 out --method int4 --numa 2 --mtp drop
      qconvert amx Qwen3-Next-80B out --method int4 --numa 1 --gptq --data chats.jsonl
    """
    from qconvert.passes.amx import ExpertsToAmx

    if "signs" in asked:
        raise click.UsageError(
            "--set signs is of INT4 for GPUs: AMX has scales above 0, so omit it"
        )
    return ExpertsToAmx(calibrate=calibration_from(asked, gptq=gptq), **fields)


@click.command(cls=Command)
@SOURCE
@click.option(
    "--cpu-out", required=True, type=FolderPath(repos=True),
    help="Folder for the experts on the CPU side, or a repo on the Hub: hf://ORG/NAME.",
)  # fmt: skip
@click.option(
    "--cpu", "method", required=True, type=click.Choice([*_METHOD.choices, *NATIVE]),
    help="`int4`, `int8`: AMXINT4 or AMXINT8, a folder of the CPU's alone. The others are read from a "
    "checkpoint as GPUs load it, which is then both sides. [docs/ktransformers.md]",
)  # fmt: skip
@_NUMA
@_ROUNDING
@_MTP
@click.option(
    "--gpu", type=click.Choice(["source", "w4a16"]), default="source", show_default=True,
    help="`source`: the GPU side is SRC. `w4a16`: a folder with experts in packed INT4 (round to "
    f"nearest, groups of {DEFAULT_GROUP}) and all other layers unchanged.",
)  # fmt: skip
@click.option(
    "--gpu-out", type=FolderPath(repos=True),
    help="Folder for --gpu w4a16; a repo where --cpu-out is one.",
)  # fmt: skip
@TP
@CALIBRATION
@RUNNING
def kt(
    source: str,
    cpu_out: Path | str,
    method: Any,
    numa: int,
    rounding: Literal["reference", "search"],
    mtp: Literal["keep", "drop"],
    gpu: Literal["source", "w4a16"],
    gpu_out: Path | str | None,
    tp: int | None,
    gptq: bool,
    **given: Any,
) -> None:
    """Make both sides of a CPU + GPU model.

    For KTransformers, in one read; the launch command is printed. With --gptq one calibration serves
    both sides.

    \b
    Examples:
      qconvert kt DeepSeek-V3 --cpu-out V3-cpu --cpu int4 --numa 2
      qconvert kt Qwen/Qwen3-Next-80B-A3B-Instruct --cpu-out next-cpu --cpu int8 --numa 1
      qconvert kt DeepSeek-V3 --cpu-out V3-cpu --cpu int4 --numa 2 --gpu w4a16 --gpu-out V3-gpu
      qconvert kt Qwen/Qwen3-30B-A3B --cpu-out int4 --cpu rawint4 --numa 1
      qconvert kt DeepSeek-V3 --cpu-out hf://me/V3-cpu --cpu int4 --numa 2 --disk-budget 60GiB
    """
    from qconvert import api
    from qconvert.passes.amx import ExpertsToAmx
    from qconvert.passes.w4a16 import ExpertsToW4A16

    if (gpu == "w4a16") != (gpu_out is not None):
        raise click.UsageError("--gpu w4a16 needs --gpu-out, and only it takes one")
    if tp is not None and gpu_out is None:
        raise click.UsageError("--tp is checked for the folder of --gpu w4a16 alone")
    asked, rest = split(given)
    options = CommandOptions(**rest)
    if gpu_out is not None and options.dump_after is not None:
        raise click.UsageError(
            "--dump-after is not supported with --gpu w4a16; use `amx` for the CPU side"
        )
    if method in NATIVE:
        if gpu_out is not None or rounding != "reference" or mtp != "keep":
            raise click.UsageError(
                f"--cpu {method} is one folder for both sides: omit --gpu, --rounding and --mtp"
            )
        _native(source, cpu_out, method, numa, calibration_from(asked, gptq=gptq), options)
        return
    cpu_side = ExpertsToAmx(method, numa, rounding, mtp, calibration_from(asked, gptq=gptq))

    def show(planned: api.Planned, options: CommandOptions) -> None:
        """A dry run names the launch command even where the run would be refused."""
        try:
            show_plan(planned, options)
        finally:
            if options.dry_run:
                _tell_how(planned.source, cpu_side, cpu_out, gpu_out, err=options.as_json)

    if gpu_out is None:
        recipe = api.Recipe("kt", (cpu_side,))
        planned = convert(recipe, source, cpu_out, options, show=show)
    else:
        gpu_side = ExpertsToW4A16(tp=tp)
        planned = planned_and_run(
            lambda opened, more: api.plan_pair(
                cpu_side, opened, cpu_out, gpu_out, gpu=gpu_side, **more
            ),
            source, options, [cpu_side], show=show,
        )  # fmt: skip
    if planned is not None and not options.dry_run:
        _tell_how(planned.source, cpu_side, cpu_out, gpu_out, err=options.as_json)


def _native(
    source: str, out: Path | str, method: Native, numa: int, calibrate: Calibration | None,
    options: CommandOptions,
) -> None:  # fmt: skip
    """Make a folder that kt-kernel reads as it is, or say that SRC is one."""
    from qconvert import api
    from qconvert.passes.kt_native import check_read, native_steps
    from qconvert.runtimes.ktransformers import DRAFT_LAYERS, METHOD, RUNTIME, launch_line
    from qconvert.validation.judgement import planned_checkpoint

    checkpoint = api.open_checkpoint(source, follow_links=options.follow_links)
    steps = native_steps(checkpoint, method, calibrate)

    def show(planned: api.Planned, options: CommandOptions) -> None:
        for part in planned.folders:
            check_read(planned_checkpoint(part.ready), method)
        show_plan(planned, options)

    served, err = str(out), options.as_json
    if steps:
        recipe = api.Recipe("kt", steps)
        if convert(recipe, checkpoint, out, options, show=show) is None:
            return
    else:
        served = checkpoint.name
        say(f"kt-kernel reads {served} as {METHOD[method]}: nothing is written", err=err)
    line = launch_line(METHOD[method], numa, served, served)
    say("", "serve with:", *line.split("\n"), *RUNTIME.split("\n"), err=err)
    if _drafts(checkpoint):
        say(f"It has draft layers: {DRAFT_LAYERS}", err=err)


def _drafts(checkpoint: Checkpoint) -> bool:
    return checkpoint.family.any_mtp(checkpoint, checkpoint.role_index.dims)


def _tell_how(
    checkpoint: Checkpoint,
    cpu_side: ExpertsToAmx,
    cpu_out: Path | str,
    gpu_out: Path | str | None,
    *,
    err: bool,
) -> None:
    """The launch command; and the one for the unconverted source, if kt-kernel reads that. To stderr if
    stdout is JSON."""
    from qconvert.formats.amx.format import RUNTIME_NAME
    from qconvert.runtimes.ktransformers import DRAFT_LAYERS, RUNTIME, launch_line, reads_as_it_is

    name = RUNTIME_NAME[cpu_side.method]
    gpu = checkpoint.name if gpu_out is None else str(gpu_out)
    line = launch_line(name, cpu_side.numa, str(cpu_out), gpu)
    say("", "serve with:", *line.split("\n"), err=err)
    say(*RUNTIME.split("\n"), err=err)
    if _drafts(checkpoint) and (gpu_out is None or cpu_side.mtp == "keep"):
        say(f"The GPU side has draft layers: {DRAFT_LAYERS}", err=err)
    known = reads_as_it_is(checkpoint)
    if known is not None:
        second = "; INT4 to AMX is a second lossy step" if known == "RAWINT4" else ""
        say(
            f"kt-kernel also reads {checkpoint.name} as it is, without conversion: --kt-method "
            f"{known} --kt-weight-path {quote(checkpoint.name)}{second}",
            err=err,
        )
