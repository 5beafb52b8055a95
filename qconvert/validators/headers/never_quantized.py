"""Modules that no runtime loads quantized, but that are stored so.

QC095 an embedding, a norm, a router, the head, a convolution or a table of positions is quantized.

For a family that is known here its roles say which modules those are; for others the names that
transformers' classes and older releases give them. A name decides only if no linear layer that
runtimes load quantized has it: `gate` next to `experts` is a router, `gate_proj`
and `gate_up_proj` never are; `embed_tokens` is an embedding, `embedding_projection` may be a linear.

Some runtimes load a quantized head if the config says so (`lm_head` in GPTQ's block, or a target that
names it). A finding is always an error. This file knows nothing of the passes, nor of their rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.names import is_scale, parse, split_parameter
from qconvert.core.roles import Kind
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, validator
from qconvert.validators.reading.decode import FP8
from qconvert.validators.reading.model import readable_quantization
from qconvert.validators.reading.quantization import named_targets, targets
from qconvert.validators.reading.stated_schemes import layer_table

_CODES = (*FP8, "I8", "U8", "I32", "F4")
_PACKED = ("weight_packed", "qweight")
_WHAT = {
    Kind.EMBEDDING: "an embedding", Kind.POSITION: "a table of positions", Kind.HEAD: "the head",
    Kind.NORM: "a norm", Kind.BUFFER: "not a matrix", Kind.CONV: "a convolution",
    Kind.ROUTER: "a router", Kind.SHARED_WEIGHT: "the gate of a shared expert",
}  # fmt: skip
# By the last component of a module's name. (`layer_norm1`, `q_norm`, `final_layernorm`, `ln_f`.)
_NORM = re.compile(r"(.*(norm|layernorm|rmsnorm)\d*|ln_(\d+|f))$")
_CONV = re.compile(r"((.*_)?conv([123]d)?)$")
_POSITION = re.compile(
    r"(wpe|(embed_positions?|position_embed(ding)?s?|pos(itional)?_(emb|embed|embedding)s?)(_table)?)$"
)
_EMBEDDING = re.compile(
    r"(wte|embed_tokens(_per_layer)?|tok_embeddings?|(word|token|patch)_embeddings?|embed_in)$"
)
_HEADS = ("lm_head", "embed_out")


@validator("embeddings, norms, routers, heads and convolutions are not quantized", "model")
def never_quantized(folder: Folder) -> Iterator[Finding]:
    checkpoint = folder.checkpoint
    readable_quantization(checkpoint)
    holders = _holders_of_experts(checkpoint)
    for name in checkpoint:
        module = _quantized_module(checkpoint, name)
        if module is None:
            continue
        kind = _kind(checkpoint, name, module, holders)
        if kind is None or (kind is Kind.HEAD and _said(checkpoint, module)):
            continue
        found = checkpoint[name].type
        message = (
            f"{found} is quantized, and {module!r} is {_WHAT[kind]}: expected BF16, F16 or F32"
        )
        yield Finding("QC095", "error", name, message)


def _quantized_module(checkpoint: Checkpoint, name: str) -> str | None:
    """The module of a tensor of codes, None for a tensor of numbers and for parts of a quantized
    weight."""
    module, parameter = split_parameter(name)
    if parameter in _PACKED:
        return module
    if is_scale(name) or checkpoint[name].type.dtype not in _CODES:
        return None
    return module if parameter == "weight" else None


def _kind(checkpoint: Checkpoint, name: str, module: str, holders: frozenset[str]) -> Kind | None:
    place = checkpoint.role_index.places.get(name)
    kind = Kind.UNKNOWN if place is None else place.role.kind
    if kind is Kind.UNKNOWN:
        kind = _named(module, holders)
    return kind if kind in _WHAT else None


def _named(module: str, holders: frozenset[str]) -> Kind:
    """The kind that a module's name says, UNKNOWN if it says nothing. Its last component counts, without
    numbers."""
    parts = [p for p in parse(module).template.split(".") if not p.startswith("{")]
    last = parts[-1] if parts else ""
    before = parts[-2] if len(parts) > 1 else ""
    if _NORM.match(last):
        return Kind.NORM
    if last == "router" or before == "router":
        return Kind.ROUTER
    if last == "gate" and module.rpartition(".")[0] in holders:
        return Kind.ROUTER
    if last == "shared_expert_gate":
        return Kind.SHARED_WEIGHT
    if last in _HEADS or (last == "head" and before in ("", "shared_head")):
        return Kind.HEAD
    for pattern, kind in (
        (_POSITION, Kind.POSITION), (_EMBEDDING, Kind.EMBEDDING), (_CONV, Kind.CONV),
    ):  # fmt: skip
        if pattern.match(last):
            return kind
    return Kind.UNKNOWN


def _holders_of_experts(checkpoint: Checkpoint) -> frozenset[str]:
    """Modules that hold routed experts (`model.layers.3.mlp`)."""
    return frozenset(
        before for name in checkpoint if (before := name.partition(".experts.")[0]) != name
    )


def _said(checkpoint: Checkpoint, module: str) -> bool:
    """Tell whether the config states that this head is quantized."""
    for config in checkpoint.quantization_configs:
        if config.block.get("lm_head") is True:
            return True
        if config.method == "compressed-tensors" and named_targets(config).names(module):
            return True
        if layer_table(config) is not None and (of_table := targets(config)) is not None:
            return of_table.names(module)
    return False
