"""Steps to a checkpoint whose routed experts kt-kernel reads as they are stored: one folder is both the
CPU's and the GPU's side.

Codes in integers are repacked, not quantized again. What kt-kernel reads, and under which names:
`runtimes/ktransformers.py`.
"""

from __future__ import annotations

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import PlanError
from qconvert.models.experts import routed_experts
from qconvert.passes.dequant import Dequant
from qconvert.passes.fp8 import ToFp8
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.relabel import Form, Relabel
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.pass_options import EXPERTS
from qconvert.plan.plan import Pass, Plan
from qconvert.runtimes.ktransformers import METHOD, RAWINT4_GROUP, Native, reads_as_it_is
from qconvert.samples.request import Calibration

# What each is of a source whose experts are stored in these formats: the same codes under other names.
_RELABELLED: dict[Native, tuple[tuple[str, ...], Form]] = {
    "rawint4": (("int-packed", "gptq", "awq"), "compressed-tensors"),
    "gptq-int4": (("int-packed", "gptq", "awq"), "gptq"),
    "nvfp4": (("nvfp4",), "modelopt"),
}


def native_steps(
    checkpoint: Checkpoint, method: Native, calibrate: Calibration | None = None
) -> tuple[Pass, ...]:
    """Passes to a folder that kt-kernel reads with this method; none where it reads the checkpoint so.
    `calibrate` is of INT4 alone. Raises PlanError for a calibration of what is not quantized to it,
    and as `routed_experts` does."""
    if reads_as_it_is(checkpoint) == METHOD[method]:
        return ()
    plan = Plan.identity(checkpoint)
    stored = {getattr(p.weight.decoder, "format", "") for p in routed_experts(plan).projections}
    held, form = _RELABELLED.get(method, ((), "fp8"))
    repacks = stored <= set(held)
    if calibrate is not None and (repacks or method not in ("rawint4", "gptq-int4")):
        raise PlanError("a calibration finds codes of INT4, and none are made here: leave it out")
    if repacks:
        return (Relabel(form),)
    match method:
        case "rawint4":
            return (ExpertsToW4A16(RAWINT4_GROUP, calibrate=calibrate, shared_experts="keep"),)
        case "gptq-int4":
            return (ExpertsToW4A16(packing="gptq", calibrate=calibrate, shared_experts="keep"),)
        case "bf16":
            return (Dequant(),)
        case "fp8":
            return (ToFp8(targets=(EXPERTS,), shared_experts="keep"),)
        case "fp8-channel":
            return (ToFp8("compressed-tensors", None, targets=(EXPERTS,), shared_experts="keep"),)
        case "nvfp4":
            return (ToNvfp4("modelopt", weight_only=True, shared_experts="keep"),)


def check_read(checkpoint: Checkpoint, method: Native) -> None:
    """Raises PlanError where kt-kernel does not read a checkpoint with this method: it is to be, and its
    headers are known."""
    if reads_as_it_is(checkpoint) != METHOD[method]:
        raise PlanError(
            f"kt-kernel would not read the result as {METHOD[method]}: it takes symmetric INT4 in "
            f"adjacent columns (RAWINT4: {RAWINT4_GROUP} a scale), FP8 in blocks of 128 or rows, one "
            "matrix an expert, and names as DeepSeek's, Mixtral's or Mistral's (RAWINT4 and NVFP4: "
            "DeepSeek's); --cpu int4 or int8 take others"
        )
