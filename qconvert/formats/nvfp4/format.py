"""NVFP4 in either dialect: how it is read, its input scales, its config blocks as runtimes parse them.

Names and types say what is NVFP4: codes in U8, an E4M3 scale for each 16 columns, and a global scale in
F32 under its dialect's name. The config has nothing to add, since the format has one block size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qconvert import __version__
from qconvert.checkpoint.prepared import QUANT_METHOD
from qconvert.core.errors import PlanError
from qconvert.core.names import with_fused_names
from qconvert.core.parameter_names import NVFP4, Dialect
from qconvert.core.versions import COMPRESSED_TENSORS, LLM_COMPRESSOR, MODELOPT, SGLANG
from qconvert.formats.base import FolderTensors, Format, Read, stored
from qconvert.ops.fp4 import BLOCK
from qconvert.plan.plan import Plan

_BEFORE = "pre_quant_scale"  # of modelopt's AWQ, a number a column
_FP8_LISTS = ("modules_to_not_convert", "ignored_layers")

# The largest code times the largest block scale.
RANGE = 6.0 * 448.0


def read(plan: Plan, module: str) -> Read | None:
    """A module with a global scale."""
    for dialect, own in NVFP4.items():
        last = f"{module}.{own.global_scale}"
        if last not in plan.tensors:
            continue
        from qconvert.formats.nvfp4.decode import DequantNvfp4

        names = [f"{module}.{own.weight}", f"{module}.{own.scale}", last]
        for name in names:
            if name not in plan.tensors:
                raise PlanError(f"{name!r} is missing, and {last!r} says that {module!r} is NVFP4")
        before = f"{module}.{_BEFORE}"
        if before in plan.tensors:
            raise PlanError(
                f"{before!r}: inputs are multiplied by it before {module!r}, whose weight alone says "
                "nothing then: start from the BF16 release"
            )
        return stored(plan, names, DequantNvfp4(dialect)), tuple(names)
    return None


def _label(folder: FolderTensors, module: str, parameter: str) -> str | None:
    """A matrix with a global scale of either dialect."""
    if parameter not in ("weight", "weight_packed"):
        return None
    scales = (f"{module}.{names.global_scale}" for names in NVFP4.values())
    return "NVFP4" if any(scale in folder.tensors for scale in scales) else None


def _prepared_label(folder: FolderTensors, module: str, parameter: str) -> str | None:
    """Experts of a layer in the order of trtllm-gen's kernels (contrib/trtllm_gen)."""
    block = folder.checkpoint.config.get("quantization_config")
    prepared = isinstance(block, Mapping) and block.get("quant_method") == QUANT_METHOD
    return "NVFP4 (trtllm-gen)" if prepared and module.endswith(".experts") else None


def input_scale(amax: float, dialect: Dialect) -> float:
    """A matrix's input scale for the largest size of its inputs: 2688 / amax or amax / 2688."""
    return RANGE / amax if dialect == "compressed-tensors" else amax / RANGE


def constant_input(value: float, dialect: Dialect) -> float:
    """A constant multiplier, as modelopt's `input_scale` is, as the dialect stores it."""
    return 1 / value if dialect == "compressed-tensors" else value


def hf_quant_config(block: Mapping[str, Any]) -> str:
    """hf_quant_config.json for modelopt's block of config.json. Both say the same under other keys
    (modelopt, `torch/export/quant_utils.py` `get_quant_config`, which makes the file, and
    `convert_hf_config.py`, which makes the block of it). TensorRT-LLM reads the file alone; of sglang
    and vLLM it is asked for where config.json has no block."""
    inner = {key: value for key, value in block.items() if key not in ("quant_method", "ignore")}
    cache = inner.pop("kv_cache_quant_algo", None)
    stated = {
        "quant_algo": inner.pop("quant_algo"),
        "kv_cache_quant_algo": "FP8" if inner.pop("kv_cache_scheme", None) else cache,
        **inner,
        "exclude_modules": list(block.get("ignore", ())),
    }
    whole = {"producer": {"name": "qconvert", "version": __version__}, "quantization": stated}
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def group_config(targets: Sequence[str], *, inputs: bool) -> dict[str, Any]:
    """An entry of compressed-tensors' `config_groups` (0.19, `quantization/quant_scheme.py` NVFP4 and
    NVFP4A16). `inputs` says that activations are quantized too, with the input scales stored."""
    common = {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group",
        "group_size": BLOCK, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    return {
        "targets": list(targets),
        "format": "nvfp4-pack-quantized",
        "weights": {**common, "dynamic": False},
        "input_activations": {**common, "dynamic": "local"} if inputs else None,
        "output_activations": None,
    }


def modelopt_config(ignore: Sequence[str], *, inputs: bool) -> dict[str, Any]:
    """modelopt's block, flat as config.json has it (`torch/export/convert_hf_config.py`; sglang
    reads these keys). `ignore` are names and globs."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4" if inputs else "W4A16_NVFP4",
        "group_size": BLOCK,
        "ignore": list(ignore),
    }


def mixed_config(
    block: Mapping[str, Any],
    ignore: Sequence[str],
    packed: Iterable[str],
    fp8: Iterable[str],
    *,
    inputs: bool,
) -> dict[str, Any]:
    """NVFP4 matrices beside block FP8, an entry for each layer: modelopt's MIXED_PRECISION as sglang
    reads it (`ModelOptMixedPrecisionConfig`; it takes config.json's block only with
    `quantized_layers` and a statement on the KV cache). `inputs`: activations are quantized too.
    `packed` and `fp8` are modules; routed experts are one entry a layer. `block` is the source's, whose
    block size stays stated for readers of FP8."""
    layers: dict[str, dict[str, Any]] = {}
    size = block["weight_block_size"]
    # Shared experts that a class does not fuse with the routed ones are one layer of gate and up.
    for module in with_fused_names(packed):
        algorithm = "NVFP4" if inputs else "W4A16_NVFP4"
        layers[_holder(module)] = {"quant_algo": algorithm, "group_size": BLOCK}
    for module in with_fused_names(fp8):
        layers.setdefault(_holder(module), {"quant_algo": "FP8_PB_WO", "group_size": size[1]})
    return {
        **{key: value for key, value in block.items() if key not in _FP8_LISTS},
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "group_size": BLOCK,
        "kv_cache_quant_algo": None,
        "ignore": list(ignore),
        "quantized_layers": layers,
    }


def _holder(module: str) -> str:
    """The module that runtimes build: of a routed expert's matrix, all experts of its layer."""
    before, experts, _ = module.partition(".experts.")
    return f"{before}.experts" if experts else module


_EQUALS = {
    "compressed-tensors": (
        f"{COMPRESSED_TENSORS} NVFP4PackedCompressor, with {LLM_COMPRESSOR}'s observer"
    ),
    "modelopt": f"nvidia-{MODELOPT}",
}
FORMATS = tuple(
    Format(
        name="nvfp4" if dialect == "compressed-tensors" else f"nvfp4-{dialect}", title="NVFP4",
        parameters=(names.weight, names.scale, names.global_scale), mark=names.global_scale,
        codes=("U8",), cut=(1, 16), order=20, equals=_EQUALS[dialect], read=read, label=_label,
    )
    for dialect, names in NVFP4.items()
) + (
    Format(
        name="nvfp4-trtllm-gen", title="NVFP4 (trtllm-gen)", codes=("U8",), cut=(0, 0), order=20,
        parameters=("w13_weight", "w2_weight", "w13_weight_packed", "w2_weight_packed"),
        equals=f"flashinfer, as {SGLANG} calls it", label=_prepared_label,
    ),
)  # fmt: skip
