"""A model for README's picture of a validation: 48 layers of 128 experts, as Qwen3-30B-A3B has, small
matrices, and one layer whose weights have outliers.

`python docs/map_model.py FOLDER` writes it (make picture).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

_LAYERS, _EXPERTS, _HIDDEN, _MIDDLE, _VOCAB, _HEADS, _HEAD = 48, 128, 64, 32, 256, 4, 32
# Of a layer's weights those that are larger, and how many times: a scale is made for the largest.
_OUTLIERS = {(31, None): (0.02, 9.0), (12, 77): (0.02, 14.0)}


def _matrices(generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    def drawn(rows: int, columns: int, layer: int = -1, expert: int | None = None) -> torch.Tensor:
        weights: torch.Tensor = torch.randn(rows, columns, generator=generator) * columns**-0.5
        for place, (part, factor) in _OUTLIERS.items():
            if place in ((layer, None), (layer, expert)):
                larger = torch.rand(rows, columns, generator=generator) < part
                weights = torch.where(larger, weights * factor, weights)
        return weights.bfloat16()

    yield "model.embed_tokens.weight", drawn(_VOCAB, _HIDDEN)
    yield "lm_head.weight", drawn(_VOCAB, _HIDDEN)
    yield "model.norm.weight", torch.ones(_HIDDEN, dtype=torch.bfloat16)
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{name}.weight", torch.ones(_HIDDEN, dtype=torch.bfloat16)
        for name in ("q", "k", "v"):
            rows = _HEADS * _HEAD
            yield f"{at}.self_attn.{name}_proj.weight", drawn(rows, _HIDDEN, layer)
        yield f"{at}.self_attn.o_proj.weight", drawn(_HIDDEN, _HEADS * _HEAD, layer)
        for name in ("q", "k"):
            yield f"{at}.self_attn.{name}_norm.weight", torch.ones(_HEAD, dtype=torch.bfloat16)
        yield f"{at}.mlp.gate.weight", drawn(_EXPERTS, _HIDDEN)
        for expert in range(_EXPERTS):
            for name, shape in (
                ("gate", (_MIDDLE, _HIDDEN)),
                ("up", (_MIDDLE, _HIDDEN)),
                ("down", (_HIDDEN, _MIDDLE)),
            ):
                weights = drawn(*shape, layer, expert)
                yield f"{at}.mlp.experts.{expert}.{name}_proj.weight", weights


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    tensors = dict(_matrices(torch.Generator().manual_seed(0)))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": _HIDDEN,
        "num_hidden_layers": _LAYERS, "num_experts": _EXPERTS, "num_experts_per_tok": 8,
        "moe_intermediate_size": _MIDDLE, "intermediate_size": 4 * _MIDDLE, "vocab_size": _VOCAB,
        "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS, "head_dim": _HEAD,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
