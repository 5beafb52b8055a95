"""The harness of `make served`, where there is no GPU: its references are what transformers computes,
and its controls are damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from served.damage import damaged
from served.models import MODELS, build
from served.pack import _CODE, _MAGIC, _PTX, _containers
from served.reference import QUANTIZERS, Experts, Seen, Weights, module_error
from served.rows import REAL, ROWS, Row

hf: Any = transformers
_BF16 = ("bf16",)


def _seen_experts(folder: Path) -> tuple[Seen, dict[str, Any]]:
    """Inputs and outputs of the last layer's block of experts, as transformers computes them in F32."""
    model = hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    number = model.config.num_hidden_layers - 1

    def keep(module: Any, args: Any, result: Any) -> None:
        made = result[0] if isinstance(result, tuple) else result
        width = args[0].shape[-1]
        seen.append((args[0].reshape(-1, width), made.reshape(-1, width)))

    model.model.layers[number].mlp.register_forward_hook(keep)
    with torch.no_grad():
        model(input_ids=torch.arange(3, 99).reshape(1, -1), use_cache=False)
    module = f"model.layers.{number}.mlp.experts"
    return Seen(module, "experts", False, *seen[0]), json.loads(
        (folder / "config.json").read_text()
    )


@pytest.mark.parametrize("name", ["moe", "next", "ds", "oss"])
def test_experts_are_what_transformers_computes(name: str, tmp_path: Path) -> None:
    build(name, tmp_path / name)
    seen, config = _seen_experts(tmp_path / name)
    weights = Weights(tmp_path / name)
    error = module_error(seen, weights, config, _BF16)
    assert error is not None
    assert error < 0.003  # routers' logits are rounded to bf16 there, as in runtimes
    assert (block := Experts.of(weights, seen.module, config)) is not None
    assert block.first.shape == (8, 2 * block.second.shape[2], 512)
    wrong = Seen(seen.module, "experts", False, seen.inputs, seen.outputs.flip(0))
    found = module_error(wrong, weights, config, _BF16)
    assert found is not None
    assert found > 0.5


def test_a_wrong_expert_is_seen_by_few_tokens_and_found(tmp_path: Path) -> None:
    build("moe", tmp_path / "moe")
    seen, config = _seen_experts(tmp_path / "moe")
    shard = tmp_path / "moe" / "model.safetensors"
    tensors = load_file(shard)
    first, second = (f"{seen.module}.{expert}.gate_proj.weight" for expert in (0, 1))
    tensors[first], tensors[second] = tensors[second], tensors[first]
    save_file(tensors, shard, metadata={"format": "pt"})
    found = module_error(seen, Weights(tmp_path / "moe"), config, _BF16)
    assert found is not None
    assert found > 0.1


def test_fused_linears_and_biases_are_joined_in_order(tmp_path: Path) -> None:
    sizes = {"q_proj": 6, "k_proj": 2, "v_proj": 2}
    tensors = {f"a.{name}.weight": torch.randn(rows, 4) for name, rows in sizes.items()}
    tensors |= {f"a.{name}.bias": torch.randn(rows) for name, rows in sizes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    weights, inputs = Weights(tmp_path), torch.randn(5, 4)
    weight = torch.cat([tensors[f"a.{name}.weight"] for name in sizes])
    bias = torch.cat([tensors[f"a.{name}.bias"] for name in sizes])
    made = inputs @ weight.T + bias
    found = module_error(Seen("a.qkv_proj", "linear", False, inputs, made), weights, {}, _BF16)
    assert found is not None
    assert found < 1e-5
    assert module_error(Seen("a.o_proj", "linear", False, inputs, made), weights, {}, _BF16) is None


@pytest.mark.parametrize("name", sorted(QUANTIZERS))
def test_quantizers_round_little(name: str) -> None:
    values = torch.randn(16, 256, generator=torch.Generator().manual_seed(3))
    error = (QUANTIZERS[name](values) - values).norm() / values.norm()
    assert error < 0.04
    assert (error == 0) == (name == "bf16")


def test_every_row_is_made_of_one_before_it() -> None:
    known = {*MODELS, REAL}
    for name, row in ROWS.items():
        assert row.source in known
        known.add(name)
    damages = [row for row in ROWS.values() if row.damage]
    assert {row.expects for row in damages} == {"wrong"}
    assert len({row.damage for row in damages}) == 4


def test_controls_are_damaged(tmp_path: Path) -> None:
    part = "model.layers.0.mlp"
    rows: list[tuple[str, dict[str, torch.Tensor]]] = [
        ("control-rows", {"model.layers.0.self_attn.q_proj.weight_packed": torch.rand(256, 8)}),
        ("control-scale", {f"{part}.down_proj.weight_scale_inv": torch.rand(2, 2) + 1}),
        ("control-blocks", {f"{part}.down_proj.weight_scale_inv": torch.rand(2, 2) + 1}),
        ("control-experts", {f"{part}.experts.{e}.gate_proj.weight_scale": torch.rand(4, 2)
                             for e in (0, 1)}),
    ]  # fmt: skip
    for name, tensors in rows:
        row: Row = ROWS[name]
        assert row.damage is not None
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        assert damaged(tmp_path / name, tmp_path / f"{name}-wrong", row.damage)
    (tmp_path / "none").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "none" / "model.safetensors")
    with pytest.raises(ValueError, match="has nothing for 'permuted rows'"):
        damaged(tmp_path / "none", tmp_path / "none-wrong", "permuted rows")


def test_containers_of_a_fat_binary() -> None:
    entries = [(_CODE, 80, b"a" * 16), (_CODE, 90, b"b" * 24), (_PTX, 75, b"c" * 8)]
    body = b"".join(
        struct.pack("<HHIQ12xI32x", kind, 0, 64, len(code), arch) + code
        for kind, arch, code in entries
    )
    content = bytearray(8) + struct.pack("<IHHQ", _MAGIC, 1, 16, len(body)) + body + bytes(24)
    (found,) = _containers(bytearray(content), 8, len(content) - 8)
    assert [(kind, arch) for kind, arch, _, _ in found] == [(2, 80), (2, 90), (1, 75)]
    assert [bytes(content[at : at + size]) for _, _, at, size in found] == [
        code for _, _, code in entries
    ]
