"""Packed integers of every width and of every tool that states them, bit by bit, and the config's
blocks. No code of qconvert, of its validators, or of the tools."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import int_forms
import models
import numpy as np
from checkpoints import Model, Tensor
from encoded_models import Array, Encoding, Parts, stored

PLAIN = ["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*", "re:.*shared_experts.*"]
# Linears of a tiny Qwen3-MoE and of a tiny DeepSeek that stay as they are: all but routed experts.
LEFT = (
    r".*(self_attn|shared_experts|mlp\.(gate|gate_proj|up_proj|down_proj)$|lm_head|eh_proj|head).*"
)


def words(codes: Array, bits: int) -> Array:
    """Rows of codes from 0 up -> words [n, ceil(K * bits / 32)]: a string of bits, the lowest first."""
    each = codes.astype(np.int64)[:, :, None] >> np.arange(bits) & 1
    line = each.reshape(codes.shape[0], -1)
    line = np.pad(line, ((0, 0), (0, -line.shape[1] % 32)))
    found = (line.reshape(codes.shape[0], -1, 32) << np.arange(32)).sum(-1)
    return np.asarray(found, np.int64).astype(np.uint32)


def _drawn(
    random: np.random.Generator, rows: int, columns: int, bits: int, group: int | None, zeros: bool
) -> tuple[Array, Array, Array]:
    """Codes, every one of them, zero points, and scales, of both signs without zero points."""
    codes = random.integers(0, 1 << bits, (rows, columns))
    line = codes.reshape(-1)
    line[: 1 << bits] = np.arange(1 << bits)[: line.size]
    groups = 1 if group is None else columns // group
    zero = np.full((rows, groups), 1 << (bits - 1))
    if zeros:
        zero = random.integers(0, 1 << bits, (rows, groups))
    scale = 0.001 + np.abs(0.01 * random.standard_t(3, (rows, groups)))
    if not zeros:
        scale *= random.choice([-1, 1], (rows, groups))
    return codes, zero, scale


def _spread(values: Array, columns: int) -> Array:
    return np.repeat(values, columns // values.shape[1], axis=1)


def packed(bits: int, *, symmetric: bool = True, group: int | None = 32) -> Callable[..., Any]:
    """compressed-tensors' pack-quantized, scales in BF16."""

    def make(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
        codes, zero, scale = _drawn(random, rows, columns, bits, group, not symmetric)
        kept = int_forms.bf16_bits(scale.astype(np.float32))
        exact = (kept.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        parts = {
            "weight_packed": stored("I32", words(codes, bits)),
            "weight_scale": Tensor("BF16", scale.shape, kept.tobytes()),
            "weight_shape": stored("I64", np.array([rows, columns])),
        }
        if not symmetric:
            parts["weight_zero_point"] = stored("I32", words(zero.T, bits).T)
        return parts, (codes - _spread(zero, columns)) * _spread(exact, columns)

    return make


def qweight(
    bits: int, *, less: int, symmetric: bool = True, group: int | None = 32, index: bool = False
) -> Callable[..., Any]:
    """GPTQ's own form, zero points stored minus `less`, with g_idx or without."""

    def make(random: np.random.Generator, rows: int, columns: int) -> tuple[Parts, Array]:
        codes, zero, scale = _drawn(random, rows, columns, bits, group, not symmetric)
        zero = np.maximum(zero, less)
        half = scale.astype(np.float16)
        parts = {
            "qweight": stored("I32", words(codes, bits).T),
            "qzeros": stored("I32", words(zero.T - less, bits)),
            "scales": stored("F16", half.T),
        }
        if index:
            parts["g_idx"] = stored("I32", (np.arange(columns) // (group or columns)).astype("<i4"))
        exact = _spread(half.astype(np.float64), columns)
        return parts, (codes - _spread(zero, columns)) * exact

    return make


def groups_block(bits: int, *, symmetric: bool = True, group: int | None = 32) -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric,
        "strategy": "channel" if group is None else "group", "group_size": group,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": PLAIN,
        "config_groups": {"group_0": {"targets": [r"re:.*\.experts\..*"], "weights": weights}},
    }  # fmt: skip


def gptq_block(bits: int, group: int, *, form: str = "gptq", **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True,
        "checkpoint_format": form, "dynamic": {f"-:{LEFT}": {}}, **more,
    }  # fmt: skip


def auto_round_block(
    bits: int, group: int, packing: str, extra: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "quant_method": "auto-round", "bits": bits, "group_size": group, "sym": True,
        "data_type": "int", "packing_format": packing, "autoround_version": "0.15.1",
        "block_name_to_quantize": "model.layers", "extra_config": {**(extra or {}), LEFT: {"bits": 16}},
        **more,
    }  # fmt: skip


def mixed(
    block: Mapping[str, Any], makers: Mapping[str, Callable[..., Any]]
) -> tuple[Model, dict[str, Array]]:
    """A tiny Qwen3-MoE whose modules are made by the first pattern that is found in their names, and
    what each of their weights means."""
    model = models.qwen3_moe()
    model.config |= {"quantization_config": dict(block)}
    tensors: dict[str, Tensor] = {}
    meaning = {}
    for name, value in model.tensors.items():
        module = name.removesuffix(".weight")
        make = next((one for key, one in makers.items() if re.search(key, module)), None)
        if make is None or module == name or len(value.shape) != 2:
            tensors[name] = value
            continue
        random = np.random.default_rng(zlib.crc32(name.encode()))
        parts, meaning[name] = make(random, *value.shape)
        tensors |= {f"{module}.{part}": one for part, one in parts.items()}
    model.tensors = tensors
    return model, meaning


INTEGERS: dict[str, Encoding] = {
    **{
        f"packed, {bits} bits": Encoding(packed(bits), groups_block(bits), {})
        for bits in (2, 3, 5, 6, 7)
    },
    "packed, 3 bits, zero points": Encoding(
        packed(3, symmetric=False), groups_block(3, symmetric=False), {}
    ),
    "packed, 6 bits a row": Encoding(packed(6, group=None), groups_block(6, group=None), {}),
    "gptq, 2 bits": Encoding(qweight(2, less=1, index=True), gptq_block(2, 32), {}),
    "gptq, 3 bits": Encoding(qweight(3, less=1, index=True), gptq_block(3, 32), {}),
    "gptq v2, 3 bits, zero points": Encoding(
        qweight(3, less=0, symmetric=False), gptq_block(3, 32, form="gptq_v2", sym=False), {}
    ),
    "auto_gptq": Encoding(
        qweight(4, less=1, group=64), auto_round_block(4, 64, "auto_round:auto_gptq"), {}
    ),
    "gptqmodel": Encoding(
        qweight(4, less=0, index=True), auto_round_block(4, 32, "auto_round:gptqmodel"), {}
    ),
    "auto_round, 3 bits": Encoding(
        qweight(3, less=0, symmetric=False), auto_round_block(3, 32, "auto_round", sym=False), {}
    ),
}
