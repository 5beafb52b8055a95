"""Checkpoints to convert: real names and shapes, a few layers of them, and weights that look real."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qconvert.checkpoint.safetensors import build_header
from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.names import natural_key

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import headers

_BLOCK = 128
_POOL_BYTES = 1 << 24
_SHARD_BYTES = 2_000_000_000
_SMALL_VOCABULARY = 1024


@dataclass(frozen=True)
class Model:
    """A config and tensors, in the order they are stored."""

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorType]


def qwen3_moe(layers: int, experts: int = 128) -> Model:
    """Block-FP8 in the shapes of Qwen3-30B-A3B, 0.62 GB a layer, its scales BF16 as published. Heads
    of 112 make k and v ragged: 448 rows are three and a half blocks. Columns are multiples of 128,
    so that peers do not fail. A small vocabulary keeps nearly all of it FP8."""
    hidden, intermediate, vocab, heads, kv_heads, head = 2048, 768, 2048, 32, 4, 112
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "moe_intermediate_size": intermediate,
        "intermediate_size": 6144,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocab,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
        },
    }
    tensors = {
        "model.embed_tokens.weight": TensorType("BF16", (vocab, hidden)),
        "model.norm.weight": TensorType("BF16", (hidden,)),
        "lm_head.weight": TensorType("BF16", (vocab, hidden)),
    }
    for number in range(layers):
        at = f"model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = TensorType("BF16", (hidden,))
        tensors |= _fp8(f"{at}.self_attn.q_proj", heads * head, hidden)
        tensors |= _fp8(f"{at}.self_attn.k_proj", kv_heads * head, hidden)
        tensors |= _fp8(f"{at}.self_attn.v_proj", kv_heads * head, hidden)
        tensors |= _fp8(f"{at}.self_attn.o_proj", hidden, heads * head)
        for norm in ("q_norm", "k_norm"):
            tensors[f"{at}.self_attn.{norm}.weight"] = TensorType("BF16", (head,))
        tensors[f"{at}.mlp.gate.weight"] = TensorType("BF16", (experts, hidden))
        for expert in range(experts):
            tensors |= _fp8(f"{at}.mlp.experts.{expert}.gate_proj", intermediate, hidden)
            tensors |= _fp8(f"{at}.mlp.experts.{expert}.up_proj", intermediate, hidden)
            tensors |= _fp8(f"{at}.mlp.experts.{expert}.down_proj", hidden, intermediate)
    return Model(config, tensors)


def bf16_moe(layers: int, experts: int = 32) -> Model:
    """`experts` per layer, 32 by default, in the shapes of Qwen3-30B-A3B, BF16, 0.3 GB a layer, and
    hardly anything else."""
    hidden, intermediate, vocab = 2048, 768, 256
    whole = qwen3_moe(layers, experts)
    config = {k: v for k, v in whole.config.items() if k != "quantization_config"}
    config |= {"vocab_size": vocab}
    tensors = {
        name: TensorType("BF16", kind.shape)
        for name, kind in whole.tensors.items()
        if not name.endswith("_scale_inv") and "self_attn" not in name
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = TensorType("BF16", (vocab, hidden))
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors[f"{at}.mlp.gate.weight"] = TensorType("BF16", (experts, hidden))
        for name in "qkvo":
            tensors[f"{at}.self_attn.{name}_proj.weight"] = TensorType("BF16", (128, 128))
        for name in "qk":
            tensors[f"{at}.self_attn.{name}_norm.weight"] = TensorType("BF16", (32,))
    assert tensors[f"model.layers.0.mlp.experts.{experts - 1}.up_proj.weight"].shape == (
        intermediate,
        hidden,
    )
    return Model(config, tensors)


def qwen3_235b(layers: int, experts: int = 128) -> Model:
    """Layers of Qwen3-235B-A22B as published, BF16, 5.0 GB each, and a small vocabulary."""
    hidden, intermediate, vocab, heads, kv_heads, head = 4096, 1536, 256, 64, 4, 128
    config = {key: v for key, v in qwen3_moe(layers).config.items() if key != "quantization_config"}
    config |= {
        "hidden_size": hidden,
        "num_experts": experts,
        "moe_intermediate_size": intermediate,
        "intermediate_size": 12288,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocab,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_proj.weight": (heads * head, hidden),
            f"{at}.self_attn.k_proj.weight": (kv_heads * head, hidden),
            f"{at}.self_attn.v_proj.weight": (kv_heads * head, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * head),
            f"{at}.self_attn.q_norm.weight": (head,),
            f"{at}.self_attn.k_norm.weight": (head,),
            f"{at}.mlp.gate.weight": (experts, hidden),
        }
        for expert in range(experts):
            shapes |= {
                f"{at}.mlp.experts.{expert}.gate_proj.weight": (intermediate, hidden),
                f"{at}.mlp.experts.{expert}.up_proj.weight": (intermediate, hidden),
                f"{at}.mlp.experts.{expert}.down_proj.weight": (hidden, intermediate),
            }
    return Model(config, {name: TensorType("BF16", shape) for name, shape in shapes.items()})


def _fp8(module: str, rows: int, columns: int) -> dict[str, TensorType]:
    return {
        f"{module}.weight": TensorType("F8_E4M3", (rows, columns)),
        f"{module}.weight_scale_inv": TensorType(
            "BF16", (ceil_div(rows, _BLOCK), ceil_div(columns, _BLOCK))
        ),
    }


def qwen3_5(layers: int, experts: int | None = None) -> Model:
    """The first layers of Qwen3.5-35B-A3B-FP8 as published, 0.83 GB each, and 2 GB of embeddings;
    without its vision tower and MTP layer. With `experts`, that many of the 256, and embeddings of a
    small vocabulary."""
    published = headers.load("qwen3.5-35b-a3b-fp8")
    text = published.config["text_config"]
    tensors = {n: t for n, t in published.tensors.items() if _kept(n, layers)}
    if experts is not None:
        text = text | {"num_experts": experts, "vocab_size": _SMALL_VOCABULARY}
        tensors = {n: _smaller(n, t, experts) for n, t in tensors.items() if _expert(n) < experts}
    config = {key: value for key, value in published.config.items() if key != "vision_config"}
    config["text_config"] = text | {
        "num_hidden_layers": layers,
        "layer_types": text["layer_types"][:layers],
        "mtp_num_hidden_layers": 0,
    }
    return Model(config, tensors)


def _expert(name: str) -> int:
    """The number of a routed expert, 0 for all other tensors."""
    _, _, rest = name.partition(".mlp.experts.")
    return int(rest.split(".")[0]) if rest else 0


def _smaller(name: str, kind: TensorType, experts: int) -> TensorType:
    """The type of a tensor whose rows are tokens or experts, with fewer of them."""
    if "embed_tokens" in name or "lm_head" in name:
        return kind.with_rows(_SMALL_VOCABULARY)
    return kind.with_rows(experts) if name.endswith(".mlp.gate.weight") else kind


def _kept(name: str, layers: int) -> bool:
    parts = name.split(".")
    if parts[0] == "mtp" or "visual" in parts:
        return False
    return "layers" not in parts or int(parts[parts.index("layers") + 1]) < layers


@cache
def _heavy_tailed() -> torch.Tensor:
    """Student-t weights of four degrees of freedom."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(_POOL_BYTES, generator=generator)
    chi = sum(torch.randn(_POOL_BYTES, generator=generator) ** 2 for _ in range(4))
    assert isinstance(chi, torch.Tensor)
    return normal / (chi / 4).sqrt()


