"""A layer's routed experts in kt-kernel's own client, in a process, and in numpy's float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from checkpoints import Model, Tensor
from models import qwen3_moe

from qconvert.cli.demo import heavy_tailed
from qconvert.validators.amx.kt_forward import UNABLE, Job

HIDDEN, INNER, EXPERTS, TOKENS, CHOICES = 512, 256, 4, 8, 3
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def heavy_tailed_experts() -> Model:
    """A model with one layer, whose experts have outlier channels."""
    model = qwen3_moe(hidden=HIDDEN, intermediate=INNER, layers=1, experts=EXPERTS)
    generator = torch.Generator().manual_seed(5)
    for name, (_, shape, _) in model.tensors.items():
        if ".experts." in name:
            bits = heavy_tailed(shape, generator).bfloat16().view(torch.int16).numpy()
            model.tensors[name] = Tensor("BF16", shape, bits.tobytes())
    return model


def layer(weights: dict[str, Floats], hidden: Floats, ids: Floats, shares: Floats) -> Floats:
    """The routed experts of layer 0 for tokens [T, H]."""
    result = np.zeros_like(hidden)
    for token, choice in np.ndindex(ids.shape):
        at = f"model.layers.0.mlp.experts.{int(ids[token, choice])}"
        gate = weights[f"{at}.gate_proj"] @ hidden[token]
        up = weights[f"{at}.up_proj"] @ hidden[token]
        made = weights[f"{at}.down_proj"] @ (gate / (1 + np.exp(-gate)) * up)
        result[token] += shares[token, choice] * made
    return result


def error_of_kt(
    method: str, folder: Path, meant: dict[str, Floats], room: Path, **environment: str
) -> float:
    """Distance of kt-kernel's answer by what a folder holds from that by what its codes mean, as a part
    of its norm. Activations are rounded to bf16, or to 127 steps a group."""
    random = np.random.default_rng(3)
    bits = random.standard_normal((TOKENS, HIDDEN), np.float32).view(np.uint32) >> 16
    ids = np.stack([random.permutation(EXPERTS)[:CHOICES] for _ in range(TOKENS)]).astype(np.int64)
    shares = random.random((TOKENS, CHOICES), np.float32)
    np.savez(
        room / "inputs.npz", allow_pickle=False, hidden=bits.astype(np.uint16), ids=ids,
        shares=shares,
    )  # fmt: skip
    job = Job(
        weights=str(folder), layer=0, experts=EXPERTS, hidden=HIDDEN, intermediate=INNER, numa=1,
        method=method, threads=2, inputs=str(room / "inputs.npz"),
        output=str(room / "output.npy"), reason=str(room / "reason"),
    )  # fmt: skip
    job.write(room / "job.json")
    env = {name: value for name, value in os.environ.items() if not name.startswith("KT_")}
    done = subprocess.run(
        [sys.executable, "-m", "qconvert.validators.amx.kt_forward", room / "job.json"],
        env=env | environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode != UNABLE, Path(job.reason).read_text()
    assert done.returncode == 0, done.stderr[-2000:]
    hidden = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    wanted = layer(meant, hidden, ids.astype(np.float64), shares.astype(np.float64))
    found = np.load(job.output).astype(np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
