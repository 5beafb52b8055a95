"""Small models as mlx-lm stores them, made field by field, and the meaning of each weight by the
format's text, in float64 rounded where mlx rounds. No code of qconvert."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import models
import numpy as np
import torch
from checkpoints import Model, Tensor

Array = np.ndarray[Any, np.dtype[Any]]
Parts = dict[str, Tensor]
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIZES_SIGNED = np.array(SIZES + tuple(-size for size in SIZES))
KINDS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Scheme(NamedTuple):
    """Mode, bits, group size, dtype of scales."""

    mode: str
    bits: int
    group: int
    dtype: str

    @property
    def block(self) -> dict[str, Any]:
        stated: dict[str, Any] = {"group_size": self.group, "bits": self.bits}
        return stated if self.mode == "affine" else {**stated, "mode": self.mode}


AFFINE = [
    Scheme("affine", bits, group, dtype)
    for bits, group, dtype in (
        (1, 32, "BF16"), (2, 64, "F16"), (3, 32, "BF16"), (4, 64, "BF16"), (4, 32, "F32"),
        (5, 64, "F16"), (6, 32, "BF16"), (8, 64, "BF16"), (8, 32, "F16"), (3, 64, "F32"),
    )
]  # fmt: skip
FLOATS = [
    Scheme("mxfp4", 4, 32, "U8"),
    Scheme("mxfp8", 8, 32, "U8"),
    Scheme("nvfp4", 4, 16, "U8"),
]
SCHEMES = [*AFFINE, *FLOATS]


def in_dtype(values: Array, dtype: str) -> Array:
    """Float64 rounded once, as float64: torch's casts from float64 go over float32, which holds what is
    rounded here."""
    if dtype == "F32":
        return values.astype(np.float32).astype(np.float64)
    wide = torch.from_numpy(np.ascontiguousarray(values, np.float64))
    return wide.float().to(KINDS[dtype]).double().numpy()


def as_tensor(values: Array, dtype: str) -> Tensor:
    cast = torch.from_numpy(np.ascontiguousarray(values, np.float64)).to(KINDS[dtype])
    return Tensor(dtype, values.shape, cast.contiguous().view(torch.uint8).numpy().tobytes())


def words(codes: Array, bits: int) -> Tensor:
    """Codes [.., K], the first in the lowest bits of a stream."""
    each = codes[..., None] >> np.arange(bits, dtype=np.uint8) & np.uint8(1)
    stream = each.reshape(*codes.shape[:-1], -1)
    packed = np.packbits(stream.astype(np.uint8), axis=-1, bitorder="little")
    return Tensor("U32", (*codes.shape[:-1], packed.shape[-1] // 4), packed.tobytes())


def encode(scheme: Scheme, seed: str, *shape: int) -> tuple[Parts, Array]:
    """A weight of every code, and its meaning in mlx's dtype, float64."""
    random = np.random.default_rng(zlib.crc32(seed.encode()))
    mode, bits, group, dtype = scheme
    codes = random.integers(0, 1 << bits, shape, np.uint8)
    first = np.arange(min(1 << bits, codes.size), dtype=np.uint8)
    codes.reshape(-1)[: first.size] = first
    grid = (*shape[:-1], shape[-1] // group)
    if mode == "affine":
        scale, offset = (in_dtype(random.standard_t(3, grid) * size, dtype) for size in (0.02, 0.7))
        product = in_dtype(codes * np.repeat(scale, group, -1), dtype)
        meaning = in_dtype(product + np.repeat(offset, group, -1), dtype)
        parts = {"scales": as_tensor(scale, dtype), "biases": as_tensor(offset, dtype)}
        return {"weight": words(codes, bits), **parts}, meaning
    if mode == "mxfp8":
        codes[(codes & 0x7F) == 0x7F] = 0x38
        values = e4m3(codes)
    else:
        values = SIZES_SIGNED[codes]
    stored = random.integers(100, 125, grid, np.uint8)
    stored.reshape(-1)[:2] = 1, 120
    scale = e4m3(stored) if mode == "nvfp4" else 2.0 ** (stored.astype(np.float64) - 127)
    parts = {"weight": words(codes, bits), "scales": Tensor("U8", grid, stored.tobytes())}
    return parts, values * np.repeat(scale, group, -1)


def e4m3(codes: Array) -> Array:
    return torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).double().numpy()


def mlx_model(
    scheme: Scheme, others: Mapping[str, Scheme | bool] | None = None
) -> tuple[Model, dict[str, Array]]:
    """A Qwen3-MoE whose linears and embeddings are of one scheme, but for `others`, each by an entry of
    its own; and what each weight means."""
    model = models.qwen3_moe("bf16", hidden=64, intermediate=192)
    tensors, meaning, block = {}, {}, scheme.block
    for name, value in model.tensors.items():
        module, _, last = name.rpartition(".")
        own = (others or {}).get(module, scheme)
        if own is not scheme and last == "weight":
            block[module] = own.block if isinstance(own, Scheme) else own
        if last != "weight" or len(value.shape) != 2 or own is False or ".gate." in name:
            tensors[name] = value
            continue
        used = own if isinstance(own, Scheme) else scheme
        parts, meaning[name] = encode(used, name, *value.shape)
        tensors |= {f"{module}.{part}": one for part, one in parts.items()}
    config = {**model.config, "quantization": block, "quantization_config": dict(block)}
    return Model(config, tensors, model.side_files), meaning


def with_stacks(scheme: Scheme) -> tuple[Model, dict[str, Array]]:
    """The same with experts as mlx-lm's sanitize() has them, the down projections of layer 1 of another
    scheme; meanings by the names of transformers' class."""
    other = Scheme("affine", 8, 32, "BF16")
    model, meaning = mlx_model(scheme)
    tensors = {name: one for name, one in model.tensors.items() if ".experts." not in name}
    for layer in range(2):
        for projection, size in (
            ("gate_proj", (192, 64)),
            ("up_proj", (192, 64)),
            ("down_proj", (64, 192)),
        ):
            module = f"model.layers.{layer}.mlp.switch_mlp.{projection}"
            used = other if (layer, projection) == (1, "down_proj") else scheme
            parts, values = encode(used, module, 2, *size)
            tensors |= {f"{module}.{part}": one for part, one in parts.items()}
            for expert in range(2):
                at = f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"
                meaning[at] = values[expert]
    for key in ("quantization", "quantization_config"):
        model.config[key]["model.layers.1.mlp.switch_mlp.down_proj"] = other.block
    return Model(model.config, tensors, model.side_files), meaning
