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
from served import sglang_stand_ins as stand_ins
from served.damage import damaged
from served.judge import LENGTH, NEW, PROMPTS, judged
from served.models import MODELS, build
from served.pack import _CODE, _MAGIC, _PTX, _containers
from served.reference import (
    QUANTIZERS,
    Answer,
    Experts,
    Seen,
    Watched,
    Weights,
    module_error,
)
from served.rows import REAL, ROWS, ROWS_OF, Row
from served.run import _in_turn
from torch.nn import functional

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
    for runtime, names in ROWS_OF.items():
        assert set(names) <= set(ROWS), runtime
        assert len(set(names)) == len(names), runtime
        turn = _in_turn(names)
        for name in names:
            assert turn.index(ROWS[name].source) <= turn.index(name)
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


def test_aligned_blocks_hold_every_slot_once_beside_its_expert() -> None:
    """Of a stand-in that is absent or wrong, a kernel reads slots as addresses."""
    chosen = torch.tensor([[3, 0], [3, 7], [3, -1], [0, 3]], dtype=torch.int32)
    slots, experts, total = stand_ins.aligned(stand_ins.moe_align_block_size, chosen)
    assert slots.shape == (len(experts), 16)
    assert int(total) == slots.numel()
    assert experts.tolist() == [-1, 0, 3, 7]
    real = [[slot for slot in block if slot < chosen.numel()] for block in slots.tolist()]
    assert real == [[5], [1, 6], [0, 2, 4, 7], [3]]
    assert set(slots[slots >= chosen.numel()].tolist()) == {chosen.numel()}
    many = torch.zeros(40, 2, dtype=torch.int32)  # more than a block of one expert
    slots, experts, _ = stand_ins.aligned(stand_ins.moe_align_block_size, many)
    assert experts.tolist() == [0] * 5
    assert slots.flatten().tolist() == list(range(80))


def test_stand_ins_compute_what_torch_defines() -> None:
    values, weight = torch.randn(5, 8), torch.rand(8)
    wanted = functional.rms_norm(values, (8,), weight, 1e-6)
    torch.testing.assert_close(stand_ins.rmsnorm(values, weight), wanted)
    torch.testing.assert_close(stand_ins.gemma_rmsnorm(values, weight - 1), wanted)
    residual, given = torch.randn(5, 8), values.clone()
    added = values + residual
    stand_ins.fused_add_rmsnorm(given, residual, weight)
    torch.testing.assert_close(residual, added)
    torch.testing.assert_close(given, functional.rms_norm(added, (8,), weight, 1e-6))
    out = torch.empty(5, 4)
    assert stand_ins.silu_and_mul(values, out) is out
    torch.testing.assert_close(out, functional.silu(values[:, :4]) * values[:, 4:])
    stand_ins.moe_sum_reduce(values.reshape(5, 2, 4), out, 2.5)
    torch.testing.assert_close(out, 2.5 * (values[:, :4] + values[:, 4:]))
    weights, chosen = torch.empty(5, 2), torch.empty(5, 2, dtype=torch.int32)
    stand_ins.topk_softmax(weights, chosen, values, True)
    torch.testing.assert_close(weights, values.topk(2).values.softmax(-1))
    assert chosen.tolist() == values.topk(2).indices.tolist()


def test_a_package_that_computes_something_else_is_found() -> None:
    class Package:
        """Definitions themselves, but for what is wrong here, and one function that is not there."""

    for function in stand_ins.FUNCTIONS:
        setattr(Package, function.__name__, staticmethod(function))
    assert stand_ins.differences(Package, "cpu") == []

    def align(chosen: Any, *rest: Any) -> None:
        stand_ins.moe_align_block_size(chosen.flip(0), *rest)

    Package.moe_align_block_size = staticmethod(align)  # type: ignore[attr-defined]
    Package.silu_and_mul = staticmethod(lambda values: values[:, :512])  # type: ignore[attr-defined]
    del Package.rmsnorm  # type: ignore[attr-defined]
    said = stand_ins.differences(Package, "cpu")
    names = ["silu_and_mul", "rmsnorm", "moe_align_block_size"]
    assert [line.split(":")[0] for line in said] == names


class _AsTransformers:
    """An engine that computes what transformers does in BF16; it says it of new tokens alone."""

    ROUNDS_GLOBAL_SCALE = False

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def serve(
        self, folder: Path, config: Any, prompts: torch.Tensor, new: int, **engine: Any
    ) -> Answer:
        model = hf.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="eager"
        ).eval()
        tokens = prompts
        with torch.no_grad():
            for _ in range(new):
                logits = model(input_ids=tokens, use_cache=False).logits
                tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        assert tokens.shape == (PROMPTS, LENGTH + NEW)
        found = logits.float().log_softmax(-1)
        last = found[:, -new:].roll(self.shift, 1)
        return Answer(tokens[:, -new:], last, [], {})


def test_a_folder_is_judged_by_the_tokens_that_a_runtime_says(tmp_path: Path) -> None:
    build("dense", tmp_path / "dense")
    folder = tmp_path / "dense"
    right = judged(ROWS["dense"], folder, folder, None, _AsTransformers())
    assert (right["status"], right["faults"]) == ("right", [])
    assert right["noise"] == pytest.approx(1.0)
    wrong = judged(ROWS["dense"], folder, folder, None, _AsTransformers(shift=1))
    assert wrong["status"] == "wrong"
    assert "of bf16's own" in wrong["faults"][0]


def test_the_first_prefill_and_decoding_step_are_kept() -> None:
    watched = Watched(4, 192)
    for rows in (7, 192, 4, 192):
        watched.keep("a", "linear", torch.full((rows, 2), float(rows)), torch.zeros(rows, 3))
    watched.keep("a", "linear", (torch.zeros(4, 2),), torch.zeros(4, 3))
    assert [(key, len(one.inputs)) for key, one in watched.found.items()] == [
        (("a", False), 192),
        (("a", True), 4),
    ]
