"""Small models whose linear layers are stored in any encoding, made by the libraries that define them
or field by field; and what each weight means, by a library or by hand. No code of qconvert."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import int_forms
import models
import numpy as np
import torch
from checkpoints import Model, Tensor

Parts = dict[str, Tensor]
Array = np.ndarray[Any, np.dtype[Any]]

SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Which of its eight outputs each nibble of AutoAWQ's words is of, from the lowest on.
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Encoding:
    """How a linear [rows, columns] is stored: its tensors by parameter, its meaning in float64, and the
    config's block."""

    make: Callable[[np.random.Generator, int, int], tuple[Parts, Array]]
    block: Mapping[str, Any]
    extra: Mapping[str, Any]


def stored(dtype: str, values: Array) -> Tensor:
    return Tensor(dtype, values.shape, np.ascontiguousarray(values).tobytes())


def _bf16(values: Array) -> Tensor:
    return Tensor("BF16", values.shape, int_forms.bf16_bits(values).tobytes())


def _as_bf16(values: Array) -> Array:
    bits = int_forms.bf16_bits(np.asarray(values, np.float32)).astype(np.uint32)
    return (bits << 16).view(np.float32)


def _fp4(random: np.random.Generator, rows: int, columns: int) -> tuple[Array, Array]:
    """Packed codes, every one of them, and their meaning."""
    codes = random.integers(0, 16, (rows, columns), np.uint8)
    codes[0, :16] = np.arange(16)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    sizes = np.array(SIZES + tuple(-size for size in SIZES))
    return packed, sizes[codes]


def _exponents(random: np.random.Generator, rows: int, blocks: int) -> Array:
    """Of weights, and a few of the smallest and of the largest for which all products are bf16."""
    found = random.integers(110, 125, (rows, blocks), np.uint8)
    found[-1, 0], found[-1, -1] = 0, 252
    return found


