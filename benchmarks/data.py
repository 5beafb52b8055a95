"""A block-FP8 MoE checkpoint of any size, with the shapes of Qwen3-30B-A3B: ragged rows are in the
router and norms, columns are multiples of 128 so that peers survive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qconvert.header import build_header
from qconvert.spec import TensorType, ceil_div

HIDDEN, INTERMEDIATE, EXPERTS, VOCAB = 2048, 768, 128, 32768
_POOL_BYTES = 1 << 24


def _config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": INTERMEDIATE,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": VOCAB,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }


def _fp8(module: str, rows: int, columns: int) -> Iterator[tuple[str, TensorType]]:
    yield f"{module}.weight", TensorType("F8_E4M3", (rows, columns))
    grid = (ceil_div(rows, 128), ceil_div(columns, 128))
    yield f"{module}.weight_scale_inv", TensorType("F32", grid)


def _layer(number: int) -> Iterator[tuple[str, TensorType]]:
    at = f"model.layers.{number}"
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}.{norm}.weight", TensorType("BF16", (HIDDEN,))
    for name, rows, columns in (
        ("q_proj", 4096, HIDDEN),
        ("k_proj", 512, HIDDEN),
        ("v_proj", 512, HIDDEN),
        ("o_proj", HIDDEN, 4096),
    ):
        yield from _fp8(f"{at}.self_attn.{name}", rows, columns)
    for norm in ("q_norm", "k_norm"):
        yield f"{at}.self_attn.{norm}.weight", TensorType("BF16", (128,))
    yield f"{at}.mlp.gate.weight", TensorType("BF16", (EXPERTS, HIDDEN))
    for expert in range(EXPERTS):
        for name in ("gate_proj", "up_proj"):
            yield from _fp8(f"{at}.mlp.experts.{expert}.{name}", INTERMEDIATE, HIDDEN)
        yield from _fp8(f"{at}.mlp.experts.{expert}.down_proj", HIDDEN, INTERMEDIATE)


def _shards(layers: int) -> Iterator[list[tuple[str, TensorType]]]:
    embedding = TensorType("BF16", (VOCAB, HIDDEN))
    yield [
        ("model.embed_tokens.weight", embedding),
        ("model.norm.weight", TensorType("BF16", (HIDDEN,))),
        ("lm_head.weight", embedding),
    ]
    for number in range(layers):
        yield list(_layer(number))


def write_checkpoint(folder: Path, layers: int) -> int:
    """Write it; about 0.62 GB a layer. Returns bytes of tensor data."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, _POOL_BYTES, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 5  # no NaN
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(_shards(layers), 1):
        file = f"model-{number:05d}-of-{layers + 1:05d}.safetensors"
        header, _ = build_header(tensors, {"format": "pt"})
        with (folder / file).open("wb") as stream:
            stream.write(header)
            for name, kind in tensors:
                weight_map[name] = file
                total += kind.nbytes
                if kind.dtype == "F32":
                    scale = random.uniform(1e-4, 1e-3, kind.shape).astype(np.float32)
                    stream.write(scale.tobytes())
                    continue
                for start in range(0, kind.nbytes, _POOL_BYTES):
                    part = codes[: min(_POOL_BYTES, kind.nbytes - start)]
                    stream.write((part if kind.dtype == "F8_E4M3" else part & 0xBD).tobytes())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "config.json").write_text(json.dumps(_config(layers), indent=2))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total
