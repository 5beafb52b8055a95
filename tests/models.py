"""Small checkpoints of model families, with weights in any form.

Sizes are those that kernels take; bytes come from a name's hash, so a tensor is the same in every model.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import amx_rows
import faults
from checkpoints import Model, Tensor, tensor

from qconvert.core.dtypes import TensorType

HIDDEN, INTERMEDIATE, EXPERTS, GROUP, BLOCK = 128, 256, 2, 128, 128


FP8_BLOCK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}


SIDE_FILES = {
    "tokenizer.json": b'{"version": "1.0"}\n',
    "README.md": b"# The model's own page\n",
}


def bf16(name: str, *shape: int) -> dict[str, Tensor]:
    """A bf16 tensor with rows of every awkward kind, or ordinary ones where there is but one row."""
    columns = shape[-1]
    rows = max(1, len(shape) > 1 and shape[0])
    bits = amx_rows.matrix(rows, columns, zlib.crc32(name.encode()))
    return {name: Tensor("BF16", shape, bits.tobytes())}


def fp8(module: str, rows: int, columns: int) -> dict[str, Tensor]:
    made = faults.weight(f"{module}.weight", (rows, columns), zlib.crc32(module.encode()))
    return {name: Tensor(kind.dtype, kind.shape, data) for name, (kind, data) in made.items()}


def linear(module: str, rows: int, columns: int, form: str) -> dict[str, Tensor]:
    return fp8(module, rows, columns) if form == "fp8" else bf16(f"{module}.weight", rows, columns)


def mlp(at: str, hidden: int, intermediate: int, form: str) -> dict[str, Tensor]:
    return {
        **linear(f"{at}.gate_proj", intermediate, hidden, form),
        **linear(f"{at}.up_proj", intermediate, hidden, form),
        **linear(f"{at}.down_proj", hidden, intermediate, form),
    }


def qwen3_moe(
    form: str = "bf16",
    *,
    bf16_modules: tuple[str, ...] = (),
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    layers: int = 2,
    experts: int = EXPERTS,
) -> Model:
    """Every linear layer in bf16 or in block FP8, but for those whose names end as said."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_experts": experts,
        "moe_intermediate_size": intermediate,
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    }
    if form == "fp8":
        config["quantization_config"] = FP8_BLOCK
    tensors = bf16("model.embed_tokens.weight", 8, hidden)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors |= bf16(f"{at}.{norm}.weight", hidden)
        for name, rows in (("q_proj", hidden), ("k_proj", 64), ("v_proj", 64), ("o_proj", hidden)):
            module = f"{at}.self_attn.{name}"
            kept = module.endswith(bf16_modules) if bf16_modules else False
            tensors |= linear(module, rows, hidden, "bf16" if kept else form)
        for name in ("q_norm", "k_norm"):
            tensors |= bf16(f"{at}.self_attn.{name}.weight", 32)
        tensors |= bf16(f"{at}.mlp.gate.weight", experts, hidden)
        for expert in range(experts):
            tensors |= mlp(f"{at}.mlp.experts.{expert}", hidden, intermediate, form)
    tensors |= bf16("model.norm.weight", hidden)
    tensors |= bf16("lm_head.weight", 8, hidden)
    return Model(config, tensors, dict(SIDE_FILES))


