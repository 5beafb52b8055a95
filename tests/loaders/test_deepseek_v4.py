"""DeepSeek-V4 in the runtimes' own loaders: what vLLM's class makes of the scales of experts, told by
their bytes; FP8 of what was dequantized. Skips itself without its environment (`make loaders`)."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import Tensor, read_tensors, write_shard

from loaders.agreement import disagreements, once, simulated
from loaders.client import PYTHON, Rank, Server
from loaders.folders import converted
from loaders.published import published
from qconvert.runtimes.loading.setting import Setting

pytestmark = [
    pytest.mark.loader,
    pytest.mark.skipif(
        not (PYTHON.parent.parent / "vllm").is_dir(), reason="needs vLLM's loader: make loaders"
    ),
]
EXPERTS = "model.layers.0.ffn.experts.routed_experts"
SCALES = [f"layers.0.ffn.experts.{n}.w2.scale" for n in range(2)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return published("deepseek_v4", fp8=True, experts=2).write(tmp_path / "source")


def digest(values: np.ndarray) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("rank", [Rank(), Rank(2, 1)], ids=str)
def test_mxfp4_beside_fp8_is_read_byte_for_byte(rank: Rank, vllm: Server, source: Path) -> None:
    loaded = vllm.load(source, rank)
    assert loaded.whole, loaded.error
    stored = [np.frombuffer(t.data, np.uint8).reshape(t.shape) for t in _scales(source)]
    wide = stored[0].shape[1] // rank.tp
    own = np.stack(stored)[..., rank.rank * wide : (rank.rank + 1) * wide]
    assert loaded.parameters[f"{EXPERTS}.w2_weight_scale"][2] == digest(np.ascontiguousarray(own))
    answer = simulated(source, Setting(tp=rank.tp, rank=rank.rank), runtime="vllm")
    assert [*disagreements(answer, once(loaded))] == []


def test_scales_that_relabel_writes_are_read_as_they_are(vllm: Server, source: Path) -> None:
    out = converted(source.parent, "relabel", source, "--to", "fp8")
    loaded = vllm.load(out)
    assert loaded.whole, loaded.error
    stored = np.stack([np.frombuffer(t.data, "<f4").reshape(t.shape) for t in _scales(out)])
    assert loaded.parameters[f"{EXPERTS}.w2_weight_scale_inv"][2] == digest(stored)
    assert simulated(out, Setting(), runtime="vllm").whole


def test_exponents_of_fp8_experts_become_numbers(vllm: Server, source: Path) -> None:
    """It loads without a word, and the simulator says that it is misread: 2^-7 is read as 120."""
    out = converted(source.parent, "relabel", source, "--to", "fp8")
    changed = source.parent / "exponents"
    shutil.copytree(out, changed)
    tensors = read_tensors(out)
    for name in [name for name in tensors if ".experts." in name and name.endswith(".scale")]:
        scale = tensors[name]
        values = np.frombuffer(scale.data, "<f4")
        powers = (np.log2(values) + 127).round().astype(np.uint8)
        tensors[name] = Tensor("F8_E8M0", scale.shape, powers.tobytes())
    for file in changed.glob("*.safetensors*"):
        file.unlink()
    write_shard(changed / "model.safetensors", tensors)
    loaded = vllm.load(changed)
    assert loaded.whole, loaded.error
    bytes_of = [np.frombuffer(tensors[n].data, np.uint8).reshape(tensors[n].shape) for n in SCALES]
    wrong = digest(np.stack(bytes_of).astype("<f4"))
    assert loaded.parameters[f"{EXPERTS}.w2_weight_scale_inv"][2] == wrong
    answer = simulated(changed, Setting(), runtime="vllm")
    assert set(SCALES) <= answer.misread.keys()
    assert all(".experts." in name for name in answer.misread)


@pytest.mark.parametrize("runtime", ["sglang", "vllm"])
def test_fp8_of_what_was_dequantized_loads(
    runtime: str, hopper: Server, vllm: Server, source: Path
) -> None:
    out = converted(source.parent, "fp8", converted(source.parent, "dequant", source))
    for rank in (Rank(), Rank(2, 1)):
        loaded = (hopper if runtime == "sglang" else vllm).load(out, rank)
        loaded = once(loaded) if runtime == "vllm" else loaded
        assert loaded.whole, loaded.error
        assert {name.partition(".")[0] for name in loaded.unused} == {"mtp"}
        answer = simulated(out, Setting(tp=rank.tp, rank=rank.rank), runtime=runtime)
        assert [*disagreements(answer, loaded)] == []


def _scales(folder: Path) -> list[Tensor]:
    tensors = read_tensors(folder)
    return [tensors[name] for name in SCALES]
