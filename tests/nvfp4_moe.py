"""Small NVFP4 mixtures of experts with random bytes, in either dialect, gated or plain; and an oracle of
the trtllm-gen layout that goes byte by byte."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

from checkpoints import Model, Tensor, tensor

EXPERTS, LAYERS, VOCAB = 3, 2, 10


def nvfp4_moe(
    dialect: str = "modelopt",
    *,
    hidden: int = 128,
    intermediate: int = 64,
    experts: int = EXPERTS,
    gated: bool = True,
    inputs: bool = True,
    seed: int = 1,
) -> Model:
    """A Qwen3-MoE of two layers whose experts are NVFP4; plain ones go by a model_type of nobody's."""
    random = Random(seed)
    modelopt = dialect == "modelopt"
    names = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    if not modelopt:
        names = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    block: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4" if inputs else "W4A16_NVFP4",
        "group_size": 16,
        "ignore": ["lm_head", "*self_attn*", "*mlp.gate"],
    }
    if not modelopt:
        scheme = {
            "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
            "symmetric": True,
        }  # fmt: skip
        group: dict[str, Any] = {"targets": ["Linear"], "weights": scheme}
        if inputs:
            group["input_activations"] = {**scheme, "dynamic": "local"}
        block = {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", r"re:.*self_attn.*", r"re:.*mlp\.gate$"],
        }
    config = {
        "model_type": "qwen3_moe" if gated else "plain_moe",
        "hidden_size": hidden,
        "num_hidden_layers": LAYERS,
        "num_experts": experts,
        "moe_intermediate_size": intermediate,
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
        "quantization_config": block,
    }
    tensors = {"model.embed_tokens.weight": tensor("BF16", VOCAB, hidden)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = tensor("BF16", hidden, seed=layer)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{at}.self_attn.{name}.weight"] = tensor("BF16", hidden, hidden, seed=layer)
        for name in ("q_norm", "k_norm"):
            tensors[f"{at}.self_attn.{name}.weight"] = tensor("BF16", 4, seed=layer)
        tensors[f"{at}.mlp.gate.weight"] = tensor("BF16", experts, hidden, seed=layer)
        for expert in range(experts):
            for projection in ("gate_proj", "up_proj", "down_proj")[not gated :]:
                down = projection == "down_proj"
                rows, columns = (hidden, intermediate) if down else (intermediate, hidden)
                module = f"{at}.mlp.experts.{expert}.{projection}"
                values = (
                    Tensor("U8", (rows, columns // 2), random.randbytes(rows * columns // 2)),
                    Tensor(
                        "F8_E4M3", (rows, columns // 16), random.randbytes(rows * columns // 16)
                    ),
                    _number(random, modelopt),
                    _number(random, modelopt),
                )
                for name, value in zip(names[: 3 + inputs], values, strict=False):
                    tensors[f"{module}.{name}"] = value
    tensors["model.norm.weight"] = tensor("BF16", hidden)
    tensors["lm_head.weight"] = tensor("BF16", VOCAB, hidden, seed=2)
    return Model(
        config, tensors, {"tokenizer.json": b"{}\n", "chat_template.jinja": b"{{ messages }}\n"}
    )


def numbers_only(model: Model) -> Model:
    """The model without NaN among its scales."""
    for name, value in model.tensors.items():
        if value.dtype == "F8_E4M3":
            numbers = bytes(0x38 if byte & 0x7F == 0x7F else byte for byte in value.data)
            model.tensors[name] = Tensor(value.dtype, value.shape, numbers)
    return model


def _number(random: Random, modelopt: bool) -> Tensor:
    value = random.uniform(1e-4, 1e-2) if modelopt else random.uniform(100, 9000)
    return Tensor("F32", () if modelopt else (1,), struct.pack("<f", value))


def source_row(n: int, rows: int, gated: bool) -> int:
    """The row of [w1; w3] (or of the one matrix) that stands in prepared row n, step by step."""
    block, place = divmod(n, 32)
    c, r = divmod(place, 8)
    n = 32 * block + 4 * r + c
    if not gated:
        return n
    n = n // 2 if n % 2 == 0 else rows // 2 + n // 2  # rows of [w3; w1] in turn
    return n + rows // 2 if n < rows // 2 else n - rows // 2  # which lie as [w1; w3]


def shuffled(data: bytes, rows: int, gated: bool) -> bytes:
    """Prepared weights of one expert, from its rows of w1 followed by those of w3."""
    width = len(data) // rows
    found = (source_row(n, rows, gated) for n in range(rows))
    return b"".join(data[row * width : (row + 1) * width] for row in found)


def interleaved(data: bytes, rows: int, gated: bool) -> bytes:
    """Prepared block scales of one expert."""
    width = len(data) // rows
    result = bytearray(len(data))
    for m in range(rows):
        row = source_row(m, rows, gated)
        for k in range(width):
            tile = (m // 128) * (width // 4) + k // 4
            at = tile * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + k % 4
            result[at] = data[row * width + k]
    return bytes(result)
