"""What NVFP4's two dialects call their tensors, and their config blocks as runtimes parse them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qconvert.ops.fp4 import BLOCK, Dialect

# The largest code times the largest block scale.
RANGE = 6.0 * 448.0


@dataclass(frozen=True, slots=True)
class Names:
    """What a dialect calls a matrix's tensors, and the shape of its scalars."""

    weight: str
    scale: str
    global_scale: str
    input: str
    scalar: tuple[int, ...]


NAMES: Mapping[Dialect, Names] = {
    "compressed-tensors": Names(
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", (1,)
    ),
    "modelopt": Names("weight", "weight_scale", "weight_scale_2", "input_scale", ()),
}


def input_scale(amax: float, dialect: Dialect) -> float:
    """A matrix's input scale for the largest size of its inputs: 2688 / amax or amax / 2688."""
    return RANGE / amax if dialect == "compressed-tensors" else amax / RANGE


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
    """modelopt's block, flat as config.json has it (0.47, `torch/export/convert_hf_config.py`; sglang
    0.5.23 reads these keys). `ignore` are names and globs."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4" if inputs else "W4A16_NVFP4",
        "group_size": BLOCK,
        "ignore": list(ignore),
    }


def hybrid_config(block: Mapping[str, Any], kept: Sequence[str], *, inputs: bool) -> dict[str, Any]:
    """A block-FP8 model's block, with NVFP4 experts (sglang 0.5.23 `HybridFp8NvFp4Config`; it
    takes `moe_quant_algo: NVFP4` alone, so without input scales nothing known loads it). `kept` are
    globs of experts that stay FP8."""
    found = {
        **block,
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4" if inputs else "W4A16_NVFP4",
        "group_size": BLOCK,
    }
    return {**found, "exclude_modules": list(kept)} if kept else found