def _bf16() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """BF16 of heavy-tailed weights, of a size that real ones have."""
    weights = (_heavy_tailed() * 0.02)[: _POOL_BYTES // 2].bfloat16()
    return weights.view(torch.uint8).numpy()


def _f32() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """F32 of the same weights."""
    return (_heavy_tailed() * 0.02)[: _POOL_BYTES // 4].view(torch.uint8).numpy()


def _codes() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """FP8 codes of heavy-tailed weights, each block scaled to its largest."""
    blocks = _heavy_tailed().view(-1, _BLOCK * _BLOCK)
    scaled = blocks * (448 / blocks.abs().amax(1, keepdim=True))
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten().numpy()


def write_checkpoint(folder: Path, model: Model) -> int:
    """Write a model. Returns its bytes of tensor data."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    # A_log of linear attention is F32: heavy-tailed weights like all else.
    pools = {"F8_E4M3": _codes(), "BF16": _bf16(), "F32": _f32()}
    weight_map: dict[str, str] = {}
    shards = list(_shards(model))
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, _ = build_header([(name, model.tensors[name]) for name in names], {"format": "pt"})
        with (folder / file).open("wb") as stream:
            stream.write(header)
            for name in names:
                weight_map[name] = file
                kind = model.tensors[name]
                if name.endswith("_scale_inv"):
                    scale = random.uniform(1e-4, 1e-3, kind.shape).astype(np.float32)
                    bits = scale.view(np.uint32) >> 16
                    stored = scale if kind.dtype == "F32" else bits.astype(np.uint16)
                    stream.write(stored.tobytes())
                    continue
                for start in range(0, kind.nbytes, _POOL_BYTES):
                    stream.write(pools[kind.dtype][: min(_POOL_BYTES, kind.nbytes - start)].data)
    total = sum(kind.nbytes for kind in model.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "config.json").write_text(json.dumps(model.config, indent=2))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _shards(model: Model) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name in sorted(model.tensors, key=natural_key):
        names.append(name)
        size += model.tensors[name].nbytes
        if size > _SHARD_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names
