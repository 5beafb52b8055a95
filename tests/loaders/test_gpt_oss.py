"""Why gpt-oss's experts are not quantized: with biases, no loader takes them in FP8. Each fact is the
runtimes' own loader over a tiny folder made by hand. Skips itself without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families.classes import config
from families.tiny import saved
from safetensors.torch import load_file, save_file

from loaders.client import PYTHON, Server

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs sglang's loader: make loaders"),
]

_CODES = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "channel",
    "dynamic": False,
}
_INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
BLOCKS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": _CODES, "input_activations": _INPUTS}
        },
        "ignore": ["re:.*self_attn.*", "re:.*router.*", "lm_head"],
    },
    "fp8": {
        "quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
        "modules_to_not_convert": [
            *(f"model.layers.{n}.self_attn.{p}_proj" for n in range(4) for p in ("q", "k", "v", "o")),
            "lm_head",
        ],
    },
}  # fmt: skip


def fp8(folder: Path, method: str) -> Path:
    """Stacks as the class publishes them, [E, inputs, outputs], in FP8, a scale a column or a block."""
    given = {key: value for key, value in config("gpt_oss").items() if key != "model_type"}
    saved("gpt_oss", folder, given)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weight = tensors[name].float()
        experts, inputs, outputs = weight.shape
        if method == "fp8":
            tensors[f"{name}_scale_inv"] = torch.ones(experts, inputs // 128, outputs // 128)
        else:
            scale = tensors[f"{name}_scale"] = weight.abs().amax(1, keepdim=True) / 448
            weight = weight / scale
        tensors[name] = weight.to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_bytes())
    said |= {"swiglu_limit": 7.0, "quantization_config": BLOCKS[method]}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_sglang_leaves_the_biases_unread(tmp_path: Path, hopper: Server) -> None:
    loaded = hopper.load(fp8(tmp_path / "model", "compressed-tensors"))
    assert loaded.error is None
    assert loaded.unwritten == ()
    assert len(loaded.unused) == 8
    assert all(name.endswith("_proj_bias") for name in loaded.unused)


def test_vllm_has_no_parameter_for_the_biases(tmp_path: Path, vllm: Server) -> None:
    loaded = vllm.load(fp8(tmp_path / "model", "compressed-tensors"))
    assert loaded.error is not None
    assert "experts.w2_bias" in loaded.error


def test_vllm_reads_no_scales_of_blocks(tmp_path: Path, vllm: Server) -> None:
    loaded = vllm.load(fp8(tmp_path / "model", "fp8"))
    assert loaded.error is None
    assert len(loaded.unwritten) == len(loaded.unused) == 8
    assert all(name.endswith("_scale_inv") for name in (*loaded.unwritten, *loaded.unused))
