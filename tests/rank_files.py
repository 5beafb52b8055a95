"""A small model in files of tensor-parallel ranks, as Grok-2 is published: experts in a part for each
rank, all else whole in common files; and the tensors it has as one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import Tensor, write_json, write_shard

HIDDEN, INNER, EXPERTS, LAYERS, HEADS = 256, 128, 4, 2, 8
CONFIG: dict[str, Any] = {
    "architectures": ["Grok1ForCausalLM"], "model_type": "git", "vocab_size": 128,
    "hidden_size": HIDDEN, "intermediate_size": 256, "moe_intermediate_size": INNER,
    "max_position_embeddings": 512, "num_experts_per_tok": 2, "num_local_experts": EXPERTS,
    "residual_moe": True, "num_attention_heads": HEADS, "num_key_value_heads": 4, "head_dim": 32,
    "num_hidden_layers": LAYERS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "embedding_multiplier_scale": 90.5, "output_multiplier_scale": 0.5,
    "final_logit_softcapping": 50, "attn_logit_softcapping": 30.0, "router_logit_softcapping": 30.0,
    "sliding_window_size": -1, "attn_temperature_len": 1024, "global_attn_every_n": 1,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class RankFiles:
    """The model in files of so many ranks."""

    ranks: int = 4

    def write(self, folder: Path) -> Path:
        return write(folder, self.ranks)


def whole() -> dict[str, Tensor]:
    """Every tensor of the model, with other bytes each."""
    random = np.random.default_rng(11)

    def bf16(*shape: int) -> Tensor:
        bits = random.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16
        return Tensor("BF16", shape, bits.astype(np.uint16).tobytes())

    found = {"model.embed_tokens.weight": bf16(128, HIDDEN), "lm_head.weight": bf16(128, HIDDEN)}
    found["model.norm.weight"] = bf16(HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for norm in ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm"):
            found[f"{at}.{norm}.weight"] = bf16(HIDDEN)
        for name, rows in (("q", 256), ("k", 128), ("v", 128), ("o", HIDDEN)):
            found[f"{at}.self_attn.{name}_proj.weight"] = bf16(rows, 256)
        found[f"{at}.mlp.gate_proj.weight"] = bf16(256, HIDDEN)
        found[f"{at}.mlp.up_proj.weight"] = bf16(256, HIDDEN)
        found[f"{at}.mlp.down_proj.weight"] = bf16(HIDDEN, 256)
        found[f"{at}.block_sparse_moe.gate.weight"] = bf16(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            base = f"{at}.block_sparse_moe.experts.{expert}"
            found[f"{base}.w1.weight"] = bf16(INNER, HIDDEN)
            found[f"{base}.w2.weight"] = bf16(HIDDEN, INNER)
            found[f"{base}.w3.weight"] = bf16(INNER, HIDDEN)
    return found


def part(name: str, tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """The part of an expert's weight that a rank has: w1 and w3 are cut by rows, w2 by columns."""
    values = np.frombuffer(tensor.data, np.uint16).reshape(tensor.shape)
    cut = np.split(values, ranks, axis=1 if ".w2." in name else 0)[rank]
    return Tensor(tensor.dtype, cut.shape, np.ascontiguousarray(cut).tobytes())


def write(
    folder: Path, ranks: int = 4, *, tensors: Mapping[str, Tensor] | None = None, **config: Any
) -> Path:
    """Two common files, and a file for each rank and layer."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", {**CONFIG, **config})
    write_json(folder / "tokenizer.json", {"version": "1.0"})
    held = whole() if tensors is None else dict(tensors)
    common = {name: one for name, one in held.items() if ".experts." not in name}
    halves: list[dict[str, Tensor]] = [{}, {}]
    for number, (name, one) in enumerate(common.items()):
        halves[number % 2][name] = one
    for number, half in enumerate(halves):
        write_shard(folder / f"pytorch_model-{number:05d}-TP-common.safetensors", half)
    for rank in range(ranks):
        for layer in range(LAYERS):
            own = {
                name: part(name, one, rank, ranks)
                for name, one in held.items()
                if name.startswith(f"model.layers.{layer}.") and ".experts." in name
            }
            file = f"pytorch_model-{layer + 2:05d}-TP-{rank:03d}.safetensors"
            write_shard(folder / file, own)
    return folder
