"""Small models as msmodelslim stores them, made field by field, and the meaning of each weight by the
format's text: (code - offset) * scale in float32. No code of qconvert."""

from __future__ import annotations

import json
import zlib
from typing import Any

import models
import numpy as np
from checkpoints import Model, Tensor

Array = np.ndarray[Any, np.dtype[Any]]
Parts = dict[str, Tensor]
KINDS = [
    "W8A8_DYNAMIC", "W8A8", "W8A8 of float16", "W8A8_MIX", "W8A16", "W8A16 in groups", "W4A8_DYNAMIC",
    "W4A4_DYNAMIC",
]  # fmt: skip


def tensor(values: Array) -> Tensor:
    kinds = {"int8": "I8", "int32": "I32", "int64": "I64", "float32": "F32"}
    return Tensor(kinds[values.dtype.name], values.shape, np.ascontiguousarray(values).tobytes())


def encode(kind: str, seed: str, rows: int, columns: int) -> tuple[Parts, Array]:
    """A weight of every code, and its meaning in float32."""
    random = np.random.default_rng(zlib.crc32(seed.encode()))
    bits = 4 if kind.startswith("W4") else 8
    codes = random.integers(-(1 << bits - 1), 1 << bits - 1, (rows, columns), np.int8)
    codes.reshape(-1)[: 1 << bits] = np.arange(-(1 << bits - 1), 1 << bits - 1)
    groups = columns // 16 if kind.endswith("groups") else 1
    scale = (0.001 + np.abs(0.01 * random.standard_t(3, (rows, groups)))).astype(np.float32)
    offset = np.zeros_like(scale)
    if kind.startswith(("W8A16", "W4A4")):
        offset = random.integers(-20, 20, scale.shape).astype(np.float32)
    inputs = {
        "input_scale": tensor(np.array([0.037], np.float32)),
        "input_offset": tensor(np.array([3], np.float32)),
        "quant_bias": tensor(random.integers(-99, 99, rows, np.int32)),
    }
    parts = {"weight": tensor(codes)}
    if kind.startswith("W8A8") and not kind.endswith("DYNAMIC"):
        product = scale[:, 0] * np.float32(0.037)
        bits64 = product.view(np.int32).astype(np.int64)
        parts |= {**inputs, "deq_scale": tensor(bits64 if "float16" in kind else product)}
        if not kind.endswith("MIX"):
            return parts, codes * (product / np.float32(0.037))[:, None]
    if kind == "W4A8_DYNAMIC":
        packed = (codes[::2] & 15 | codes[1::2] << 4).astype(np.int8)
        sums = (8 * scale * codes.sum(axis=1, keepdims=True)).astype(np.float32)
        parts = {"weight": tensor(packed), "scale_bias": tensor(sums)}
    parts |= {"weight_scale": tensor(scale), "weight_offset": tensor(offset)}
    each = [np.repeat(one, columns // groups, axis=1) for one in (scale, offset)]
    return parts, (codes.astype(np.float32) - each[1]) * each[0]


def ascend_model(kind: str) -> tuple[Model, dict[str, Array]]:
    """A Qwen3-MoE with every linear but the head and routers of one type."""
    model = models.qwen3_moe("bf16", hidden=48, intermediate=32)
    tensors, meaning, stated = {}, {}, {}
    for name, value in model.tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name], stated[name] = value, "FLOAT"
            continue
        parts, meaning[name] = encode(kind, name, *value.shape)
        tensors |= {f"{module}.{part}": one for part, one in parts.items()}
        stated |= {f"{module}.{part}": kind.partition(" ")[0] for part in parts}
    stated |= {"version": "1.0.0", "model_quant_type": kind.partition(" ")[0]}
    side = {**model.side_files, "quant_model_description.json": json.dumps(stated).encode()}
    return Model(model.config, tensors, side), meaning
