"""Small models of experts, tiles that qconvert makes of one, and one expert by kt-kernel's converter,
in a process, and by ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import amx_rows
import kt_convert
import numpy as np
from checkpoints import Model, Tensor, run_cli
from checkpoints import tensor as any_tensor
from ops_harness import buffer, run_op

from qconvert.core.dtypes import TensorType
from qconvert.formats.amx.encode import Amx
from qconvert.formats.amx.format import Method

HIDDEN, INTERMEDIATE, LAYERS, EXPERTS = 128, 128, 2, 4
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray[Any, Any]]


def gaussian(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return random.standard_normal(shape)


def student(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Heavy tails, as trained weights have them."""
    return random.standard_t(4, shape)


def moe(
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    *,
    layers: int = LAYERS,
    experts: int = EXPERTS,
    draw: Draw = gaussian,
    stacked: bool = False,
    drafts: int = 0,
) -> Model:
    """Experts and little else, in BF16: a matrix each, or stacks [E, 2I, H] and [E, H, I]."""
    random = np.random.default_rng(7)

    def matrix(*shape: int) -> Tensor:
        values = draw(random, shape) / shape[-1] ** 0.5
        return Tensor("BF16", shape, amx_rows.bf16(values).tobytes())

    tensors = {"model.embed_tokens.weight": any_tensor("BF16", 16, hidden)}
    homes = [f"model.layers.{layer}" for layer in range(layers)]
    homes += [f"mtp.layers.{layer}" for layer in range(drafts)]
    for home in homes:
        at = f"{home}.mlp.experts"
        if stacked:
            tensors[f"{at}.gate_up_proj"] = matrix(experts, 2 * intermediate, hidden)
            tensors[f"{at}.down_proj"] = matrix(experts, hidden, intermediate)
            continue
        for expert in range(experts):
            tensors[f"{at}.{expert}.gate_proj.weight"] = matrix(intermediate, hidden)
            tensors[f"{at}.{expert}.up_proj.weight"] = matrix(intermediate, hidden)
            tensors[f"{at}.{expert}.down_proj.weight"] = matrix(hidden, intermediate)
    config = {
        "model_type": "qwen3_5_moe_text" if stacked or drafts else "qwen3_moe",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_experts": experts,
        "moe_intermediate_size": intermediate,
        "mtp_num_hidden_layers": drafts,
    }
    return Model(config, tensors)


def made(source: Path, out: Path, method: str, *more: str, numa: int = 1) -> Path:
    words = ["--method", method, "--numa", str(numa), "--jobs", "1", *more]
    result = run_cli("amx", source, out, *words)
    assert result.code == 0, result.err
    return out


def run_kt(method: Method, numa: int, folder: Path) -> subprocess.CompletedProcess[str]:
    name = {"int4": "AMXINT4", "int8": "AMXINT8"}[method]
    command = [sys.executable, kt_convert.__file__, name, str(numa), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def layer_of(intermediate: int, hidden: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """One expert, as bf16 bits, with every kind of row there is."""
    return {
        "gate": amx_rows.matrix(intermediate, hidden, seed)[None],
        "up": amx_rows.matrix(intermediate, hidden, seed + 1)[None],
        "down": amx_rows.matrix(hidden, intermediate, seed + 2)[None],
    }


def ours(method: Method, numa: int, name: str, bits: np.ndarray[Any, Any]) -> list[bytes]:
    """Weight and scale of each NUMA shard, in turn."""
    if name == "down":
        kind = TensorType("BF16", bits.shape)
        return run_op(Amx(method, numa), [buffer(kind, bits.tobytes())], 1 << 20)[0]
    found = []
    for rows in np.split(bits, numa):
        kind = TensorType("BF16", rows.shape)
        found += run_op(Amx(method), [buffer(kind, rows.tobytes())], 1 << 20)[0]
    return found