def mxfp4(names: tuple[str, str], kinds: tuple[str, str]) -> Callable[..., tuple[Parts, Array]]:
    def make(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
        packed, values = _fp4(random, rows, columns)
        exponents = _exponents(random, rows, columns // 32)
        scale = np.repeat(2.0 ** (exponents.astype(np.float64) - 127), 32, axis=1)
        parts = (stored(kinds[0], packed), stored(kinds[1], exponents))
        return dict(zip(names, parts, strict=True)), values * scale

    return make


def mxfp8(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
    codes = random.integers(0, 256, (rows, columns), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x38
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    exponents = random.integers(100, 125, (rows, columns // 32), np.uint8)
    scale = np.repeat(2.0 ** (exponents.astype(np.float64) - 127), 32, axis=1)
    return {
        "weight": stored("F8_E4M3", codes),
        "weight_scale": stored("U8", exponents),
    }, values * scale


def int8(symmetric: bool, group: int | None) -> Callable[..., tuple[Parts, Array]]:
    def make(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
        codes = random.integers(-128, 128, (rows, columns), np.int8)
        groups = 1 if group is None else columns // group
        scale = _as_bf16(np.abs(0.01 * random.standard_t(3, (rows, groups))))
        zero = random.integers(-128, 128, (rows, groups), np.int8)
        parts = {"weight": stored("I8", codes), "weight_scale": _bf16(scale)}
        if not symmetric:
            parts["weight_zero_point"] = stored("I8", zero)
        each = np.repeat(zero.astype(np.int64) * (not symmetric), columns // groups, axis=1)
        factor = np.repeat(scale.astype(np.float64), columns // groups, axis=1)
        return parts, (codes - each) * factor

    return make


def awq(zero_point: bool, group: int | None) -> Callable[..., tuple[Parts, Array]]:
    def make(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
        groups = 1 if group is None else columns // group
        codes = random.integers(0, 16, (columns, rows))
        zeros = random.integers(0, 16, (groups, rows))
        scale = (0.001 + np.abs(0.01 * random.standard_t(3, (groups, rows)))).astype(np.float16)
        parts = {"qweight": _awq_words(codes), "scales": stored("F16", scale)}
        if zero_point:
            parts["qzeros"] = _awq_words(zeros)
        else:
            zeros = np.full_like(zeros, 8)
        wide = np.repeat(zeros, columns // groups, axis=0)
        values = (codes - wide) * np.repeat(scale.astype(np.float64), columns // groups, axis=0)
        return parts, values.T

    return make


def _awq_words(codes: Array) -> Tensor:
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for nibble, row in enumerate(AWQ_NIBBLES):
        words |= codes[:, row::8].astype(np.uint32) << np.uint32(4 * nibble)
    return stored("I32", words)


def _groups(weights: Mapping[str, Any], form: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "format": form, "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def _float(bits: int) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
        "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8",
    }  # fmt: skip


def _int8(symmetric: bool, group: int | None) -> dict[str, Any]:
    found = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    return found if group is None else {**found, "strategy": "group", "group_size": group}


def _awq_block(zero_point: bool, group: int) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": zero_point,
        "version": "gemm",
        "modules_to_not_convert": [
            "self_attn", "shared_experts", "mlp.gate", "mlp.up_proj", "mlp.down_proj", "lm_head",
        ],
    }  # fmt: skip


ENCODINGS: dict[str, Encoding] = {
    "mxfp4": Encoding(
        mxfp4(("weight_packed", "weight_scale"), ("U8", "U8")),
        _groups(_float(4), "mxfp4-pack-quantized"), {},
    ),
    "mxfp4 beside": Encoding(
        mxfp4(("weight", "scale"), ("I8", "F8_E8M0")),
        {**models.FP8_BLOCK, "scale_fmt": "ue8m0"}, {"expert_dtype": "fp4"},
    ),
    "mxfp8": Encoding(mxfp8, _groups(_float(8), "mxfp8-quantized"), {}),
    "mxfp8 modelopt": Encoding(
        mxfp8, {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}, {}
    ),
    "int8": Encoding(int8(True, None), _groups(_int8(True, None), "int-quantized"), {}),
    "int8 asymmetric": Encoding(int8(False, 64), _groups(_int8(False, 64), "int-quantized"), {}),
    "awq": Encoding(awq(True, 64), _awq_block(True, 64), {}),
    "awq symmetric": Encoding(awq(False, 128), _awq_block(False, 128), {}),
    "awq a row": Encoding(awq(True, None), _awq_block(True, -1), {}),
}  # fmt: skip

FAMILIES: dict[str, Callable[[], Model]] = {
    "qwen3_moe": models.qwen3_moe,
    "deepseek_v3": models.deepseek_v3,
}


def encoded(family: str, encoding: str | Encoding) -> tuple[Model, dict[str, Array]]:
    """A model with its experts' matrices encoded, and what each means, by its name in BF16."""
    how = ENCODINGS[encoding] if isinstance(encoding, str) else encoding
    model = FAMILIES[family]()
    model.config.pop("quantization_config", None)
    model.config |= {"quantization_config": deepcopy(dict(how.block)), **how.extra}
    tensors, meaning = {}, {}
    for name, value in model.tensors.items():
        if ".experts." not in name or not name.endswith(".weight"):
            if not name.endswith("_scale_inv"):
                tensors[name] = _plain(value)
            continue
        random = np.random.default_rng(zlib.crc32(name.encode()))
        parts, meaning[name] = how.make(random, *value.shape)
        tensors |= {f"{name.removesuffix('.weight')}.{p}": one for p, one in parts.items()}
    model.tensors = tensors
    if encoding == "mxfp4 beside":
        left = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
        left = [module for module in left if f"{module}.scale" not in tensors]
        model.config["quantization_config"]["modules_to_not_convert"] = left
    return model, meaning


def _plain(value: Tensor) -> Tensor:
    """FP8 linears beside the experts as BF16 of any numbers: they are not what is tested."""
    if not value.dtype.startswith("F8"):
        return value
    numbers = struct.pack("<H", 0x3C00) * (len(value.data))
    return Tensor("BF16", value.shape, numbers)


def gpt_oss(layers: int = 2) -> tuple[Model, dict[str, Array]]:
    """gpt-oss with MXFP4 stacks, and the meaning of each stack, [E, inputs, outputs]."""
    hidden, intermediate, experts = 64, 96, 3
    config = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_local_experts": experts,
        "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 32, "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        },
    }  # fmt: skip
    tensors = models.bf16("model.embed_tokens.weight", 32, hidden)
    meaning = {}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors |= models.bf16(f"{at}.{norm}.weight", hidden)
        for name, rows, columns in (("q", 64, 64), ("k", 32, 64), ("v", 32, 64), ("o", 64, 64)):
            tensors |= models.bf16(f"{at}.self_attn.{name}_proj.weight", rows, columns)
            tensors |= models.bf16(f"{at}.self_attn.{name}_proj.bias", rows)
        tensors |= models.bf16(f"{at}.self_attn.sinks", 4)
        tensors |= models.bf16(f"{at}.mlp.router.weight", experts, hidden)
        tensors |= models.bf16(f"{at}.mlp.router.bias", experts)
        for name, rows, columns in (
            ("gate_up_proj", 2 * intermediate, hidden),
            ("down_proj", hidden, intermediate),
        ):
            stack = f"{at}.mlp.experts.{name}"
            random = np.random.default_rng(zlib.crc32(stack.encode()))
            make = mxfp4(("codes", "scales"), ("U8", "U8"))
            made = [make(random, rows, columns) for _ in range(experts)]
            codes = b"".join(parts["codes"].data for parts, _ in made)
            scales = b"".join(parts["scales"].data for parts, _ in made)
            grid = (experts, rows, columns // 32)
            tensors[f"{stack}_blocks"] = Tensor("U8", (*grid, 16), codes)
            tensors[f"{stack}_scales"] = Tensor("U8", grid, scales)
            tensors |= models.bf16(f"{stack}_bias", experts, rows)
            meaning[stack] = np.stack([values.T for _, values in made])
    tensors |= models.bf16("model.norm.weight", hidden)
    tensors |= models.bf16("lm_head.weight", 32, hidden)
    return Model(config, tensors, dict(models.SIDE_FILES)), meaning


def near(model: Model) -> Model:
    """The model with exponents of MXFP4 that are close together: what FP8 holds under one scale."""
    for name, value in model.tensors.items():
        if value.dtype in ("U8", "F8_E8M0") and name.endswith("scale"):
            random = np.random.default_rng(len(name))
            data = random.integers(108, 123, value.shape, np.uint8)
            model.tensors[name] = Tensor(value.dtype, value.shape, data.tobytes())
    return model


NVFP4_SCALARS = {
    "modelopt": ("weight_scale_2", "input_scale"),
    "compressed-tensors": ("weight_global_scale", "input_global_scale"),
}


def nvfp4(dialect: str, *, inputs: bool = False) -> Model:
    """Experts whose global scales are 5/4 times a power of two, for which 5/4 and .8, rounded, are each
    other's reciprocals; block scales without signs."""
    model = models.numbers_only(models.nvfp4_moe(dialect, inputs=inputs))
    power = -12 if dialect == "modelopt" else 12
    for name, value in model.tensors.items():
        if name.endswith(NVFP4_SCALARS[dialect]):
            data = struct.pack("<f", 1.25 * 2.0**power)
            model.tensors[name] = Tensor(value.dtype, value.shape, data)
        elif value.dtype == "F8_E4M3":
            data = bytes(byte & 0x7F or 0x38 for byte in value.data)
            model.tensors[name] = Tensor(value.dtype, value.shape, data)
    return model
