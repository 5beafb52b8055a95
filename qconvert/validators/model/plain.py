"""The tensors of a model in the form of transformers' class: experts one matrix each, linear
attention in the class's own order, names without the surrounding multi-modal model.

Not a validator itself: it has no `VALIDATOR`, so discovery skips it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.checkpoint import without_quantization
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Source
from qconvert.core.names import natural_key, parse, split_parameter
from qconvert.validators.model.served import Format, Model, Weights, format_of
from qconvert.validators.reading.decode import FP8, bf16_bits
from qconvert.validators.reading.experts import KINDS, Kind
from qconvert.validators.reading.matrices import (
    FUSED,
    GROUPS_FACT,
    SEGMENTS,
    Runs,
    gdn_groups,
    segment_rows,
    segment_runs,
)

if TYPE_CHECKING:
    from qconvert.validators.reading.decode import Floats

# Names of the language model within multi-modal checkpoints, and its names alone.
_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
# Text models that transformers has under another name, with the same settings and tensors.
_CLASSES = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
}
# Lists with one entry per layer, and numbers of draft layers, which transformers has no class for.
_BY_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")
_DRAFTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
# In multi-modal configs' roots; and keys that would make transformers load foreign code.
_NOT_TEXT = ("text_config", "vision_config", "auto_map", "architectures", "dtype", "torch_dtype")
# Stored by some, computed by all.
_COMPUTED = "rotary_emb.inv_freq"

# Linear attention's input projections in split form.
_SPLIT = tuple(name for name in SEGMENTS if name not in FUSED)


@dataclass(frozen=True)
class Plain:
    """A tensor in the class's own form: its name and type there, and its parts: a `tensor`
    unchanged, an expert's matrix, or rows of modules' matrices (None: all), one after another."""

    name: str
    type: TensorType
    format: Format
    tensor: Source | None = None
    expert: tuple[int, Kind, int] | None = None
    rows: tuple[tuple[str, Runs | None], ...] = ()

    def read(self, weights: Weights) -> Iterator[memoryview]:
        """Its bytes, in order."""
        if self.tensor is not None:
            yield from weights.chunks(self.tensor)
        elif self.expert is not None:
            yield _as_bf16(weights.expert(*self.expert))
        else:
            held = {module: weights.matrix(module) for module, _ in self.rows}
            for module, spans in self.rows:
                for start, stop in spans or ((0, held[module].shape[0]),):
                    yield _as_bf16(held[module][start:stop])


def _as_bf16(values: Floats) -> memoryview:
    """Float32 as bytes of BF16."""
    import numpy as np

    return memoryview((bf16_bits(values) >> np.uint32(16)).astype(np.uint16).tobytes())


def nbytes(tensors: Sequence[Plain]) -> int:
    """Bytes of all of them as the class holds them, in BF16."""
    return sum(2 * prod(plain.type.shape) for plain in tensors)


def plain_config(model: Model, layers: int) -> dict[str, Any]:
    """The language model's settings for its class in transformers, cut to its first layers."""
    found = without_quantization(model.config)
    for key in _NOT_TEXT:
        found.pop(key, None)
    kind = found.get("model_type")
    found["model_type"] = _CLASSES.get(str(kind), kind)
    found["num_hidden_layers"] = layers
    for key in _BY_LAYER:
        if isinstance(found.get(key), list):
            found[key] = found[key][:layers]
    if isinstance(found.get("mlp_only_layers"), list):
        found["mlp_only_layers"] = [n for n in found["mlp_only_layers"] if n < layers]
    if isinstance(found.get("first_k_dense_replace"), int):
        found["first_k_dense_replace"] = min(found["first_k_dense_replace"], layers)
    for key in _DRAFTS:
        if key in found:
            found[key] = 0
    return found


