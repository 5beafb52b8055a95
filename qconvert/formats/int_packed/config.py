"""The config blocks of integer formats, in the form that runtimes parse."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from qconvert.core.int_scheme import IntScheme
from qconvert.core.names import with_fused_names


def group_config(scheme: IntScheme, targets: Iterable[str]) -> dict[str, Any]:
    """An entry of compressed-tensors' `config_groups` (0.19, `quantization/quant_scheme.py`)."""
    return {
        "targets": list(targets),
        "weights": {
            "num_bits": scheme.bits,
            "type": "int",
            "symmetric": scheme.symmetric,
            "strategy": "channel" if scheme.group is None else "group",
            "group_size": scheme.group,
            "actorder": scheme.actorder,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
        "format": "pack-quantized",
    }


def int8_group_config(targets: Iterable[str]) -> dict[str, Any]:
    """An entry of compressed-tensors' `config_groups` (0.19, `quantization/quant_scheme.py` INT8_W8A8):
    a scale a row, and activations scaled by token."""
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "targets": list(targets),
        "format": "int-quantized",
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }


def gptq_config(scheme: IntScheme, version: int, dynamic: Iterable[str]) -> dict[str, Any]:
    """The block of GPTQ's own form, as AutoGPTQ and GPTQModel write it (sglang and vLLM read
    it). `dynamic` are patterns of modules that stay unquantized: GPTQModel's `-:`."""
    return {
        "quant_method": "gptq",
        "bits": scheme.bits,
        "group_size": -1 if scheme.group is None else scheme.group,
        "desc_act": scheme.actorder == "group",
        "sym": scheme.symmetric,
        "lm_head": False,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "pack_dtype": "int32",
        "dynamic": {f"-:{pattern}": {} for pattern in dynamic},
    }


def left_pattern(modules: Iterable[str]) -> str:
    """A pattern of just these modules, under the names that runtimes fuse them to as well. It spells no
    `mtp`: at the sight of it vLLM (`models/qwen3_5_mtp.py`) builds the whole draft unquantized."""
    names = (re.escape(name).replace("mtp", "mt[p]") for name in with_fused_names(modules))
    return f"^(?:{'|'.join(names)})$"
