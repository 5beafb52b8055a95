"""Small GGUF files, written with the `gguf` package, and what each tensor in them means. Names are by
gguf's own tables; what llama.cpp changes of a model is done by hand. No code of qconvert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

Array = np.ndarray[Any, np.dtype[Any]]
Kind: Any = gguf.GGMLQuantizationType

LAYERS, HEADS, KV, HEAD, HIDDEN, WIDE, WORDS, EXPERTS = 2, 4, 2, 16, 64, 96, 40, 4
# Types that gguf 0.19 quantizes to, and those that it reads only.
WRITTEN = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
ONLY_READ = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
CODED = (*WRITTEN[3:], *ONLY_READ)
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "gpt-oss")
# Where a block has its F16 scales and minima.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (),
}  # fmt: skip


def blocks(kind: str, rows: int, count: int, random: np.random.Generator) -> Array:
    """Rows of `count` blocks: any bytes, but for scales, which are finite and of both signs."""
    _, nbytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    data = random.integers(0, 256, (rows, count, nbytes), np.uint8)
    for at in _HALVES[kind]:
        scale = random.uniform(-2, 2, (rows, count, 1)).astype(np.float16)
        scale[0, 0] = 6e-8  # denormal
        data[:, :, at : at + 2] = scale.view(np.uint8).reshape(rows, count, 2)
    if kind == "MXFP4":
        data[:, :, 0] = random.integers(0, 250, (rows, count))
        data[0, 0, 0], data[-1, -1, 0] = 0, 1
    return data.reshape(rows, -1)


def meaning(kind: str, data: Array) -> Array:
    """Numbers of a stored matrix, float32, by gguf."""
    return dequantize(data, Kind[kind]).astype(np.float32)


@dataclass
class GgufModel:
    """A file: facts, tensors as stored by their names in it, with their types; and the tensors that the
    class of transformers has of it, in float32."""

    architecture: str
    facts: dict[str, Any]
    stored: dict[str, tuple[str, Array]] = field(default_factory=dict)
    means: dict[str, Array] = field(default_factory=dict)

    def write(
        self, file: Path, more: Mapping[str, Any] | None = None, names: Iterable[str] | None = None
    ) -> Path:
        """Write those of some names (all), with more facts."""
        writer = gguf.GGUFWriter(file, self.architecture)
        for key, value in {**self.facts, **(more or {})}.items():
            own = key.startswith((f"{self.architecture}.", "general.", "tokenizer.", "split."))
            _add(writer, key if own else f"{self.architecture}.{key}", value)
        for name in names or self.stored:
            kind, data = self.stored[name]
            writer.add_tensor(name, data, raw_dtype=Kind[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the class's tensors, of experts in stacks."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (WORDS, HIDDEN), "model.norm.weight": (HIDDEN,),
    }  # fmt: skip
    if architecture != "gemma3":
        found["lm_head.weight"] = (WORDS, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for part, heads in (("q", HEADS), ("k", KV), ("v", KV)):
            found[f"{at}self_attn.{part}_proj.weight"] = (heads * HEAD, HIDDEN)
            if architecture in ("qwen2", "gpt-oss"):
                found[f"{at}self_attn.{part}_proj.bias"] = (heads * HEAD,)
        found[f"{at}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if architecture == "gemma3":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for norm in norms:
            found[f"{at}{norm}.weight"] = (HIDDEN,)
        if architecture in ("qwen3", "qwen3moe", "gemma3"):
            for part in "qk":
                found[f"{at}self_attn.{part}_norm.weight"] = (HEAD,)
        if architecture == "gpt-oss":
            found[f"{at}self_attn.o_proj.bias"] = (HIDDEN,)
            found[f"{at}self_attn.sinks"] = (HEADS,)
            found[f"{at}mlp.router.weight"] = (EXPERTS, HIDDEN)
            found[f"{at}mlp.router.bias"] = (EXPERTS,)
            continue
        sizes = {"gate": (WIDE, HIDDEN), "up": (WIDE, HIDDEN), "down": (HIDDEN, WIDE)}
        for part, size in sizes.items():
            if architecture == "qwen3moe":
                found[f"{at}mlp.experts.{part}_proj.weight"] = (EXPERTS, *size)
            else:
                found[f"{at}mlp.{part}_proj.weight"] = size
        if architecture == "qwen3moe":
            found[f"{at}mlp.gate.weight"] = (EXPERTS, HIDDEN)
    return found


_FACTS: Mapping[str, Any] = {
    "block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN,
    "feed_forward_length": WIDE, "attention.head_count": HEADS, "attention.head_count_kv": KV,
    "attention.key_length": HEAD, "attention.value_length": HEAD,
    "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0, "rope.dimension_count": HEAD,
}  # fmt: skip


def model(architecture: str, kind: str, seed: int = 1) -> GgufModel:
    """A model whose matrices are of a type that gguf writes; vectors are F32, as llama.cpp has them."""
    random = np.random.default_rng(seed)
    facts = dict(_FACTS)
    if architecture == "qwen3moe":
        facts |= {
            "expert_count": EXPERTS,
            "expert_used_count": 2,
            "expert_feed_forward_length": WIDE,
        }
    if architecture in ("gemma3", "gpt-oss"):
        facts |= {"attention.sliding_window": 32}
    if architecture == "gpt-oss":
        facts |= {
            "expert_count": EXPERTS,
            "expert_used_count": 2,
            "expert_feed_forward_length": WIDE,
        }
    made = GgufModel(architecture, facts)
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    names = gguf.get_tensor_name_map(number, LAYERS)
    for name, shape in _shapes(architecture).items():
        values = (0.05 * random.standard_normal(shape)).astype(np.float32)
        if "norm" in name:
            values += np.float32(architecture != "gemma3")
        bits = values.view(np.uint32) & np.uint32(0xFFFF0000)  # bf16, as a model is published
        values = bits.view(np.float32)
        own = kind if len(shape) > 1 and ".gate.w" not in name and "router" not in name else "F32"
        stem, _, end = name.rpartition(".")
        place = f"{names.get_name(stem)}.{end}"
        if end == "sinks":
            place = f"{names.get_name(name)}.weight"
        made.stored[place] = (own, quantize(_arranged(made, name, values), Kind[own]))
        read = meaning(own, quantize(values, Kind[own]))
        if ".experts." in name:
            before, after = name.split("experts.")
            for expert in range(EXPERTS):
                made.means[f"{before}experts.{expert}.{after}"] = read[expert]
        else:
            made.means[name] = read
    for layer in range(LAYERS if architecture == "gpt-oss" else 0):
        _add_stacks(made, layer, kind, random)
    return made


def _add_stacks(made: GgufModel, layer: int, kind: str, random: np.random.Generator) -> None:
    """gpt-oss's experts: gate and up apart, in rows; in the class rows by turns, transposed."""
    at, here = f"model.layers.{layer}.mlp.experts.", f"blk.{layer}.ffn_"
    read, biases = {}, {}
    for part, shape in {
        "up": (WIDE, HIDDEN),
        "down": (HIDDEN, WIDE),
        "gate": (WIDE, HIDDEN),
    }.items():
        values = (0.05 * random.standard_normal((EXPERTS, *shape))).astype(np.float32)
        data = quantize(values, Kind[kind])
        made.stored[f"{here}{part}_exps.weight"] = (kind, data)
        read[part] = meaning(kind, data)
        biases[part] = random.standard_normal((EXPERTS, shape[0])).astype(np.float32)
        made.stored[f"{here}{part}_exps.bias"] = ("F32", biases[part])
    both = np.stack([read["gate"], read["up"]], axis=2).reshape(EXPERTS, 2 * WIDE, HIDDEN)
    made.means[f"{at}gate_up_proj"] = both.swapaxes(1, 2)
    made.means[f"{at}down_proj"] = read["down"].swapaxes(1, 2)
    made.means[f"{at}gate_up_proj_bias"] = np.stack([biases["gate"], biases["up"]], axis=2).reshape(
        EXPERTS, 2 * WIDE
    )
    made.means[f"{at}down_proj_bias"] = biases["down"]


def _arranged(made: GgufModel, name: str, values: Array) -> Array:
    """A tensor as llama.cpp's convert_hf_to_gguf.py writes it: `permute` of LlamaModel, and Gemma's
    norms."""
    if made.architecture == "gemma3" and name.endswith("norm.weight"):
        return values + np.float32(1)
    if made.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = HEADS if ".q_proj." in name else KV
        shape = (heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return np.ascontiguousarray(values.reshape(shape).swapaxes(1, 2)).reshape(values.shape)
    return values
