"""Small models in bitsandbytes' codes, made field by field, and the meaning of each weight by the
format's text: products in float32, one after another. No code of qconvert."""

from __future__ import annotations

import json
import zlib
from typing import Any, NamedTuple

import models
import numpy as np
from checkpoints import Model, Tensor

Array = np.ndarray[Any, np.dtype[Any]]
Parts = dict[str, Tensor]
# bitsandbytes 0.50, `functional.py`, `get_4bit_type`.
TABLES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ),
    "fp4": (
        0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25,
        0.0, -0.005208333333, -0.66666667, -1.0, -0.33333333, -0.5, -0.16666667, -0.25,
    ),
}  # fmt: skip


class Scheme(NamedTuple):
    """nf4, fp4 or int8; the elements of a block; whether the largest of blocks are codes."""

    kind: str
    block: int = 64
    nested: bool = False

    @property
    def config(self) -> dict[str, Any]:
        four = self.kind != "int8"
        stated = {"bnb_4bit_quant_type": self.kind} if four else {}
        return {
            "quant_method": "bitsandbytes", "load_in_4bit": four, "load_in_8bit": not four,
            "bnb_4bit_use_double_quant": self.nested, "bnb_4bit_quant_storage": "uint8", **stated,
        }  # fmt: skip


SCHEMES = [
    Scheme("nf4"),
    Scheme("nf4", nested=True),
    Scheme("fp4", 128),
    Scheme("fp4", 64, nested=True),
    Scheme("int8"),
]


def tensor(values: Array) -> Tensor:
    kinds = {"uint8": "U8", "int8": "I8", "float32": "F32"}
    return Tensor(kinds[values.dtype.name], values.shape, np.ascontiguousarray(values).tobytes())


def encode(scheme: Scheme, seed: str, rows: int, columns: int) -> tuple[Parts, Array]:
    """A weight of every code, and its meaning in float32."""
    random = np.random.default_rng(zlib.crc32(seed.encode()))
    if scheme.kind == "int8":
        codes = random.integers(-128, 128, (rows, columns), np.int8)
        largest = np.abs(random.standard_t(3, rows)).astype(np.float32)
        order = tensor(np.zeros(1, np.uint8))._replace(shape=())
        parts = {"weight": tensor(codes), "SCB": tensor(largest), "weight_format": order}
        products = codes.astype(np.float32) * largest[:, None]
        return parts, products * np.float32(7.874015718698502e-3)
    count = rows * columns
    table = np.array(TABLES[scheme.kind], np.float32)
    blocks = -(-count // scheme.block)
    fields = random.integers(0, 16, count, np.uint8)
    fields[:16] = np.arange(16)
    padded = np.append(fields, np.zeros(count % 2, np.uint8))
    packed = (padded[::2] << 4 | padded[1::2]).reshape(-1, 1)
    state: dict[str, Any] = {
        "quant_type": scheme.kind, "blocksize": scheme.block, "dtype": "bfloat16",
        "shape": [rows, columns],
    }  # fmt: skip
    scales = np.abs(0.1 * random.standard_t(3, blocks)).astype(np.float32)
    parts = {"weight": tensor(packed), "weight.absmax": tensor(scales)}
    if scheme.nested:
        inner = random.integers(0, 256, blocks, np.uint8)
        inner[:256] = np.arange(256, dtype=np.uint8)[:blocks]
        outer = np.abs(0.1 * random.standard_t(3, -(-blocks // 256))).astype(np.float32)
        map8 = np.sort(random.standard_normal(256)).astype(np.float32)
        offset = float(np.float32(0.37))
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        parts |= {
            "weight.absmax": tensor(inner), "weight.nested_absmax": tensor(outer),
            "weight.nested_quant_map": tensor(map8),
        }  # fmt: skip
        scales = map8[inner] * np.repeat(outer, 256)[:blocks] + np.float32(offset)
    said = np.frombuffer(json.dumps(state).encode(), np.uint8)
    parts["weight.quant_map"] = tensor(table)
    parts[f"weight.quant_state.bitsandbytes__{scheme.kind}"] = tensor(said)
    values = table[fields] * np.repeat(scales, scheme.block)[:count]
    return parts, values.reshape(rows, columns)


def bnb_model(scheme: Scheme) -> tuple[Model, dict[str, Array]]:
    """A Qwen3-MoE of sizes in which blocks cross rows, every linear but the head and routers encoded."""
    model = models.qwen3_moe("bf16", hidden=48, intermediate=40)
    tensors, meaning = {}, {}
    for name, value in model.tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = value
            continue
        parts, meaning[name] = encode(scheme, name, *value.shape)
        tensors |= {f"{module}.{part}": one for part, one in parts.items()}
    config = {**model.config, "quantization_config": scheme.config}
    return Model(config, tensors, model.side_files), meaning
