"""advise: which conversion a model needs for a runtime, if any."""

from __future__ import annotations

from typing import Any

import click

from qconvert.cli.command import Command
from qconvert.cli.options import (
    FINDINGS,
    JSON,
    NOT_KNOWN,
    OPENING,
    SIZE,
    SOURCE,
    Count,
    made_for,
    option_of,
)
from qconvert.core.say import say, say_all, say_json
from qconvert.validation.options import ValidateOptions


@click.command(cls=Command)
@SOURCE
@made_for(
    "sglang or vllm, whose loaders are simulated, or ktransformers",
    "sglang",
    "vllm",
    "ktransformers",
)
@click.option("--gpus", type=Count(), default=8, show_default=True, help="GPUs.")
@click.option(
    "--gpu-memory", type=SIZE, default="141GB", show_default=True, help="Memory of each GPU."
)
@click.option(
    "--capability", type=click.Choice(["8.0", "8.9", "9.0", "10.0"]), default="9.0", show_default=True,
    help="Compute capability of the GPUs: 9.0 is an H200, 10.0 a B200.",
)  # fmt: skip
@click.option("--cpu-memory", type=SIZE, help="Main memory. KTransformers keeps experts in it.")
@click.option(
    "--numa", type=Count(most=64), default=2, show_default=True,
    help="NUMA nodes of the serving machine; the runtime must be started with the same count.",
)  # fmt: skip
@click.option(
    "--hotness", metavar="FILE",
    help="A hotness.pt of a calibration: KTransformers keeps the experts used most on the GPU.",
)  # fmt: skip
@click.option(
    "--disk", type=SIZE, default="1GB", show_default=True, help="Bytes a second of the disk."
)
@click.option(
    "--disaggregated", is_flag=True, help="Print a launch line for each role: prefill and decode."
)
@option_of(ValidateOptions, "loader")
@OPENING
@JSON
def advise(
    source: str,
    consumer: str | None,
    gpus: int,
    gpu_memory: int,
    capability: str,
    cpu_memory: int | None,
    disk: int,
    as_json: bool,
    **given: Any,
) -> int:
    """Say which conversion SRC needs for a runtime, if any, and how to serve it.

    Plans several conversions from headers, asks a simulator of the runtime's loader whether each would
    load at each tensor-parallel size, and compares the bytes of the fullest rank with the GPU's
    memory. "nothing: serve it as it is" is an answer. Of a repo on the Hub only headers are fetched.

    \b
    Examples:
      qconvert advise Qwen/Qwen3-30B-A3B-FP8 --for sglang --gpus 4
      qconvert advise DeepSeek-V3 --for sglang==0.5.23 --gpus 8 --gpu-memory 80GB
      qconvert advise DeepSeek-V3 --for vllm --gpus 8
      qconvert advise DeepSeek-V3 --for ktransformers --gpus 1 --gpu-memory 48GB --cpu-memory 768GB

    Exit code 3 if nothing that was considered loads and fits, 5 if that is not known for the class or
    version.
    """
    from pathlib import Path

    from qconvert import api
    from qconvert.advise.advice import as_json as told
    from qconvert.advise.advice import lines_of
    from qconvert.cli.convert import uncollected
    from qconvert.hub.headers import place_of

    if consumer is None:
        raise click.UsageError("name the runtime: --for sglang, --for vllm or --for ktransformers")
    major, minor = capability.split(".")
    machine = api.Machine(gpus, gpu_memory, cpu_memory, disk, (int(major), int(minor)))
    with place_of(source) as place:
        if place.fetched:
            say(place.summary, err=True)
        with uncollected():
            found = api.advise(Path(place.folder), consumer, machine, **given)
        if as_json:
            say_json(told(found))
        else:
            say_all(place.named(line) for line in lines_of(found))
    return 0 if found.best is not None else NOT_KNOWN if found.not_known else FINDINGS
