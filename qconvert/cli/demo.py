"""The main conversions on an embedded sample: an FP8 checkpoint is fused for sglang, then dequantized;
each result is validated, and the last is compared with torch's own decoding."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from qconvert import api
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.cli.demo_checkpoint import write_sample
from qconvert.cli.plan_report import Rates, plan_lines
from qconvert.core.errors import OutputError, RunError
from qconvert.core.extras import require
from qconvert.core.say import say, say_report
from qconvert.passes.dequant import Dequant
from qconvert.passes.fuse import Fuse
from qconvert.plan.plan import Pass
from qconvert.validation.reports import render


def run_demo(folder: Path | None) -> None:
    """Make the sample, fuse it, dequantize it, and validate both results. Raises QConvertError if
    anything does not hold.

    The files are kept in `folder`; without it they go to a temporary folder and are removed.
    """
    what = "the demo makes weights with torch, and compares with it"
    require("all", what, "torch", error=RunError)
    if folder is not None:
        if folder.exists() and any(folder.iterdir()):
            raise OutputError(f"{folder} is not empty; choose a new folder for the demo")
        _demo(folder)
        return
    scratch = Path(tempfile.mkdtemp(prefix="qconvert-demo-"))
    try:
        _demo(scratch)
    finally:
        shutil.rmtree(scratch)


def _demo(folder: Path) -> None:
    source, fused, plain = (folder / n for n in ("sample-fp8", "sample-fused", "sample-bf16"))
    write_sample(source)
    say("$ qconvert fuse sample-fp8 sample-fused --for sglang")
    _convert(source, fused, Fuse(consumer="sglang"))
    _validate(source, fused)
    say("", "$ qconvert dequant sample-fused sample-bf16")
    _convert(fused, plain, Dequant())
    _validate(fused, plain)
    count = _compare_with_torch(fused, plain)
    say(f"proved: {count} weights equal torch's own decoding, bit for bit")


def _convert(source: Path, out: Path, step: Pass) -> None:
    """Plan, show the plan, run it."""
    planned = api.plan(step, source, out, jobs=1)
    (folder,) = planned.folders
    lines = plan_lines(folder.ready, out.name, Rates(None, None), folder.verdict)
    say(*(line.replace(str(source), source.name) for line in lines))
    (result,) = api.carry_out(planned)
    say("", f"wrote {out.name}: {', '.join(result.files)}")


def _validate(source: Path, out: Path) -> None:
    """Validate at every level there is. Raises RunError for anything less than proved."""
    say("", f"$ qconvert validate {out.name} --against {source.name} --level full")
    report = api.validate(out, source, level="full")
    say_report(render(report, "text"), "text")
    if report.findings:
        raise RunError(f"{out.name} failed validation")


def _compare_with_torch(source: Path, out: Path) -> int:
    """Dequantize every FP8 weight again with torch's cast, and compare. Returns how many."""
    import torch
    from safetensors import safe_open

    original, made = Checkpoint.open(source), Checkpoint.open(out)

    def load(checkpoint: Checkpoint, name: str) -> torch.Tensor:
        file = checkpoint.shards[checkpoint[name].shard].path
        with safe_open(file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor

    weights = [name for name in original if f"{name}_scale_inv" in original]
    for name in weights:
        weight, scale = load(original, name), load(original, f"{name}_scale_inv")
        rows, columns = weight.shape
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        if not torch.equal((weight.float() * spread).bfloat16(), load(made, name)):
            raise RunError(f"tensor {name!r} differs from torch's decoding")
    return len(weights)
