"""Against flashinfer 0.7.2.post1: its own functions order rows and scales as ours do, for the sizes of
published models and others. A stock loader refuses what is prepared.

flashinfer's Python part runs without a GPU. Its wheel is 62 MB and unpacks to 546, so it is not part of
`make peers`: pip install --no-deps -r requirements-peers-flashinfer.txt. Then `pytest -m peer
tests/test_trtllm_peer.py`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import read_tensors, run_cli
from models import nvfp4_moe
from ops_harness import buffer, run_op

from qconvert.contrib.trtllm_gen.layout import Rows, Scales, row_index
from qconvert.core.dtypes import TensorType
from qconvert.ops.gather import Gather, Order

pytestmark = pytest.mark.peer

_TILE = 128
# (hidden, intermediate): DeepSeek-V3 and Kimi-K2, Qwen3-30B, Qwen3-235B, Qwen3-Next, GLM-4.5 and Air,
# MiniMax, Mixtral; and shares of eight ranks, and what no model has.
SHAPES = [
    (7168, 2048), (2048, 768), (4096, 1536), (2048, 512), (5120, 1536), (4096, 1408), (3072, 1536),
    (4096, 14336), (7168, 256), (4096, 192), (2048, 64), (2048, 128), (128, 64), (128, 128),
    (256, 64), (384, 320), (640, 448), (1152, 832), (6144, 2560), (8192, 3072), (6144, 2048),
    (12288, 704), (1024, 16384), (896, 1088),
]  # fmt: skip


@pytest.fixture(scope="module")
def core() -> Any:
    return pytest.importorskip(
        "flashinfer.fused_moe.core", reason="requirements-peers-flashinfer.txt is not installed"
    )


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("hidden", "intermediate"), SHAPES)
def test_permutations(core: Any, hidden: int, intermediate: int, gated: bool) -> None:
    """Whole maps of w13 and w2, of weights and of scales. flashinfer's begin from [w3; w1], ours from
    the checkpoint's [w1; w3]: half the rows on, or back."""
    rows = intermediate * (1 + gated)
    w13 = torch.empty(rows, hidden // 2, dtype=torch.uint8)
    w2 = torch.empty(hidden, intermediate // 2, dtype=torch.uint8)
    s13 = torch.empty(rows, hidden // 16, dtype=torch.uint8)
    s2 = torch.empty(hidden, intermediate // 16, dtype=torch.uint8)
    ours = torch.from_numpy(row_index(rows, gated))
    if gated:
        ours = (ours + rows // 2) % rows
    weights = core._maybe_get_cached_w3_w1_permute_indices({}, w13, _TILE, None, gated)
    assert torch.equal(ours, weights)
    if rows % 128 == 0:
        scales = core._maybe_get_cached_w3_w1_permute_indices({}, s13, _TILE, 16, gated)
        assert torch.equal(ours, scales)
    down = torch.from_numpy(row_index(hidden, False))
    assert torch.equal(down, core.get_w2_permute_indices_with_cache({}, w2, _TILE))
    assert torch.equal(down, core.get_w2_permute_indices_with_cache({}, s2, _TILE, 16))


def gathered(order: Order, *halves: torch.Tensor) -> torch.Tensor:
    ins = [buffer(TensorType("U8", tuple(h.shape)), bytes(h.numpy().tobytes())) for h in halves]
    ((made,), _) = run_op(Gather(order), ins, 1 << 20)
    rows = sum(half.shape[0] for half in halves)
    return torch.from_numpy(np.frombuffer(made, np.uint8).reshape(rows, -1).copy())


def drawn(rows: int, columns: int) -> torch.Tensor:
    data = bytearray(random.Random(rows + columns).randbytes(rows * columns))
    return torch.frombuffer(data, dtype=torch.uint8).reshape(rows, columns)


@pytest.mark.parametrize(("hidden", "intermediate"), [(7168, 2048), (4096, 1536), (640, 448)])
def test_weights(core: Any, hidden: int, intermediate: int) -> None:
    """The bytes, through the functions by which flashinfer's own tests prepare weights."""
    fp4 = pytest.importorskip("flashinfer.quantization.fp4_quantization")
    w1, w3 = drawn(intermediate, hidden // 2), drawn(intermediate, hidden // 2).flip(0)
    turned = core.reorder_rows_for_gated_act_gemm(torch.cat([w3, w1]))
    assert torch.equal(gathered(Rows(True), w1, w3), fp4.shuffle_matrix_a(turned, _TILE))
    w2 = drawn(hidden, intermediate // 2)
    assert torch.equal(gathered(Rows(False), w2), fp4.shuffle_matrix_a(w2, _TILE))


@pytest.mark.parametrize(("hidden", "intermediate"), [(7168, 2048), (4096, 1536), (640, 448)])
def test_scales(core: Any, hidden: int, intermediate: int) -> None:
    """Its interleaving is a CUDA kernel; its references read what that writes."""
    gemm = pytest.importorskip("flashinfer.trace.templates.gemm")
    utils = pytest.importorskip("flashinfer.utils")
    s1, s3 = drawn(intermediate, hidden // 16), drawn(intermediate, hidden // 16).flip(0)
    turned = core.reorder_rows_for_gated_act_gemm(torch.cat([s3, s1]))
    found = utils.get_shuffle_matrix_sf_a_row_indices(turned, _TILE)
    made = gathered(Scales(True), s1, s3)
    assert torch.equal(gemm._unswizzle_sf_128x4(made, *made.shape), turned[found])
    s2 = drawn(hidden, intermediate // 16)
    made = gathered(Scales(False), s2)
    wanted = s2[utils.get_shuffle_matrix_sf_a_row_indices(s2, _TILE)]
    assert torch.equal(gemm._unswizzle_sf_128x4(made, *made.shape), wanted)


def test_a_folder_of_two_layers(core: Any, tmp_path: Path) -> None:
    """From the command line, every expert."""
    fp4 = pytest.importorskip("flashinfer.quantization.fp4_quantization")
    model = nvfp4_moe(hidden=384, intermediate=192)
    out = tmp_path / "out"
    assert run_cli("prepare", "trtllm-gen", model.write(tmp_path / "source"), out).code == 0
    made = read_tensors(out)

    def weight(at: str) -> torch.Tensor:
        value = model.tensors[f"{at}.weight"]
        return torch.frombuffer(bytearray(value.data), dtype=torch.uint8).reshape(value.shape)

    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        first, second = [], []
        for expert in range(3):
            w1, w3, w2 = (
                weight(f"{at}.{expert}.{p}") for p in ("gate_proj", "up_proj", "down_proj")
            )
            turned = core.reorder_rows_for_gated_act_gemm(torch.cat([w3, w1]))
            first.append(fp4.shuffle_matrix_a(turned, _TILE))
            second.append(fp4.shuffle_matrix_a(w2, _TILE))
        assert made[f"{at}.w13_weight"].data == torch.stack(first).numpy().tobytes()
        assert made[f"{at}.w2_weight"].data == torch.stack(second).numpy().tobytes()


def test_transformers_refuses_it(tmp_path: Path) -> None:
    """As any loader does that asks its list of methods."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    out = tmp_path / "out"
    assert run_cli("prepare", "trtllm-gen", nvfp4_moe().write(tmp_path / "source"), out).code == 0
    block = json.loads((out / "config.json").read_bytes())["quantization_config"]
    with pytest.raises(ValueError, match="Unknown quantization type, got qconvert-trtllm-gen"):
        AutoQuantizationConfig.from_dict(block)
