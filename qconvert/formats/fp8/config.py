"""The config blocks of FP8, in the forms that runtimes parse."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def fp8_config(
    block: tuple[int, int] | None, left: Iterable[str], *, exponents: bool, inputs: bool = False
) -> dict[str, Any]:
    """The block that DeepSeek and Qwen publish (sglang, vLLM: `layers/quantization/fp8.py`),
    or (None) that of one scale a tensor. `left` are the modules that stay unquantized; `exponents`:
    scales are powers of two; `inputs`: activations have stored scales."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "static" if inputs else "dynamic",
        **({} if block is None else {"weight_block_size": list(block)}),
        **({"scale_fmt": "ue8m0"} if exponents else {}),
        "modules_to_not_convert": list(left),
    }


def fp8_group_config(
    block: tuple[int, int] | None, targets: Iterable[str] = ("Linear",)
) -> dict[str, Any]:
    """An entry of compressed-tensors' `config_groups` (0.19, `quantization/quant_scheme.py`: FP8_BLOCK,
    FP8_DYNAMIC); by default for all linears, `Linear` being their class."""
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    if block is None:
        weights: dict[str, Any] = {**number, "strategy": "channel", "dynamic": False}
        inputs: dict[str, Any] = {**number, "strategy": "token", "dynamic": True}
    else:
        weights = {
            **number, "strategy": "block", "block_structure": list(block), "dynamic": False,
        }  # fmt: skip
        inputs = {**number, "strategy": "group", "group_size": block[1], "dynamic": True}
    return {
        "targets": list(targets),
        "format": "float-quantized",
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }


def fp8_tensor_group_config(targets: Iterable[str], *, inputs: bool) -> dict[str, Any]:
    """The same of one scale a tensor (FP8), for activations too: stored ones, or (not `inputs`) found by
    the runtime."""
    number = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    return {
        "targets": list(targets),
        "format": "float-quantized",
        "weights": {**number, "dynamic": False},
        "input_activations": {**number, "dynamic": not inputs},
        "output_activations": None,
    }