def deepseek_v3() -> Model:
    """A dense layer, a layer with experts, a draft layer; every linear layer FP8, as published."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": INTERMEDIATE,
        "quantization_config": FP8_BLOCK,
    }
    tensors = bf16("model.embed_tokens.weight", 8, HIDDEN)
    for layer in range(3):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors |= bf16(f"{at}.{norm}.weight", HIDDEN)
        attn = f"{at}.self_attn"
        tensors |= bf16(f"{attn}.q_a_layernorm.weight", 64)
        tensors |= bf16(f"{attn}.kv_a_layernorm.weight", 32)
        tensors |= fp8(f"{attn}.q_a_proj", 64, HIDDEN) | fp8(f"{attn}.q_b_proj", HIDDEN, 64)
        tensors |= fp8(f"{attn}.kv_a_proj_with_mqa", 48, HIDDEN)
        tensors |= fp8(f"{attn}.kv_b_proj", 192, 32) | fp8(f"{attn}.o_proj", HIDDEN, HIDDEN)
        if layer == 0:
            tensors |= mlp(f"{at}.mlp", HIDDEN, INTERMEDIATE, "fp8")
            continue
        tensors |= bf16(f"{at}.mlp.gate.weight", EXPERTS, HIDDEN)
        bias = f"{at}.mlp.gate.e_score_correction_bias"
        tensors[bias] = Tensor("F32", (EXPERTS,), bytes(4 * EXPERTS))
        tensors |= mlp(f"{at}.mlp.shared_experts", HIDDEN, INTERMEDIATE, "fp8")
        for expert in range(EXPERTS):
            tensors |= mlp(f"{at}.mlp.experts.{expert}", HIDDEN, INTERMEDIATE, "fp8")
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors |= bf16(f"model.layers.2.{name}.weight", HIDDEN)
    tensors |= bf16("model.layers.2.embed_tokens.weight", 8, HIDDEN)
    tensors |= bf16("model.layers.2.eh_proj.weight", HIDDEN, 2 * HIDDEN)
    tensors |= bf16("model.layers.2.shared_head.head.weight", 8, HIDDEN)
    tensors |= bf16("model.norm.weight", HIDDEN)
    tensors |= bf16("lm_head.weight", 8, HIDDEN)
    return Model(config, tensors, dict(SIDE_FILES))


def with_exponents(model: Model) -> Model:
    """A block-FP8 model with scales that are exponents (E8M0) of 2**-7 to 2**-4."""
    for name, (_, shape, _) in list(model.tensors.items()):
        if name.endswith(".weight_scale_inv"):
            count = math.prod(shape)
            model.tensors[name] = Tensor("F8_E8M0", shape, bytes(120 + n % 4 for n in range(count)))
    model.config["quantization_config"] = FP8_BLOCK | {"scale_fmt": "ue8m0"}
    return model


def with_two_configs() -> Model:
    """Its quantization is also said in a file beside config.json, as ModelOpt does it."""
    model = qwen3_moe("fp8")
    block = {"quant_algo": "FP8", "weight_block_size": [BLOCK, BLOCK]}
    model.side_files["hf_quant_config.json"] = json.dumps({"quantization": block}).encode()
    return model


MODELS: dict[str, Callable[[], Model]] = {
    "bf16": qwen3_moe,
    "fp8": with_two_configs,
    "mixed": lambda: qwen3_moe("fp8", bf16_modules=("1.self_attn.o_proj",)),
    "deepseek": deepseek_v3,
}


def decoded(model: Model, module: str) -> bytes:
    """A matrix as bf16 bytes: as it is, or bf16(fp32(code) * fp32(scale)) by torch."""
    dtype, shape, data = model.tensors[f"{module}.weight"]
    if dtype == "BF16":
        return data
    import torch  # here, because crash/ forks what it imports, hundreds of times

    codes = torch.frombuffer(bytearray(data), dtype=torch.float8_e4m3fn).view(shape).float()
    scale = model.tensors[f"{module}.weight_scale_inv"]
    spread = torch.frombuffer(bytearray(scale.data), dtype=torch.float32).view(scale.shape)
    for dim in (0, 1):
        spread = spread.repeat_interleave(BLOCK, dim)
    values = (codes * spread[: shape[0], : shape[1]]).bfloat16()
    return values.view(torch.uint8).numpy().tobytes()


def _float_quantized(weights: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def per_channel() -> Model:
    """FP8 with a scale a row, as compressed-tensors writes it."""
    model = qwen3_moe("fp8", layers=1)
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    model.config["quantization_config"] = _float_quantized(weights)
    tensors = {}
    for name, value in model.tensors.items():
        if not name.endswith("_scale_inv"):
            tensors[name] = value
            continue
        rows = model.tensors[name.removesuffix("_scale_inv")].shape[0]
        tensors[name.removesuffix("_inv")] = Tensor("F32", (rows, 1), b"\0\0\0\x3f" * rows)
    model.tensors = tensors
    return model


def per_tensor() -> Model:
    model = per_channel()
    group = model.config["quantization_config"]["config_groups"]["group_0"]
    group["weights"]["strategy"] = "tensor"
    model.tensors = {
        name: Tensor("F32", (), b"\0\0\0\x3f") if name.endswith("weight_scale") else value
        for name, value in model.tensors.items()
    }
    return model


def blocks(rows: int, columns: int, scale: str = "weight_scale_inv") -> Model:
    """Block FP8, its scales under either name; hidden and intermediate sizes of two blocks of 128."""
    model = qwen3_moe("fp8", hidden=256, layers=1)
    if scale == "weight_scale_inv":
        model.config["quantization_config"] = {**FP8_BLOCK, "weight_block_size": [rows, columns]}
    else:
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "symmetric": True}
        weights["block_structure"] = [rows, columns]
        model.config["quantization_config"] = _float_quantized(weights)
    tensors = {}
    for name, value in model.tensors.items():
        if not name.endswith("_scale_inv"):
            tensors[name] = value
            continue
        height, width = model.tensors[name.removesuffix("_scale_inv")].shape
        grid = -(-height // rows), -(-width // columns)
        named = name.replace("weight_scale_inv", scale)
        tensors[named] = Tensor("F32", grid, b"\0\0\0\x3f" * (grid[0] * grid[1]))
    model.tensors = tensors
    return model


def kimi(*, scales: bool = True) -> Model:
    """Experts in compressed-tensors' INT4, groups of 32."""
    model = qwen3_moe(layers=1)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
    weights["group_size"] = 32
    model.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    tensors = {}
    for name, value in model.tensors.items():
        if ".mlp.experts." not in name:
            tensors[name] = value
            continue
        rows, columns = value.shape
        codes = Tensor("I32", (rows, columns // 8), bytes(range(256)) * (rows * columns // 512))
        tensors[f"{name}_packed"] = codes
        if scales:
            grid = (rows, columns // 32)
            tensors[f"{name}_scale"] = Tensor("BF16", grid, b"\0\x3f" * (grid[0] * grid[1]))
        shape = rows.to_bytes(8, "little") + columns.to_bytes(8, "little")
        tensors[f"{name}_shape"] = Tensor("I64", (2,), shape)
    model.tensors = tensors
    return model


def stacked() -> Model:
    """Experts of a layer in 3-D stacks, gate rows first."""
    model = qwen3_moe(layers=1)
    at = "model.layers.0.mlp.experts"
    kept = {name: value for name, value in model.tensors.items() if at not in name}
    weights = {name: value.data for name, value in model.tensors.items() if at in name}
    halves = [
        weights[f"{at}.{expert}.{kind}.weight"]
        for expert in range(EXPERTS)
        for kind in ("gate_proj", "up_proj")
    ]
    downs = [weights[f"{at}.{expert}.down_proj.weight"] for expert in range(EXPERTS)]
    shape = (EXPERTS, 2 * INTERMEDIATE, HIDDEN)
    kept[f"{at}.gate_up_proj"] = Tensor("BF16", shape, b"".join(halves))
    kept[f"{at}.down_proj"] = Tensor("BF16", (EXPERTS, HIDDEN, INTERMEDIATE), b"".join(downs))
    model.tensors = kept
    return model


def cast(dtype: str) -> Model:
    """Experts in a float type kt-kernel has no loader for."""
    model = qwen3_moe(layers=1)
    size = TensorType(dtype, (1,)).nbytes
    model.tensors = {
        name: Tensor(dtype, value.shape, bytes(len(value.data) // 2 * size))
        if ".mlp.experts." in name
        else value
        for name, value in model.tensors.items()
    }
    return model


NVFP4_EXPERTS = 3


def nvfp4_moe(
    dialect: str = "modelopt",
    *,
    hidden: int = 128,
    intermediate: int = 64,
    experts: int = NVFP4_EXPERTS,
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
        "num_hidden_layers": 2,
        "num_experts": experts,
        "moe_intermediate_size": intermediate,
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
        "quantization_config": block,
    }
    tensors = {"model.embed_tokens.weight": tensor("BF16", 10, hidden)}
    for layer in range(2):
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
                    _global_scale(random, modelopt),
                    _global_scale(random, modelopt),
                )
                for name, value in zip(names[: 3 + inputs], values, strict=False):
                    tensors[f"{module}.{name}"] = value
    tensors["model.norm.weight"] = tensor("BF16", hidden)
    tensors["lm_head.weight"] = tensor("BF16", 10, hidden, seed=2)
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


def _global_scale(random: Random, modelopt: bool) -> Tensor:
    value = random.uniform(1e-4, 1e-2) if modelopt else random.uniform(100, 9000)
    return Tensor("F32", () if modelopt else (1,), struct.pack("<f", value))
