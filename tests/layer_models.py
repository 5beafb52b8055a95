"""Small models whose layers are stored as modelopt's MIXED_PRECISION and AMD Quark's configs state it
for each, and what every weight means in float64, by hand. No code of qconvert."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from checkpoints import Model, Tensor
from encoded_models import AWQ_NIBBLES, Array, Parts, mxfp4, mxfp8, stored
from models import qwen3_moe, stacked

Make = Callable[[np.random.Generator, int, int], tuple[Parts, Array]]


# --- encodings -----------------------------------------------------------------------------------


def _fp8(random: np.random.Generator, rows: int, columns: int) -> tuple[Array, Array]:
    codes = random.integers(0, 256, (rows, columns), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x38
    return codes, torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()


def _scales(random: np.random.Generator, *shape: int) -> Array:
    """Numbers of float32 with eight significant bits: products with codes are exact."""
    return (random.integers(128, 256, shape) * 2.0**-14).astype(np.float32)


def fp8_whole(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
    codes, values = _fp8(random, rows, columns)
    scale = _scales(random)
    return {
        "weight": stored("F8_E4M3", codes),
        "weight_scale": stored("F32", scale),
    }, values * scale


def fp8_rows(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
    codes, values = _fp8(random, rows, columns)
    scale = _scales(random, rows)
    parts = {"weight": stored("F8_E4M3", codes), "weight_scale": stored("F32", scale)}
    return parts, values * scale[:, None]


def fp8_blocks(name: str, side: tuple[int, int], kind: str = "F32", *, axes: bool = False) -> Make:
    def make(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
        codes, values = _fp8(random, rows, columns)
        grid = -(-rows // side[0]), -(-columns // side[1])
        exponents = random.integers(110, 120, grid, np.uint8)
        scale = _scales(random, *grid) if kind == "F32" else 2.0 ** (exponents.astype(float) - 127)
        wide = np.repeat(np.repeat(scale.astype(np.float64), side[0], 0), side[1], 1)
        kept = scale if kind == "F32" else exponents
        kept = kept.reshape(grid[0], 1, grid[1], 1) if axes else kept
        return {"weight": stored("F8_E4M3", codes), name: stored(kind, kept)}, values * wide[
            :rows, :columns
        ]

    return make


def nvfp4(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
    packed, values = mxfp4(("c", "s"), ("U8", "U8"))(random, rows, columns)
    codes = np.frombuffer(packed["c"].data, np.uint8).reshape(rows, columns // 2)
    exponents = np.frombuffer(packed["s"].data, np.uint8).reshape(rows, columns // 32)
    values = values / np.repeat(2.0 ** (exponents.astype(float) - 127), 32, axis=1)
    blocks = random.integers(0x20, 0x60, (rows, columns // 16), np.uint8)
    factor = torch.from_numpy(blocks).view(torch.float8_e4m3fn).double().numpy() * 2.0**-9
    parts = {
        "weight": stored("U8", codes), "weight_scale": stored("F8_E4M3", blocks),
        "weight_scale_2": stored("F32", np.array(2.0**-9, np.float32)),
        "input_scale": stored("F32", np.array(0.5, np.float32)),
    }  # fmt: skip
    return parts, values * np.repeat(factor, 16, axis=1)


def without_inputs(make: Make) -> Make:
    def made(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
        parts, values = make(random, rows, columns)
        return {name: one for name, one in parts.items() if name != "input_scale"}, values

    return made


def with_inputs(make: Make) -> Make:
    def made(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
        parts, values = make(random, rows, columns)
        return {**parts, "input_scale": stored("F32", np.array(0.5, np.float32))}, values

    return made


def int4(*, signed: bool, symmetric: bool, reorder: bool, zeros: bool, group: int = 32) -> Make:
    def make(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
        low = -8 if signed else 0
        codes = random.integers(low, low + 16, (columns, rows))
        points = random.integers(low, low + 16, (columns // group, rows))
        if symmetric:
            points[:] = 0 if signed else 8
        scale = _scales(random, columns // group, rows)
        parts = {
            "weight": _words(codes, reorder=reorder),
            "weight_scale": stored("F16", scale.astype(np.float16)),
        }
        if zeros:
            parts["weight_zero_point"] = _words(points, reorder=reorder)
        wide = np.repeat(scale.astype(np.float64), group, axis=0)
        return parts, ((codes - np.repeat(points, group, axis=0)) * wide).T

    return make


def _words(codes: Array, *, reorder: bool) -> Tensor:
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for nibble, row in enumerate(AWQ_NIBBLES if reorder else range(8)):
        words |= (codes[:, row::8] & 15).astype(np.uint32) << np.uint32(4 * nibble)
    return stored("I32", words)


def int8(*, zeros: bool) -> Make:
    def make(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
        codes, scale = random.integers(-128, 128, (rows, columns), np.int8), _scales(random, rows)
        points = random.integers(-128, 128, rows, np.int8)
        parts = {"weight": stored("I8", codes), "weight_scale": stored("F32", scale)}
        if zeros:
            parts["weight_zero_point"] = stored("I8", points)
        points = points.astype(int) * zeros
        return parts, (codes - points[:, None]) * scale.astype(np.float64)[:, None]

    return make


# By modelopt's entry of a layer.
MODELOPT: Mapping[str, tuple[Mapping[str, Any], Make]] = {
    "FP8": ({"quant_algo": "FP8"}, with_inputs(fp8_whole)),
    "FP8_PB_WO": ({"quant_algo": "FP8_PB_WO"}, fp8_blocks("weight_scale_inv", (128, 128))),
    "FP8_PB_WO of 64": (
        {"quant_algo": "FP8_PB_WO", "group_size": 64},
        fp8_blocks("weight_scale", (64, 64), axes=True),
    ),
    "FP8_PB_REAL": ({"quant_algo": "FP8_PB_REAL"}, fp8_blocks("weight_scale", (128, 128))),
    "FP8_PER_CHANNEL_PER_TOKEN": ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, fp8_rows),
    "MXFP8": ({"quant_algo": "MXFP8", "group_size": 32}, mxfp8),
    "NVFP4": ({"quant_algo": "NVFP4", "group_size": 16}, nvfp4),
    "NVFP4_AWQ": ({"quant_algo": "NVFP4_AWQ", "group_size": 16}, nvfp4),
    "W4A16_NVFP4": ({"quant_algo": "W4A16_NVFP4", "group_size": 16}, without_inputs(nvfp4)),
    "W4A8_MXFP4_FP8": (
        {"quant_algo": "W4A8_MXFP4_FP8", "group_size": 32},
        with_inputs(mxfp4(("weight", "weight_scale"), ("U8", "U8"))),
    ),
}  # fmt: skip


def of_quark(weight: object, inputs: object = None) -> dict[str, Any]:
    return {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}


def tensor_of(dtype: str, scheme: str, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "qscheme": scheme, "is_dynamic": False, "symmetric": True, **more}


E8M0 = {"group_size": 32, "scale_format": "e8m0", "ch_axis": -1}
MXFP4 = of_quark(tensor_of("fp4", "per_group", **E8M0))
_FP8 = of_quark(tensor_of("fp8_e4m3", "per_tensor"), tensor_of("fp8_e4m3", "per_tensor"))
_INT4 = tensor_of("int4", "per_group", group_size=32, ch_axis=1)
_UINT4 = {**_INT4, "dtype": "uint4", "symmetric": False}
# By Quark's config of a layer, and the pack_method.
QUARK: Mapping[str, tuple[Mapping[str, Any], Make, str]] = {
    "MXFP4": (MXFP4, mxfp4(("weight", "weight_scale"), ("U8", "U8")), "reorder"),
    "MXFP8": (of_quark(tensor_of("fp8_e4m3", "per_group", **E8M0)), mxfp8, "reorder"),
    "MXFP8 of 32 rows": (
        of_quark(
            tensor_of("fp8_e4m3", "per_block", block_size=[32, 32], scale_type="float8_e8m0fnu")
        ),
        fp8_blocks("weight_scale", (32, 32), "U8"), "reorder",
    ),
    "FP8 a tensor": (_FP8, with_inputs(fp8_whole), "reorder"),
    "FP8 a row": (of_quark([tensor_of("fp8_e4m3", "per_channel", ch_axis=0)]), fp8_rows, "reorder"),
    "FP8 in blocks": (
        of_quark(tensor_of("fp8_e4m3", "per_block", block_size=[128, 128])),
        fp8_blocks("weight_scale", (128, 128)), "reorder",
    ),
    "NVFP4": (
        of_quark([tensor_of("fp4", "per_group", group_size=16), tensor_of("fp8_e4m3", "per_tensor")]),
        without_inputs(nvfp4), "reorder",
    ),
    "INT4": (
        of_quark(_INT4), int4(signed=True, symmetric=True, reorder=True, zeros=True), "reorder",
    ),
    "INT4 without zero points": (
        of_quark(_INT4), int4(signed=True, symmetric=True, reorder=True, zeros=False), "reorder",
    ),
    "UINT4": (
        of_quark(_UINT4), int4(signed=False, symmetric=False, reorder=True, zeros=True), "reorder",
    ),
    "UINT4 in order": (
        of_quark(_UINT4), int4(signed=False, symmetric=False, reorder=False, zeros=True), "order",
    ),
    "INT8": (of_quark(tensor_of("int8", "per_channel", ch_axis=0)), int8(zeros=False), "reorder"),
    "INT8 with zero points": (
        of_quark({**tensor_of("int8", "per_channel", ch_axis=0), "symmetric": False}),
        int8(zeros=True), "reorder",
    ),
}  # fmt: skip


# --- models --------------------------------------------------------------------------------------


def model_of(experts: Make, attention: Make) -> tuple[Model, dict[str, Array]]:
    """A model whose experts and attention are encoded, and what each weight means."""
    model, tensors, meaning = qwen3_moe(), dict[str, Tensor](), dict[str, Array]()
    for name, value in model.tensors.items():
        make = experts if ".experts." in name else attention if "_proj." in name else None
        if make is None:
            tensors[name] = value
            continue
        random = np.random.default_rng(zlib.crc32(name.encode()))
        parts, meaning[name] = make(random, *value.shape)
        tensors |= {f"{name.removesuffix('.weight')}.{p}": one for p, one in parts.items()}
    model.tensors = tensors
    return model, meaning


_LEFT = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]


def mixed(experts: str, attention: str) -> tuple[Model, dict[str, Array]]:
    """modelopt's MIXED_PRECISION with an entry for each module."""
    (first, make), (second, other) = MODELOPT[experts], MODELOPT[attention]
    model, meaning = model_of(make, other)
    modules = [name.removesuffix(".weight") for name in meaning]
    model.config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": _LEFT,
        "kv_cache_quant_algo": None,
        "quantized_layers": {
            module: dict(first if ".experts." in module else second) for module in modules
        },
    }  # fmt: skip
    return model, meaning


