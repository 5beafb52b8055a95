"""Start of KTransformers on what qconvert makes, and what it reads without conversion.

Options: kvcache-ai's sglang-kt. Stock sglang has the same options but cannot run a current
kt-kernel: it passes `num_gpu_experts` where the kernel expects `gpu_experts_mask` (a TypeError;
ktransformers#1832, #1859, sglang#20516).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from shlex import quote
from typing import Any, Literal, get_args

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

# sglang-kt 0.7.2: draft workers build their model without kt-kernel (`layers/moe/utils.py`,
# speculative_kt_ep_disabled_context).
DRAFT_LAYERS = (
    "--speculative-algorithm NEXTN drafts with them, and reads their experts from the GPU side onto the "
    "GPU, never from the CPU folder. --speculative-algorithm EAGLE3 --speculative-draft-model-path "
    "DRAFT drafts with an EAGLE3 folder in the form that sglang reads."
)


def launch_line(method: str, numa: int, cpu: str, gpu: str) -> str:
    """The command that serves a CPU folder with its GPU side. Values that depend on the machine are in
    angle brackets: its physical cores, and how many experts of a layer its GPU is to hold."""
    return (
        f"{ENVIRONMENT.get(method, '')}python -m sglang.launch_server --model {quote(gpu)} "
        f"--kt-weight-path {quote(cpu)} --kt-method {method} "
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

If GPU has draft layers: {DRAFT_LAYERS}

`--kt-method` and `--kt-threadpool-count` must be as above: the kernel does not check them, and files
for another count or method crash it or are served as noise. {RUNTIME}

`qconvert validate CPU --against SRC --level full` checks this folder against what it was made from.
"""


Native = Literal["rawint4", "gptq-int4", "bf16", "fp8", "fp8-channel", "nvfp4"]
NATIVE: tuple[Native, ...] = get_args(Native)
# `--kt-method` of what kt-kernel reads from a checkpoint.
METHOD: Mapping[Native, str] = {
    "rawint4": "RAWINT4", "gptq-int4": "GPTQ_INT4", "bf16": "BF16", "fp8": "FP8",
    "fp8-channel": "FP8_PERCHANNEL", "nvfp4": "NVFP4",
}  # fmt: skip
# Modules under which kt-kernel's loaders look for experts (`kt_kernel/utils/loader.py`, 0.7.2), below
# `layers.N`: DeepSeek's names, Mixtral's, Mistral's, DeepSeek-V4's.
_AT = r"(model\.|language_model\.model\.|model\.language_model\.)?layers\.\d+"
_PLAIN = r"mlp\.experts\.\d+\.(gate|up|down)_proj"
_MIXTRAL = r"block_sparse_moe\.experts\.\d+\.w[123]"
_ANY = rf"{_PLAIN}|{_MIXTRAL}|experts\.\d+\.w[123]"
_NAMES = {
    "RAWINT4": _PLAIN, "NVFP4": _PLAIN, "MXFP4": r"ffn\.experts\.\d+\.w[123]", "MXFP8": _MIXTRAL,
}  # fmt: skip
# In groups of 128 its kernels crash or give NaN (tests/test_signed_peer.py).
RAWINT4_GROUP = 32
# What the server needs in its environment: kernels of 32 columns a scale do not take 16.
ENVIRONMENT = {"NVFP4": "KT_MXFP4_BACKEND=avx2 "}


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
        method = _integers(checkpoint, module, parameter)
    else:
        method = _floats(checkpoint, name)
    found = method is not None and re.fullmatch(rf"{_AT}\.({_NAMES.get(method, _ANY)})", module)
    return method if found else None


def _floats(checkpoint: Checkpoint, name: str) -> str | None:
    """The method for experts whose first weight has this name."""
    dtypes = {
        checkpoint[n].type.dtype
        for n, place in checkpoint.role_index.places.items()
        if place.expert is not None and place.parameter == "weight"
    }
    if dtypes <= {"I8", "U8"}:  # E2M1, two a byte
        exponents = checkpoint.get(f"{name.removesuffix('weight')}scale")
        if exponents is not None and exponents.type.dtype in ("F8_E8M0", "U8"):
            return "MXFP4"
        return "NVFP4" if f"{name}_scale_2" in checkpoint else None
    if dtypes != {"F8_E4M3"}:
        return "BF16" if dtypes == {"BF16"} else None
    inverse = checkpoint.get(f"{name}_scale_inv")
    if inverse is not None and inverse.type.dtype in ("F8_E8M0", "U8"):
        weight = checkpoint[name].type
        in_blocks = inverse.type.shape == (weight.shape[0], weight.shape[1] // 32)
        return "MXFP8" if in_blocks else None
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
    if method == "RAWINT4" and scheme.group != RAWINT4_GROUP:
        return None
    plain = scheme.symmetric and scheme.actorder != "group" and scheme.group is not None
    return method if plain and scheme.bits == 4 else None
