"""Folders as compressed-tensors reads them, for peer tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]


def tensors(folder: Path) -> Tensors:
    found: Tensors = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def parsed(folder: Path) -> Any:
    """The folder's quantization block as compressed-tensors reads it."""
    from compressed_tensors.quantization import QuantizationConfig

    block = json.loads((folder / "config.json").read_bytes())["quantization_config"]
    block.pop("linear_fp8_config", None)
    return QuantizationConfig.model_validate(block)


def decompressed(folder: Path) -> Tensors:
    """Every tensor of a folder, packed weights as bf16 by compressed-tensors' own hand."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    scheme = parsed(folder).config_groups["group_0"]
    stored = tensors(folder)
    found: Tensors = {}
    for name, value in stored.items():
        module, _, parameter = name.rpartition(".")
        if f"{module}.weight_packed" not in stored or parameter == "bias":
            found[name] = value
        elif parameter == "weight_packed":
            parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
            state = {p: stored[f"{module}.{p}"] for p in parts if f"{module}.{p}" in stored}
            made = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
            assert made.dtype == torch.bfloat16
            found[f"{module}.weight"] = made
    return found
