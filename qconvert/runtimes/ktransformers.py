"""Start of KTransformers on what qconvert makes, and what it reads without conversion.

Options: kvcache-ai's sglang-kt. Stock sglang has the same options but cannot run a current
kt-kernel: it passes `num_gpu_experts` where the kernel expects `gpu_experts_mask` (a TypeError;
ktransformers#1832, #1859, sglang#20516).
"""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.integer_config import gptq_form, packed_scheme
from qconvert.checkpoint.quantization_config import fp8_scheme
from qconvert.core.errors import PlanError
from qconvert.core.versions import SGLANG

RUNTIME = (
    f"The runtime is kvcache-ai's sglang-kt. Stock sglang (up to {SGLANG.version}) knows these "
    "options and fails with a TypeError: it passes num_gpu_experts to a kt-kernel that takes "
    "gpu_experts_mask. Its loader is not simulated: whether it serves this class is not known."
)


def launch_line(method: str, numa: int, cpu: str, gpu: str) -> str:
    """The command that serves a CPU folder with its GPU side. Values that depend on the machine are in
    angle brackets: its physical cores, and how many experts of a layer its GPU is to hold."""
    return (
        f"python -m sglang.launch_server --model {quote(gpu)} --kt-weight-path {quote(cpu)} "
        f"--kt-method {method} "
        f"--kt-threadpool-count {numa} --kt-cpuinfer <physical cores> --kt-num-gpu-experts <experts> "
        "--kt-max-deferred-experts-per-token 0 --disable-shared-experts-fusion"
    )


def readme(fact: Mapping[str, Any], gpu: str) -> str:
    """README.md of a CPU folder. `fact` is its manifest's `amx` block, `gpu` what the GPU side is."""
    line = launch_line(fact["method"], fact["numa"], "CPU", "GPU")
    layers = fact["layers"]
    return f"""# Routed experts for KTransformers: {fact["method"]}, {fact["numa"]} NUMA

Made by qconvert. This folder holds the routed experts only ({fact["experts"]} a layer, layers \
{layers[0]} to {layers[-1]}, hidden size {fact["hidden_size"]}, intermediate size \
{fact["intermediate_size"]}); all other layers are read from the GPU side: {gpu}.

With CPU as this folder and GPU as that one:

    {line}

`--kt-method` and `--kt-threadpool-count` must be as above: the kernel does not check them, and files
for another count or method crash it or are served as noise. {RUNTIME}

`qconvert validate CPU --against SRC --level full` checks this folder against what it was made from.
"""


def reads_as_it_is(checkpoint: Checkpoint) -> str | None:
    """The `--kt-method` with which kt-kernel reads a checkpoint's experts without conversion,
    None if it reads none (`kt_kernel/utils/loader.py`: it looks for one matrix per expert)."""
    names = (
        name for name, place in checkpoint.role_index.places.items() if place.expert is not None
    )
    name = next((n for n in names if n.endswith((".weight", ".weight_packed", ".qweight"))), None)
    if name is None:
        return None
    module, _, parameter = name.rpartition(".")
    if parameter != "weight":
        return _integers(checkpoint, module, parameter)
    dtypes = {
        checkpoint[n].type.dtype
        for n, place in checkpoint.role_index.places.items()
        if place.expert is not None and place.parameter == "weight"
    }
    if dtypes != {"F8_E4M3"}:
        return "BF16" if dtypes == {"BF16"} else None
    try:
        block = fp8_scheme(checkpoint).block
    except PlanError:
        return None
    if block is not None:
        # The loader takes only blocks of this size and does not check.
        scales = f"{name}_scale_inv", f"{name}_scale"
        return "FP8" if block == (128, 128) and any(s in checkpoint for s in scales) else None
    scale = checkpoint.get(f"{name}_scale")
    return "FP8_PERCHANNEL" if scale is not None and scale.type.numel > 1 else None


def _integers(checkpoint: Checkpoint, module: str, parameter: str) -> str | None:
    """Symmetric INT4 with adjacent groups; zero points and g_idx are read but never applied."""
    try:
        if parameter == "qweight":
            scheme, method = gptq_form(checkpoint, module).scheme, "GPTQ_INT4"
        else:
            scheme, method = packed_scheme(checkpoint, module), "RAWINT4"
    except PlanError:
        return None
    if parameter == "weight_packed" and f"{module}.weight_scale" not in checkpoint:
        return None
    plain = scheme.symmetric and scheme.actorder != "group" and scheme.group is not None
    return method if plain and scheme.bits == 4 else None
