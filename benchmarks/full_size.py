"""A few layers of published mixture models at their full size, to calibrate: real names and shapes,
weights that look real, a small vocabulary."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from qconvert.checkpoint.safetensors import build_header
from qconvert.cli.demo import heavy_tailed, quantize_block_fp8
from qconvert.core.dtypes import TensorType
from qconvert.core.names import natural_key

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import headers
from data import Model, qwen3_moe

VOCABULARY = 4096
_DIFFERENT = 4  # matrices of a shape with numbers of their own; the others are these, rows rotated
_SHARD_BYTES = 4_000_000_000


def qwen3_30b(layers: int) -> Model:
    """Qwen3-30B-A3B, BF16: 128 experts of 768, hidden 2048, 1.25 GB a layer."""
    return _qwen3(layers, 128)


def small(layers: int) -> Model:
    """The same with 4 experts, for a try on a CPU."""
    return _qwen3(layers, 4)


def _qwen3(layers: int, experts: int) -> Model:
    fp8 = qwen3_moe(layers, experts)
    config = {k: v for k, v in fp8.config.items() if k != "quantization_config"}
    heads = {"q": (4096, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 4096)}
    tensors: dict[str, TensorType] = {}
    for name, kind in fp8.tensors.items():
        if name.endswith("_scale_inv"):
            continue
        shape = kind.shape
        for one, wanted in heads.items():
            if name.endswith(f"self_attn.{one}_proj.weight"):
                shape = wanted
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            shape = (128,)
        tensors[name] = TensorType("BF16", shape)
    return _small(config | {"head_dim": 128}, tensors)


def qwen35_35b(layers: int) -> Model:
    """Qwen3.5-35B-A3B, BF16: 256 experts of 512, hidden 2048, three layers in four of them gated delta
    nets; 1.7 GB a layer."""
    fp8 = headers.load("qwen3.5-35b-a3b-fp8")
    text = dict(fp8.config["text_config"])
    text |= {
        "num_hidden_layers": layers,
        "layer_types": text["layer_types"][:layers],
        "mtp_num_hidden_layers": 0,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
    }
    tensors: dict[str, TensorType] = {}
    for name, kind in fp8.tensors.items():
        plain = name.replace("model.language_model.", "model.")
        if name.endswith("_scale_inv") or not _kept(plain, layers):
            continue
        wide = "BF16" if kind.dtype == "F8_E4M3" else kind.dtype
        tensors[plain] = TensorType(wide, kind.shape)
    return _small(text, tensors)


def deepseek_v3(layers: int) -> Model:
    """DeepSeek-V3's mixture layers, FP8 in blocks: 256 experts of 2048, hidden 7168, 11.5 GB a layer."""
    published = headers.load("deepseek-v3")
    config = published.config | {
        "first_k_dense_replace": 0, "num_hidden_layers": layers, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    tensors: dict[str, TensorType] = {}
    for name, kind in published.tensors.items():
        parts = name.split(".")
        if parts[1] == "layers":
            number = int(parts[2]) - 3  # the first three are dense
            if not 0 <= number < layers:
                continue
            parts[2] = str(number)
        tensors[".".join(parts)] = kind
    return _small(config, tensors)


MODELS = {
    "qwen3-30b": qwen3_30b,
    "qwen3.5-35b": qwen35_35b,
    "deepseek-v3": deepseek_v3,
    "small": small,
}


def _kept(name: str, layers: int) -> bool:
    parts = name.split(".")
    if parts[0] == "mtp" or "visual" in parts:
        return False
    return "layers" not in parts or int(parts[parts.index("layers") + 1]) < layers


def _small(config: Mapping[str, Any], tensors: Mapping[str, TensorType]) -> Model:
    """The same with a small vocabulary."""
    kept = {
        name: kind.with_rows(VOCABULARY) if "embed_tokens" in name or "lm_head" in name else kind
        for name, kind in tensors.items()
    }
    return Model({**config, "vocab_size": VOCABULARY}, kept)


def write(folder: Path, model: Model) -> int:
    """Write a model's checkpoint. Returns its bytes of tensor data."""
    folder.mkdir(parents=True)
    made = _Made()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_shards(model)):
        file = f"model-{number:05d}.safetensors"
        header, _ = build_header([(name, model.tensors[name]) for name in names], {"format": "pt"})
        with (folder / file).open("wb") as stream:
            stream.write(header)
            for name in names:
                weight_map[name] = file
                stream.write(made.of(name, model.tensors[name]))
    total = sum(kind.nbytes for kind in model.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "config.json").write_text(json.dumps(dict(model.config)), encoding="utf-8")
    text = json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
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


class _Made:
    """Numbers for tensors: a few heavy-tailed matrices a shape, which all others are with their rows
    rotated; scales of FP8 belong to the weight before them."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._kept: dict[tuple[str, tuple[int, ...], int], list[torch.Tensor]] = {}
        self._count = 0
        self._scales = torch.empty(0)  # of the weight before

    def of(self, name: str, kind: TensorType) -> memoryview:
        if name.endswith("_scale_inv"):
            return _bytes(self._scales)
        if len(kind.shape) == 1 or name.endswith(("A_log", "dt_bias", "e_score_correction_bias")):
            norm = name.endswith("norm.weight") and "qwen3_5" not in name
            value = torch.ones(kind.shape) if norm else torch.zeros(kind.shape)
            return _bytes(value.to(_DTYPES[kind.dtype]))
        self._count += 1
        key = kind.dtype, kind.shape, self._count % _DIFFERENT
        if key not in self._kept:
            self._kept[key] = self._new(kind)
        kept = self._kept[key]
        if kind.dtype == "F8_E4M3":
            # By whole blocks, so that scales are rotated too.
            turn = self._count // _DIFFERENT % kept[1].shape[0]
            self._scales = kept[1].roll(turn, 0)
            return _bytes(kept[0].view(torch.uint8).roll(128 * turn, 0))
        return _bytes(kept[0].roll(self._count, -2))

    def _new(self, kind: TensorType) -> list[torch.Tensor]:
        shape = kind.shape
        if len(shape) == 3 and shape[0] > _DIFFERENT:  # stacked experts
            some = heavy_tailed((_DIFFERENT, *shape[1:]), self._random)
            whole = torch.cat([some[e % _DIFFERENT][None].roll(e, 1) for e in range(shape[0])])
            return [whole.to(_DTYPES[kind.dtype])]
        if kind.dtype != "F8_E4M3":
            return [heavy_tailed(shape, self._random).to(_DTYPES[kind.dtype])]
        codes, scales = quantize_block_fp8(heavy_tailed(shape, self._random))
        return [codes, scales]


_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def _bytes(values: torch.Tensor) -> memoryview:
    flat: Any = values.contiguous().view(torch.uint8).numpy()
    return memoryview(flat).cast("B")
