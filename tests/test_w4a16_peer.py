"""The GPU folder of a pair against transformers and compressed-tensors: it loads, and computes what
compressed-tensors' own decompression of it computes; every quantization block is one they parse.

transformers takes no notice of `linear_fp8_config`, so what it loads here has bf16 linears. Installed by
`make peers`; run with `pytest -m peer tests/test_w4a16_peer.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import run_cli
from safetensors.torch import load_file, save_file
from test_kt import MODELS, kt

from qconvert.cli.demo_checkpoint import heavy_tailed

pytestmark = pytest.mark.peer

# Its config and auto classes are typed for humans, not for mypy.
hf: Any = transformers

Tensors = dict[str, torch.Tensor]

HIDDEN, INTERMEDIATE, EXPERTS = 128, 256, 4

COMMON = {
    "vocab_size": 300,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def qwen3_moe() -> Any:
    return hf.Qwen3MoeConfig(
        **COMMON, num_hidden_layers=2, num_key_value_heads=2, head_dim=32, num_experts=EXPERTS,
        num_experts_per_tok=2,
    )  # fmt: skip


def _linear_attention() -> dict[str, Any]:
    """A layer of linear attention and one of full."""
    return {
        "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"], "num_experts": EXPERTS,
        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 96, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip


def qwen3_next() -> Any:
    return hf.Qwen3NextConfig(**COMMON, **_linear_attention())


def qwen3_5_moe() -> Any:
    return hf.Qwen3_5MoeTextConfig(**COMMON, **_linear_attention())


def deepseek_v3() -> Any:
    """A dense layer and one with experts."""
    return hf.DeepseekV3Config(
        **COMMON, num_hidden_layers=2, intermediate_size=320, num_key_value_heads=4,
        n_routed_experts=EXPERTS, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=40, kv_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=32, v_head_dim=32,
    )  # fmt: skip


def glm4_moe() -> Any:
    return hf.Glm4MoeConfig(
        **COMMON, num_hidden_layers=2, intermediate_size=320, num_key_value_heads=2, head_dim=32,
        n_routed_experts=EXPERTS, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1,
    )  # fmt: skip


FAMILIES: list[Callable[[], Any]] = [qwen3_moe, qwen3_next, qwen3_5_moe, deepseek_v3, glm4_moe]


def saved(config: Any, folder: Path) -> Path:
    """A model with heavy-tailed weights in bf16, as transformers saves it."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.copy_(heavy_tailed(tuple(parameter.shape), generator))
    model.save_pretrained(folder)
    return folder


def tensors(folder: Path) -> Tensors:
    found: Tensors = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def logits(folder: Path) -> torch.Tensor:
    """For fixed tokens; every key must be there and none unexpected."""
    model, told = hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(24).view(2, 12) * 7 % 300).logits
    assert torch.isfinite(found).all()
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
        if f"{module}.weight_packed" not in stored:
            found[name] = value
        elif parameter == "weight_packed":
            parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
            state = {p: stored[f"{module}.{p}"] for p in parts if f"{module}.{p}" in stored}
            made = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
            assert made.dtype == torch.bfloat16
            found[f"{module}.weight"] = made
    return found


def reference(source: Path, gpu: Path, folder: Path) -> Path:
    """The source as it would be with its experts rounded: the same config, all weights bf16."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(decompressed(gpu), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_transformers_computes_what_the_packed_experts_mean(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    source, cpu, gpu = saved(make(), tmp_path / "source"), tmp_path / "cpu", tmp_path / "gpu"
    done = kt(source, cpu, gpu, method="int8", numa=2)
    assert done.code == 0, done.err
    rounded = reference(source, gpu, tmp_path / "reference")
    before, after = tensors(source), tensors(rounded)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".mlp.experts." in name}
    ours = logits(gpu)
    assert torch.equal(ours, logits(rounded))
    assert not torch.equal(ours, logits(source))


ROUNDED = {
    "W4 g32": ["--group-size", "32"],
    "W8 channel": ["--bits", "8", "--group-size", "channel"],
    "W4 g32 linears": ["--group-size", "32", "--target", "Linear", "--leave-bf16"],
}


@pytest.mark.parametrize("case", ROUNDED)
@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_transformers_computes_what_packed_weights_mean(
    make: Callable[[], Any], case: str, tmp_path: Path
) -> None:
    source, out = saved(make(), tmp_path / "source"), tmp_path / "out"
    done = run_cli("w4a16", source, out, "--rtn", *ROUNDED[case], "--jobs", "1")
    assert done.code == 0, done.err
    rounded = reference(source, out, tmp_path / "reference")
    before, after = tensors(source), tensors(rounded)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    experts = {name for name in before if ".mlp.experts." in name}
    assert experts <= changed
    assert (changed > experts) is ("linears" in case)
    ours = logits(out)
    assert torch.equal(ours, logits(rounded))
    assert not torch.equal(ours, logits(source))


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_the_cpu_folder_leaves_nothing_for_transformers(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    """Whoever loads it by mistake is told: none of a model's names is in it."""
    source = saved(make(), tmp_path / "source")
    assert kt(source, tmp_path / "cpu", None, method="int8", numa=2).code == 0
    assert not tensors(tmp_path / "cpu").keys() & tensors(source).keys()


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_compressed_tensors_parses_every_block(kind: str, tmp_path: Path) -> None:
    done = kt(MODELS[kind]().write(tmp_path / "source"), tmp_path / "cpu", tmp_path / "gpu")
    assert done.code == 0, done.err
    found = parsed(tmp_path / "gpu")
    assert found.format == "pack-quantized"
    assert found.quantization_status == "compressed"
    weights = found.config_groups["group_0"].weights
    assert (weights.num_bits, weights.type, weights.group_size) == (4, "int", 128)
    assert (weights.symmetric, weights.strategy) == (True, "group")
    assert set(found.config_groups) == {"group_0"} | ({"group_1"} if kind == "mixed" else set())
    if kind == "mixed":
        second = found.config_groups["group_1"]
        assert (second.weights.strategy, second.weights.block_structure) == ("block", [128, 128])
        assert second.input_activations.dynamic is True


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_compressed_tensors_finds_the_same_modules(kind: str, tmp_path: Path) -> None:
    """Its own matching of targets and ignored names: experts go to the first group, FP8 linears to the
    second where there is one, and bf16 linears to none."""
    from compressed_tensors.utils.match import is_match

    model = MODELS[kind]()
    source = model.write(tmp_path / "source")
    assert kt(source, tmp_path / "cpu", tmp_path / "gpu").code == 0
    config = parsed(tmp_path / "gpu")
    first = config.config_groups["group_0"]
    for name, value in model.tensors.items():
        module, _, parameter = name.rpartition(".")
        if parameter != "weight" or len(value.shape) != 2:
            continue
        linear = torch.nn.Linear(1, 1)
        matched = is_match(module, linear, first.targets, config.ignore)
        assert matched == (".mlp.experts." in module), module
        if "group_1" in config.config_groups and not matched:
            targets = config.config_groups["group_1"].targets
            assert is_match(module, linear, targets, config.ignore) == (value.dtype != "BF16")