def quark(experts: str, attention: str | None = None) -> tuple[Model, dict[str, Array]]:
    """Quark's config: one for all layers, with another for attention."""
    first, make, pack = QUARK[experts]
    second, other, _ = QUARK[attention or experts]
    model, meaning = model_of(make, other)
    layers = {} if attention is None else {"*self_attn.[qkv]_proj": second, "*.o_proj": second}
    model.config["quantization_config"] = {
        "quant_method": "quark", "global_quant_config": first, "exclude": _LEFT,
        "layer_quant_config": layers, "layer_type_quant_config": {}, "kv_cache_quant_config": {},
        "export": {"kv_cache_group": [], "pack_method": pack, "weight_format": "real_quantized"},
    }  # fmt: skip
    return model, meaning


def stacked_fp8() -> Model:
    """Stacks of experts in block FP8, where modelopt's table names each expert's matrices."""
    model, at, table = stacked(), "model.layers.0.mlp.experts", dict[str, Any]()
    for name in (f"{at}.gate_up_proj", f"{at}.down_proj"):
        experts, rows, columns = model.tensors[name].shape
        random = np.random.default_rng(zlib.crc32(name.encode()))
        codes, _ = _fp8(random, experts * rows, columns)
        model.tensors[name] = stored("F8_E4M3", codes.reshape(experts, rows, columns))
        grid = experts, -(-rows // 128), -(-columns // 128)
        model.tensors[f"{name}_scale_inv"] = stored("F32", _scales(random, *grid))
        for expert in range(experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                table[f"{at}.{expert}.{part}"] = {"quant_algo": "FP8_PB_WO"}
    left = [n.removesuffix(".weight") for n, t in model.tensors.items() if t.dtype == "BF16"]
    model.config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": left,
        "kv_cache_quant_algo": None, "quantized_layers": table,
    }  # fmt: skip
    return model


def plain() -> Model:
    """A model in BF16 whose numbers are those of weights."""
    model = qwen3_moe()
    for name, value in model.tensors.items():
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        made = (torch.randn(value.shape, generator=random) * 0.05).bfloat16()
        data = made.view(torch.uint8).numpy().tobytes()
        model.tensors[name] = Tensor("BF16", value.shape, data)
    return model
