"""A Qwen3-MoE of any depth, some 151 MB a layer, whose layers are alike: written a tensor at a time, for
tests of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from qconvert.checkpoint.safetensors import build_header
from qconvert.cli.demo import heavy_tailed
from qconvert.core.dtypes import TensorType

HIDDEN, MIDDLE, EXPERTS = 768, 1024, 32


def config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 512,
        "hidden_size": HIDDEN, "moe_intermediate_size": MIDDLE, "intermediate_size": MIDDLE,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "num_experts": EXPERTS, "num_experts_per_tok": 2, "torch_dtype": "bfloat16",
        "max_position_embeddings": 256,
    }  # fmt: skip


def write_model(folder: Path, layers: int) -> int:
    """A Qwen3-MoE whose layers are alike. Returns its size in bytes."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (256, HIDDEN), "self_attn.k_proj": (128, HIDDEN),
        "self_attn.v_proj": (128, HIDDEN), "self_attn.o_proj": (HIDDEN, 256),
        "self_attn.q_norm": (64,), "self_attn.k_norm": (64,), "mlp.gate": (EXPERTS, HIDDEN),
    }  # fmt: skip
    for expert in range(EXPERTS):
        shapes[f"mlp.experts.{expert}.gate_proj"] = (MIDDLE, HIDDEN)
        shapes[f"mlp.experts.{expert}.up_proj"] = (MIDDLE, HIDDEN)
        shapes[f"mlp.experts.{expert}.down_proj"] = (HIDDEN, MIDDLE)
    up, down = heavy_tailed((MIDDLE, HIDDEN), generator), heavy_tailed((HIDDEN, MIDDLE), generator)

    def made(shape: tuple[int, ...]) -> torch.Tensor:
        if shape in (up.shape, down.shape):
            return up if shape == up.shape else down
        return torch.ones(shape) if len(shape) == 1 else heavy_tailed(shape, generator)

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(layers)))
    names = {
        f"model.layers.{n}.{name}.weight": s for n in range(layers) for name, s in shapes.items()
    }
    names |= {"model.embed_tokens.weight": (512, HIDDEN), "model.norm.weight": (HIDDEN,)}
    names["lm_head.weight"] = (512, HIDDEN)
    header, _ = build_header(
        [(name, TensorType("BF16", shape)) for name, shape in names.items()], {"format": "pt"}
    )
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(header)
        for shape in names.values():
            stream.write(made(shape).bfloat16().view(torch.uint8).numpy().tobytes())
    return (folder / "model.safetensors").stat().st_size


# Not ru_maxrss: that counts what the process was before exec, a copy of the tests' own.
_PEAK = """
from pathlib import Path
status = Path("/proc/self/status").read_text().splitlines()
print(int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024)
"""


def measured(code: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that runs some code; the last it prints is its largest resident size in bytes."""
    return subprocess.run(
        [sys.executable, "-c", code + _PEAK, *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def said_by(code: str, *words: object, **environment: str) -> list[str]:
    """All that such a process prints. It must succeed."""
    done = measured(code, *words, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()