def plain_tensors(model: Model, layers: int) -> Iterator[Plain]:
    """Every tensor of the first layers, the embeddings, the last norm and the head, in the class's form.
    Unknown names are passed along: the class reports them. Raises PlanError for unsupported forms."""
    checkpoint = model.checkpoint
    seen: set[str] = set()
    for name in sorted(checkpoint, key=natural_key):
        tensor, place = checkpoint[name], checkpoint.role_index.places.get(name)
        if place is not None and place.role.name.startswith("vision."):
            continue
        layer = parse(name).layer
        late = ".layers." in name and layer is not None and layer >= layers
        if (
            late
            or checkpoint.family.is_mtp(name, checkpoint.role_index.dims)
            or name.endswith(_COMPUTED)
        ):
            continue
        if ".experts." in name:
            continue
        module, parameter = split_parameter(name)
        at, _, last = module.rpartition(".")
        if last in SEGMENTS and at.endswith(".linear_attn"):
            if at not in seen:
                seen.add(at)
                yield from _linear_attention(model, at)
        elif parameter in ("weight_packed", "qweight") or tensor.type.dtype in FP8:
            stored = model.matrix(module)
            kind = TensorType("BF16", stored.shape)
            name = plain_name(f"{module}.weight")
            yield Plain(name, kind, format_of(stored), rows=((module, None),))
        elif parameter in ("", "weight", "bias"):  # other parameters are decoded with these
            yield Plain(plain_name(name), tensor.type, "bf16", tensor=tensor)
    for layer in (n for n in model.moe_layers if n < layers):
        yield from _experts(model, layer)


def plain_name(name: str) -> str:
    """A tensor's name in the language model alone."""
    for old, new in _PREFIXES:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _experts(model: Model, layer: int) -> Iterator[Plain]:
    dims = model.checkpoint.role_index.dims
    if layer not in model.prefixes:
        raise PlanError(f"layer {layer} is missing")
    at, form = plain_name(model.prefixes[layer]), model.expert_format(layer)
    size = (dims.moe_intermediate_size, dims.hidden_size)
    for expert in range(dims.num_experts):
        for kind in KINDS:
            matrix = TensorType("BF16", size[::-1] if kind == "down" else size)
            name = f"{at}.mlp.experts.{expert}.{kind}_proj.weight"
            yield Plain(name, matrix, form, expert=(layer, kind, expert))


def _linear_attention(model: Model, at: str) -> Iterator[Plain]:
    """A layer's input projections in the order of its class: split (Qwen3.5), or interleaved by key
    head (Qwen3-Next). Fused ones are read in the order that the class or the folder states: for
    Qwen3-Next in its own, because no loader takes another; for Qwen3.5 in the manifest's, and without
    a manifest in the contiguous one, which sglang takes."""
    checkpoint = model.checkpoint
    dims = checkpoint.role_index.dims
    if dims.gdn is None:
        raise PlanError(f"{at}: the config has no linear-attention layers")
    sizes, heads = segment_rows(dims), dims.gdn[0]
    inside = checkpoint.family.name == "qwen3_next"
    fused = f"{at}.{FUSED[0]}.weight" in checkpoint
    stated = heads if inside else gdn_groups(checkpoint)
    if stated is None and (checkpoint.manifest or {}).get(GROUPS_FACT):
        raise PlanError(f"{at}: {heads} key heads cannot be divided into the stated groups")
    places: dict[str, tuple[str, Runs]] = {}
    for module in FUSED if fused else _SPLIT:
        segments = SEGMENTS[module]
        wanted = [sizes[segment] for segment in segments]
        rows = model.matrix(f"{at}.{module}").rows
        if rows != sum(wanted):
            raise PlanError(f"{at}.{module}: expected {sum(wanted)} rows, found {rows}")
        runs = segment_runs(wanted, (stated or 1) if fused else 1)
        for segment, spans in zip(segments, runs, strict=True):
            places[segment] = f"{at}.{module}", spans
    for module in FUSED if inside else _SPLIT:
        groups = heads if inside else 1
        parts: list[tuple[str, Runs]] = []
        for group in range(groups):
            for segment in SEGMENTS[module]:
                home, spans = places[segment]
                share = sizes[segment] // groups
                parts.append((home, tuple(_cut(spans, group * share, (group + 1) * share))))
        stored = model.matrix(parts[0][0])
        kind = TensorType("BF16", (sum(sizes[s] for s in SEGMENTS[module]), stored.form.columns))
        name = plain_name(f"{at}.{module}.weight")
        yield Plain(name, kind, format_of(stored), rows=tuple(parts))


def _cut(spans: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Rows [start, stop) of what lies in these spans, one after another."""
    at = 0
    for first, last in spans:
        low, high = max(start, at), min(stop, at + last - first)
        if low < high:
            yield first + low - at, first + high - at
        at += last - first
