"""Scales below 0 in the hands of other projects: kt-kernel 0.7.2 computes with a folder's INT4 experts
as they are, in compressed-tensors' form (RAWINT4) and GPTQ's, against numpy in float64;
compressed-tensors 0.19 decompresses them, AutoRound 0.15 makes such scales itself. transformers:
test_w4a16_peer.py, by its case "W4 g32 searched"; loaders of sglang and vLLM:
loaders/test_signed_scales.py.

Run with `pytest -m peer tests/test_signed_peer.py`.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import int_forms
import numpy as np
import pytest
import torch
from checkpoints import Tensor, read_tensors, run_cli
from compressed_peer import decompressed
from kt_machine import needs_avx512
from models import qwen3_moe

from qconvert.cli.demo_checkpoint import heavy_tailed
from qconvert.validators.amx.kt_forward import UNABLE, Job

pytestmark = pytest.mark.peer

HIDDEN, INNER, EXPERTS, TOKENS, CHOICES = 512, 256, 4, 8, 3
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heavy-tailed experts with outlier channels."""
    model = qwen3_moe(hidden=HIDDEN, intermediate=INNER, layers=1, experts=EXPERTS)
    generator = torch.Generator().manual_seed(5)
    for name, (_, shape, _) in model.tensors.items():
        if ".experts." in name:
            bits = heavy_tailed(shape, generator).bfloat16().view(torch.int16).numpy()
            model.tensors[name] = Tensor("BF16", shape, bits.tobytes())
    return model.write(tmp_path_factory.mktemp("signed") / "source")


def packed(source: Path, out: Path, *options: str) -> Path:
    done = run_cli(
        "w4a16", source, out, "--rtn", "--scales", "search", *options, "--jobs", "1"
    )  # fmt: skip
    assert done.code == 0, done.err
    return out


def meant(folder: Path) -> dict[str, Floats]:
    """What each expert's matrix means, read with numpy alone, some of its scales being below 0."""
    found: dict[str, Floats] = {}
    tensors = read_tensors(folder)
    kinds = {"I32": "<i4", "BF16": "<u2", "F16": "<f2", "I64": "<i8"}
    for name in tensors:
        module, _, last = name.rpartition(".")
        if ".experts." not in name or last not in ("weight_packed", "qweight"):
            continue
        parts = {
            part.rpartition(".")[2]: np.frombuffer(one.data, kinds[one.dtype]).reshape(one.shape)
            for part, one in tensors.items()
            if part.rpartition(".")[0] == module
        }
        turned = last == "qweight"
        if not turned:
            bits = parts["weight_scale"].astype(np.uint32) << 16
            parts["weight_scale"] = bits.view(np.float32)
        columns = parts[last].shape[0 if turned else 1] * 8
        values = (
            int_forms.from_gptq(parts, 4, 1)
            if turned
            else int_forms.from_compressed_tensors(parts, 4, columns)
        )
        below = np.mean(parts["scales" if turned else "weight_scale"] < 0)
        assert 0.2 < below < 0.8, (name, below)
        found[module] = values.astype(np.float64)
    return found


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


@needs_avx512
@pytest.mark.parametrize(
    ("method", "options", "backend"),
    [
        ("RAWINT4", ("--group-size", "32"), ""),
        ("GPTQ_INT4", ("--packing", "gptq"), ""),
        # RAWINT4 crashes in kt-kernel 0.7.2's AVX2 form, which reads weights that its wrapper has freed,
        # and in groups of 128 its AVX512 form crashes or gives NaN: positive scales or not.
        ("GPTQ_INT4", ("--packing", "gptq"), "avx2"),
    ],
)
def test_kt_kernel_computes_with_them(
    method: str, options: tuple[str, ...], backend: str, source: Path, tmp_path: Path
) -> None:
    out = packed(source, tmp_path / "out", *options)
    random = np.random.default_rng(3)
    bits = random.standard_normal((TOKENS, HIDDEN), np.float32).view(np.uint32) >> 16
    ids = np.stack([random.permutation(EXPERTS)[:CHOICES] for _ in range(TOKENS)]).astype(np.int64)
    shares = random.random((TOKENS, CHOICES), np.float32)
    np.savez(
        tmp_path / "inputs.npz", allow_pickle=False, hidden=bits.astype(np.uint16), ids=ids,
        shares=shares,
    )  # fmt: skip
    job = Job(
        weights=str(out), layer=0, experts=EXPERTS, hidden=HIDDEN, intermediate=INNER, numa=1,
        method=method, threads=2, inputs=str(tmp_path / "inputs.npz"),
        output=str(tmp_path / "output.npy"), reason=str(tmp_path / "reason"),
    )  # fmt: skip
    job.write(tmp_path / "job.json")
    env = {name: value for name, value in os.environ.items() if not name.startswith("KT_")}
    if backend:
        env["KT_GPTQ_INT4_BACKEND"] = backend
    done = subprocess.run(
        [sys.executable, "-m", "qconvert.validators.amx.kt_forward", tmp_path / "job.json"],
        env=env, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode != UNABLE, Path(job.reason).read_text()
    assert done.returncode == 0, done.stderr[-2000:]
    hidden = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    wanted = layer(meant(out), hidden, ids.astype(np.float64), shares.astype(np.float64))
    found = np.load(job.output).astype(np.float64)
    # Activations are rounded to bf16, or to 127 steps a group.
    assert np.linalg.norm(found - wanted) < 0.03 * np.linalg.norm(wanted)


@pytest.mark.parametrize("group", ["32", "128"])
def test_compressed_tensors_decompresses_them(group: str, source: Path, tmp_path: Path) -> None:
    out = packed(source, tmp_path / "out", "--group-size", group)
    theirs = decompressed(out)
    for module, values in meant(out).items():
        ours = torch.from_numpy(values).bfloat16()
        assert torch.equal(theirs[f"{module}.weight"], ours), module


def test_auto_round_makes_such_scales() -> None:
    """So published checkpoints hold them, and runtimes meet them."""
    theirs: Any = importlib.import_module("auto_round.data_type.int")
    weight = heavy_tailed((64, 256), torch.Generator().manual_seed(1))
    _, scale, _ = theirs.quant_tensor_opt_rtn_sym(weight, bits=4, group_size=32)
    assert 0.2 < float((scale < 0).float().mean()) < 0.8
