"""Tensors beside a weight that say how it is stored, by their names: scales, zero points, groups of
columns, shapes, and scales of what goes into it or comes out.

Names alone make none of them: models have parameters called so (the router's `scale` of Gemma 4, the
clips of Inkling). A part belongs to a weight in codes, or to one that is missing where others show that
it was there. Names are those of compressed-tensors (`compressors/`), modelopt, DeepSeek-V3 and
V4 (`inference/`), and, of activations, of transformers (`integrations/finegrained_fp8.py`,
`gemma_quant.py`), AutoFP8, Quark and Mistral's own form (vLLM, `models/mistral.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.graph import Source
from qconvert.core.names import parse
from qconvert.validators.reading.decode import FLOATS
from qconvert.validators.reading.forms import coded_weights

_PACKED = ("weight_packed", "weight")
# Of a name's last component: which weights it may be a part of.
_PARTS: Mapping[str, tuple[str, ...]] = {
    "weight_scale_inv": ("weight",),
    "weight_scale": ("weight", "weight_packed"),
    "weight_scale_2": ("weight",),
    "weight_global_scale": ("weight_packed",),
    "weight_shape": ("weight_packed",),
    "weight_zero_point": _PACKED,
    "weight_g_idx": _PACKED,
    "scale": ("weight",),
}
_OF_STACKS = re.compile(r"(\w+_proj)_scale(?:_inv)?")
_PREPARED = re.compile(r"(\w*w13|\w*w2)_weight_scale")
# Names under which models have gains of their own.
_OWN_TOO = re.compile(r"scale|\w+_proj_scale")
_STACK = re.compile(r"\w+_proj(?=_)")

# Ends of names of what is known of a layer's quantized activations; after "_" those of stacks.
ACTIVATIONS = (
    "input_activation_scale", "output_activation_scale", "activation_scale", "act_scale", "qscale_act",
    "input_scale", "input_scale_inv", "input_global_scale", "input_zero_point", "input_scale_2",
)  # fmt: skip
_ACTIVATIONS = tuple(f"{mark}{end}" for end in ACTIVATIONS for mark in "._")
_CODES = ("weight", "weight_packed", "qweight")


@lru_cache(maxsize=4096)
def _weights(last: str) -> tuple[str, ...]:
    """Last components of the weights that a last component may be a part of; () for no part."""
    if (found := _PARTS.get(last)) is not None:
        return found
    if (match := _OF_STACKS.fullmatch(last)) is not None:
        return (match[1],)
    if (match := _PREPARED.fullmatch(last)) is not None:
        return f"{match[1]}_weight", f"{match[1]}_weight_packed"
    return ()


def weights_of(name: str) -> tuple[str, ...]:
    """Names of the weights that a tensor may be a part of, by its name; () for no part of any."""
    stem, dot, last = name.rpartition(".")
    return tuple([f"{stem}{dot}{weight}" for weight in _weights(last)])


def coded(tensors: Mapping[str, Source], name: str) -> bool:
    """Tell whether a tensor is there and no float."""
    found = tensors.get(name)
    return found is not None and found.type.dtype not in FLOATS


@lru_cache(maxsize=2)  # several rules ask for those of a folder and of its source
def lost(checkpoint: Checkpoint) -> frozenset[str]:
    """Parts of weights that are missing. That a tensor is one is said by modules alike, of other layers
    or experts, which have it beside codes; by the family, which has a linear layer in its place, in a
    folder with codes or a config that states them; by its name there, if codes of the folder have such a
    part and models do not, unless the family says that nothing in its place is quantized; and of a shape
    by the weight, if it is left in floats."""
    sources = checkpoint.sources
    alone = []
    for name in sources:
        stem, dot, last = name.rpartition(".")
        for weight in (ends := _weights(last)):
            if f"{stem}{dot}{weight}" in sources:
                break
        else:
            alone += [name] if ends else []
    named = {name.rpartition(".") for name in coded_weights(checkpoint)} if alone else set()
    own_names = {
        module
        for module, _, last in named
        if last.startswith("weight_") and last != "weight_packed"
    }
    alone = [name for name in alone if name.rpartition(".")[0] not in own_names]
    if not alone:
        return frozenset()
    paired = {
        parse(name).template
        for name in sources
        if any(coded(sources, weight) for weight in weights_of(name))
    }
    usual = {_STACK.sub("", template.rpartition(".")[2]) for template in paired}
    quantized = bool(paired or checkpoint.quantization_configs)
    found = set()
    for name in alone:
        module, _, last = name.rpartition(".")
        kind = checkpoint.role_index.kind(name)
        unlike = bool(usual) and _STACK.sub("", last) not in usual
        own = unlike or kind.never_quantized or _OWN_TOO.fullmatch(last) is not None
        plain = last == "weight_shape" and f"{module}.weight" in sources
        if plain or parse(name).template in paired or (quantized and (kind.linear or not own)):
            found.add(name)
    return frozenset(found)


def is_of_activations(tensors: Mapping[str, Source], name: str) -> bool:
    """Tell whether a tensor belongs to the quantized activations of a weight that is stored in codes."""
    if not name.endswith(_ACTIVATIONS):
        return False
    end = next(end for end in _ACTIVATIONS if name.endswith(end))
    module = name.removesuffix(end)
    if end.startswith("_"):
        return coded(tensors, module) or coded(tensors, f"{module}_weight")
    return any(coded(tensors, f"{module}.{weight}") for weight in _CODES)


def of_cache(checkpoint: Checkpoint, name: str) -> bool:
    """Tell whether a `k_scale` or `v_scale` is that of a KV cache: one number, or anything in a
    quantized folder; a vector elsewhere is a gain of the model's own."""
    numbers = checkpoint[name].type.numel
    return numbers == 1 or bool(checkpoint.quantization_configs)
