"""Against other projects' code: transformers loads what we write and computes the same logits;
compressed-tensors' own converter writes the same bytes where it works at all.

Installed by `make peers`; run with `pytest -m peer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.cli.demo import heavy_tailed, quantize_block_fp8, write_sample
from qconvert.passes.dequant import Dequant
from qconvert.plan.plan import Plan, run_passes
from qconvert.run.executor import execute
from qconvert.run.work.options import RunOptions

pytestmark = pytest.mark.peer

# Its config and auto classes are typed for humans, not for mypy.
hf: Any = transformers

Tensors = dict[str, torch.Tensor]

# Of the linear layers, what the published FP8 releases leave in bf16.
_UNQUANTIZED = (
    "embed_tokens",
    "lm_head",
    "mlp.gate.",
    "shared_expert_gate",
    "in_proj_a",
    "in_proj_b",
)
_LINEAR_ROWS = 8  # a bias or norm has one dimension; anything smaller than this is not quantized


def deepseek_v3() -> Any:
    """Two dense-then-MoE layers with ragged rows: kv_a has 32 + 16 = 48, q_a 40."""
    return hf.DeepseekV3Config(
        vocab_size=300, hidden_size=192, intermediate_size=320, moe_intermediate_size=160,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=40,
        kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
        max_position_embeddings=128,
    )  # fmt: skip


def qwen3_5_moe() -> Any:
    """A period of linear and full attention, with columns that are no multiple of 128."""
    return hf.Qwen3_5MoeTextConfig(
        vocab_size=300, hidden_size=200, moe_intermediate_size=72, num_hidden_layers=4,
        shared_expert_intermediate_size=72, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, num_experts=6, num_experts_per_tok=2, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
        max_position_embeddings=128,
    )  # fmt: skip


def block_quantize(folder: Path, source: Path, block: int) -> Tensors:
    """Copy a saved model to `source` with its linear layers in block FP8, as the published releases
    are. Returns the reference: what torch makes of them again, in bf16."""
    original: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        original.update(load_file(file))
    stored: Tensors = {}
    reference: Tensors = {}
    for name, tensor in original.items():
        linear = tensor.dim() == 2 and min(tensor.shape) >= _LINEAR_ROWS
        if not linear or any(part in name for part in _UNQUANTIZED):
            stored[name] = reference[name] = tensor
            continue
        weight, scale = quantize_block_fp8(tensor.float(), block)
        stored[name], stored[f"{name}_scale_inv"] = weight, scale
        rows, columns = tensor.shape
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
        reference[name] = (weight.float() * spread).bfloat16()
    source.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config, indent=2))
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    assert len(stored) > len(reference) > 20
    return reference


def logits(folder: Path) -> torch.Tensor:
    """The model's logits for fixed tokens; every key must be there and none unexpected."""
    model, told = hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    tokens = torch.arange(24).view(2, 12) * 7 % 300
    with torch.no_grad():
        found: torch.Tensor = model.eval()(tokens).logits
    return found


@pytest.mark.parametrize("make_config", [deepseek_v3, qwen3_5_moe])
@pytest.mark.parametrize("block", [128, 32])
def test_transformers_computes_the_reference_logits(
    make_config: Callable[[], Any], block: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(make_config(), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.copy_(heavy_tailed(tuple(parameter.shape), generator))
    model.save_pretrained(tmp_path / "bf16")
    reference = block_quantize(tmp_path / "bf16", tmp_path / "fp8", block)

    plan = run_passes(Plan.identity(Checkpoint.open(tmp_path / "fp8")), (Dequant(),))
    assert plan.log[0].matched == plan.log[0].expected
    execute(plan, tmp_path / "out", RunOptions(max_shard_size=1 << 20, jobs=2))

    made: Tensors = {}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        made.update(load_file(file))
    assert made.keys() == reference.keys()
    assert all(torch.equal(made[name], reference[name]) for name in reference)

    (tmp_path / "reference").mkdir()
    original = json.loads((tmp_path / "bf16" / "config.json").read_text())
    (tmp_path / "reference" / "config.json").write_text(json.dumps(original))
    save_file(reference, tmp_path / "reference" / "model.safetensors", metadata={"format": "pt"})
    ours, theirs = logits(tmp_path / "out"), logits(tmp_path / "reference")
    assert torch.isfinite(ours).all()
    assert torch.equal(ours, theirs)


def test_transformers_loads_the_demo(tmp_path: Path) -> None:
    """MTP tensors are kept; transformers knows no class for them and names them as unexpected."""
    write_sample(tmp_path / "fp8")
    plan = run_passes(Plan.identity(Checkpoint.open(tmp_path / "fp8")), (Dequant(),))
    execute(plan, tmp_path / "out", RunOptions(jobs=1))
    model, told = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not told["missing_keys"]
    assert all(name.startswith("mtp.") for name in told["unexpected_keys"])
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(16)[None]).logits).all()


def test_compressed_tensors_writes_the_same_weights(tmp_path: Path) -> None:
    """On what its converter can take: 2-D weights, columns in multiples of 128, F32 scales."""
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer, convert_checkpoint

    generator = torch.Generator().manual_seed(2)
    stored: Tensors = {"model.embed_tokens.weight": torch.ones(4, 256).bfloat16()}
    for i, shape in enumerate([(256, 128), (576, 256), (192, 384), (128, 128)]):
        name = f"model.layers.{i}.mlp.up_proj.weight"
        stored[name], stored[f"{name}_scale_inv"] = quantize_block_fp8(
            heavy_tailed(shape, generator)
        )
    source = tmp_path / "fp8"
    source.mkdir()
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {"model_type": "llama", "num_hidden_layers": 4, "quantization_config": block}
    (source / "config.json").write_text(json.dumps(config))
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    weight_map = dict.fromkeys(stored, "model.safetensors")
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))

    convert_checkpoint(
        model_stub=str(source),
        save_directory=str(tmp_path / "theirs"),
        converter=FP8BlockDequantizer(targets=[r"re:.*up_proj$"], weight_block_size=(128, 128)),
        max_workers=1,
    )
    plan = run_passes(Plan.identity(Checkpoint.open(source)), (Dequant(),))
    execute(plan, tmp_path / "ours", RunOptions(jobs=1))
    theirs, ours = (load_file(tmp_path / n / "model.safetensors") for n in ("theirs", "ours"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
