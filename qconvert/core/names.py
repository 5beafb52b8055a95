"""Tensor names: where the layer and expert numbers are, and which order people expect.

A *template* is a name with its numbers taken out: `model.layers.3.mlp.experts.7.up_proj.weight`
has the template `model.layers.{L}.mlp.experts.{E}.up_proj.weight`, layer 3 and expert 7. Looking a
template up in a dict is what keeps role matching linear in the number of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cache, lru_cache
from typing import NamedTuple

from qconvert.core.discovery import FORMATS, discover, formats_of, modules_within

_NUMBER = re.compile(r"[0-9]{1,9}")

# What is stored of the activations of a quantized layer, mostly of its inputs: by compressed-tensors,
# modelopt, AutoFP8, Quark; transformers' FP8 (Mistral's releases) and Gemma; Mistral's own form. Ends
# of a module's parameters or, behind `_`, of a stack's name. (An `output_scale` of k_proj is a cache's.)
ACTIVATIONS = (
    "input_scale", "input_scale_inv", "input_global_scale", "input_zero_point", "activation_scale",
    "act_scale", "qscale_act", "input_activation_scale", "output_activation_scale", "input_scale_2",
)  # fmt: skip

# Read by no op, so that they leave with the weight: bitsandbytes' JSON of a matrix and the order of its
# codes; what msmodelslim computes of a weight and its inputs.
NOTED = (
    "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4", "weight_format",
    "quant_bias", "scale_bias", "input_offset", "deq_scale",
)  # fmt: skip

# Last components that belong to a module's parameters in whatever format its weight is.
_OF_ANY_FORMAT = ("weight", "bias", *ACTIVATIONS, "k_scale", "v_scale", "q_scale")

# Those of a weight's scales: which weights they may belong to, the formats that have them say.
# `weight_scale_inv` of DeepSeek and Qwen FP8 is a multiplier despite its name.
_SCALES = (
    "weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "scale",
)  # fmt: skip
# Ends of the names of scales of stacked experts, and those of their weights.
_SCALES_OF_STACKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("_proj_scale_inv", ("_proj",)),
    ("_proj_scale", ("_proj",)),
    (".w13_weight_scale", (".w13_weight", ".w13_weight_packed")),
    (".w2_weight_scale", (".w2_weight", ".w2_weight_packed")),
)


# Suffixes that models have for parameters of their own: a router's `scale`, the gain of a projection.
_OWN_TOO = (".scale", "_proj_scale")


_BY_LENGTH = sorted(ACTIVATIONS, key=len, reverse=True)


class ParsedName(NamedTuple):
    """A name's template and numbers. `layer` and `expert` are None where the name has none."""

    template: str
    layer: int | None
    expert: int | None


# A model has many names made of few different components: each component is parsed once.
@lru_cache(maxsize=4096)
def is_number(part: str) -> bool:
    """Return whether a name's component is a layer or expert number. isdecimal() accepts other scripts'
    digits too; a number of more than nine digits is not a count."""
    return part.isascii() and part.isdecimal() and len(part) <= 9


def parse(name: str) -> ParsedName:
    """Take the numbers out of a dotted name.

    A number after a component `experts` becomes `{E}`; the first other number `{L}`; any further
    ones `{I}`.
    """
    # Most names of a large model are those of experts, alike but for the number: 1.0 us instead of 2.3.
    before, found, after = name.partition(".experts.")
    if found:
        number = after.partition(".")[0]
        if is_number(number):
            template, layer = around_expert(before, after[len(number) :])
            if template:
                return ParsedName(template, layer, int(number))
    return _parse(name)


def layer_in(name: str) -> int | None:
    """The layer that `parse` finds. Names of a layer's experts are parsed up to there once."""
    before, found, _ = name.partition(".experts.")
    layer = _layer_before(before) if found else None
    return parse(name).layer if layer is None else layer


@lru_cache(maxsize=4096)
def _layer_before(before: str) -> int | None:
    return _parse(before).layer


@lru_cache(maxsize=4096)
def around_expert(before: str, after: str) -> tuple[str, int | None]:
    """Template and layer of a name with `.experts.`, an expert's number and `after` behind `before`; ""
    where the expert's number is another."""
    number = "999999999"
    parsed = _parse(f"{before}.experts.{number}{after}")
    return (parsed.template, parsed.layer) if parsed.expert == int(number) else ("", None)


def _parse(name: str) -> ParsedName:
    layer: int | None = None
    expert: int | None = None
    parts = name.split(".")
    for i, part in enumerate(parts):
        if not is_number(part):
            continue
        if i and parts[i - 1] == "experts" and expert is None:
            expert = int(part)
            parts[i] = "{E}"
        elif layer is None:
            layer = int(part)
            parts[i] = "{L}"
        else:
            parts[i] = "{I}"
    return ParsedName(".".join(parts), layer, expert)


def layer_template(name: str) -> str:
    """The template with the numbers of modules within a layer as they are: two attentions of one layer
    differ in them."""
    template = parse(name).template
    if "{I}" not in template:
        return template
    pairs = zip(template.split("."), name.split("."), strict=True)
    return ".".join(own if part == "{I}" else part for part, own in pairs)


def split_parameter(name: str) -> tuple[str, str]:
    """`a.b.weight` -> (`a.b`, `weight`); a bare parameter such as `a.A_log` -> (`a.A_log`, ``)."""
    module, _, last = name.rpartition(".")
    known = last == "weight" or last in parameters()
    if not known and ".weight." in name:  # bitsandbytes has parts of a weight below its name
        module, _, below = name.partition(".weight.")
        last = f"weight.{below}"
        known = last in parameters()
    return (module, last) if module and known else (name, "")


@cache
def _stored_as() -> tuple[tuple[str, ...], ...]:
    """Parameters of each format that is read, the codes' first: of ours and of other packages. Formats
    are asked when the first name is split, since each may import what is above this package."""
    ours = formats_of(modules_within("qconvert.formats", "format"))
    others = formats_of(discover(group=FORMATS))  # which may have validators alone
    return tuple(one.parameters for one in ours if one.read is not None) + tuple(
        one.parameters for one in others if one.parameters
    )


@cache
def parameters() -> frozenset[str]:
    """Last components that belong to a module's parameters."""
    return frozenset(_OF_ANY_FORMAT).union(*_stored_as())


def _codes_beside(scale: str) -> tuple[str, ...]:
    """Ends of the names of the codes that formats have beside a scale of this name, each once."""
    codes = (f".{first}" for first, *beside in _stored_as() if scale in beside)
    return tuple(dict.fromkeys(codes))


def experts_module(name: str) -> str | None:
    """The module that holds a layer's routed experts (`model.layers.3.mlp.experts`), by the component
    after which `parse` reads an expert's number. None for a name without it."""
    parts = name.split(".")
    return ".".join(parts[: parts.index("experts") + 1]) if "experts" in parts[1:] else None


# Ends of the names of a KV cache's scales, of keys and of values.
KV_SCALES = (".k_scale", ".v_scale")


def apart_experts(name: str) -> str:
    """The module below which a layer's experts are stored one by one: that of `experts_module`, or
    `experts` beside stacks of another name. GraniteMoE's `block_sparse_moe.input_linear` [E, 2I, H] and
    Step-3.7's `moe.gate_proj` [E, I, H] become `block_sparse_moe.experts.3.gate_proj` and
    `moe.experts.3.gate_proj`, as llm-compressor writes them (sglang, `models/granitemoe.py`; vLLM,
    `models/step3p5.py`)."""
    found = experts_module(name)
    if found is not None:
        return found
    module, _ = split_parameter(name)
    return f"{module.rpartition('.')[0]}.experts"


def scale_candidates(weight: str) -> tuple[str, ...]:
    """Names an FP8 weight's scale may have. 3-D expert stacks (`experts.gate_up_proj`) have no
    `.weight`, so their scale's name is a suffix."""
    if weight.endswith(".weight"):
        return (f"{weight}_scale_inv", f"{weight}_scale", f"{weight[: -len('weight')]}scale")
    return (f"{weight}_scale_inv", f"{weight}_scale")


def is_scale(name: str) -> bool:
    """Return whether a name is that of a weight's scale: whether it has `weight_candidates`."""
    _, dot, last = name.rpartition(".")
    return _WEIGHTS[dot + last] is not None


def weight_candidates(scale: str) -> tuple[str, ...]:
    """Names of the weights that a scale may belong to, () if the name is not a weight's scale."""
    stem, dot, last = scale.rpartition(".")
    found = _WEIGHTS[dot + last]
    return () if found is None else tuple([stem + weight for weight in found])


def scales_alone(names: Collection[str]) -> list[str]:
    """The scales among these names that have none of their `weight_candidates` there: one look for each
    of Kimi-K2's 276,480 tiles, in a loop of its own, because nearly all have one."""
    found = []
    for name in names:
        stem, dot, last = name.rpartition(".")
        weights = _WEIGHTS[dot + last]
        if weights is None:
            continue
        for weight in weights:
            if stem + weight in names:
                break
        else:
            found.append(name)
    return found


def activations_of(name: str) -> tuple[str, str] | None:
    """The module, or stack of experts, whose activations a tensor describes by its name, and how that
    ends; None for any other name. Models have parameters of such names too."""
    end = _end_of_activations(name.rpartition(".")[2])
    return None if end is None else (name[: -len(end) - 1], end)


@lru_cache(maxsize=4096)
def _end_of_activations(last: str) -> str | None:
    """Return how a last component ends that describes activations."""
    return next((end for end in _BY_LENGTH if last == end or last.endswith(f"_{end}")), None)


def is_ambiguous(scale: str) -> bool:
    """Return whether models also have parameters of their own under a scale's name."""
    return scale.endswith(_OWN_TOO)


def scale_end(scale: str) -> str:
    """Return what a scale's name has behind its weight's module or stack: `weight_scale_inv`,
    `_scale`."""
    last = scale.rpartition(".")[2]
    _, stack, end = last.rpartition("_proj")
    return end if stack else last


# No suffix of a scale has a second dot, so that a name's last component decides.
def _weights_at(last: str) -> tuple[str, ...] | None:
    """Return what a scale's last component, with the dot before it, becomes in the names of its weights;
    None where it is not a scale's."""
    if last[:1] == "." and last[1:] in _SCALES:
        return _codes_beside(last[1:])
    for suffix, weights in _SCALES_OF_STACKS:
        if last.endswith(suffix):
            return tuple(last.removesuffix(suffix) + weight for weight in weights)
    return None


class _Weights(dict[str, tuple[str, ...] | None]):
    """`_weights_at` of each last component, of which a model has few."""

    def __missing__(self, last: str) -> tuple[str, ...] | None:
        if len(self) > 4096:
            self.clear()
        found = self[last] = _weights_at(last)
        return found


_WEIGHTS = _Weights()

_BESIDE = "3"  # rank of what is in no layer by its name


def natural_key(name: str) -> str:
    """Sort key of the order a model runs in.

    Vision tower, embeddings, layers by number, final norm and head, MTP. Numbers compare as
    numbers, so layer 10 follows layer 9. A text, not a tuple of components: texts of 280,000 names are
    made and compared in a third of the time.
    """
    return _rank_and_layer(name) + _components(name)


def _components(name: str) -> str:
    return "\0".join(map(_KEYS.__getitem__, name.split(".")))


def _rank_and_layer(name: str) -> str:
    """The beginning of each key, of 10 characters."""
    rank, layer = 3, 0
    if name.startswith(("mtp.", "model.mtp.")):
        rank = 4
    elif "visual." in name or "vision" in name:
        rank = 0
    elif (at := name.find(".layers.")) >= 0:
        rank = 2
        found = _NUMBER.match(name, at + len(".layers."))
        layer = int(found[0]) if found else 0
    elif "embed" in name:
        rank = 1
    return f"{rank}{layer:09}"


def in_model_order(names: Iterable[str]) -> list[str]:
    """Names sorted by `natural_key`, a layer after another: the keys of Kimi-K2's 276,480 tiles take 35
    MB at once. (A tile is `blk.` and its layer's number.)"""
    layers: dict[str, list[str]] = {}
    # Names of a layer come one after another: one that begins as the last one did goes to its layer, if
    # nothing else in it tells its rank. `numbered`: what would be the layer's number has been found.
    head, numbered, layer = "", False, list[str]()
    for name in names:
        if head and name.startswith(head) and not _tells_rank(name, numbered=numbered):
            layer.append(name)
            continue
        begin = _rank_and_layer(name)
        if begin[0] == _BESIDE:  # the key's first two components
            first, dot, rest = name.partition(".")
            begin += _KEYS[first] + (f"\0{_KEYS[rest.partition('.')[0]]}" if dot else "")
        layer = layers.setdefault(begin, [])
        layer.append(name)
        head = _head(name)
        numbered = ".layers." in head
        if _tells_rank(name, numbered=numbered):
            head = ""
    found: list[str] = []
    known: dict[int, _Sorted] = {}
    for begin in sorted(layers):
        found += _layer_in_order(layers.pop(begin), known)
    return found


def _tells_rank(name: str, *, numbered: bool) -> bool:
    """Return whether a word decides about a name's rank wherever it stands in it: `vision` or `visual`;
    and where it has no layer's number."""
    return "vis" in name or not (numbered or (".layers." not in name and "embed" not in name))


class _Sorted(NamedTuple):
    """The ends of a layer's names as they came, and their numbers in order."""

    ends: list[str]
    order: list[int]


def _layer_in_order(names: list[str], known: dict[int, _Sorted]) -> list[str]:
    """A layer's names sorted. Layers are alike but for their number: what comes behind it decides, and
    is sorted once: 0.3 us a name of Kimi-K2, instead of 1.1. `known`: the last of so many names."""
    head = _head(names[0])
    # What lies between the least and the greatest begins as both do.
    if not head or not (min(names).startswith(head) and max(names).startswith(head)):
        return sorted(names, key=_components)
    ends = [name[len(head) :] for name in names]
    before = known.get(len(names))
    if before is None or before.ends != ends:
        order = sorted(range(len(ends)), key=[_components(end) for end in ends].__getitem__)
        before = known[len(names)] = _Sorted(ends, order)
    return [names[i] for i in before.order]


def _head(name: str) -> str:
    """A name up to its layer's number, with the dot behind it; its first two components where it has no
    layer; "" where nothing follows."""
    at = name.find(".layers.")
    stop = name.find(".", at + len(".layers.")) if at >= 0 else name.find(".", name.find(".") + 1)
    return name[: stop + 1]


# What would compare as the end of a component, or before it.
_LOWEST = {code: f"\3{chr(code)}" for code in range(4)}


class _Keys(dict[str, str]):
    """Keys of components: numbers before words, a component before all that it begins. A model has few
    of them; lru_cache takes twice as long to find one."""

    def __missing__(self, part: str) -> str:
        if len(self) > 4096:
            self.clear()
        number = is_number(part)
        found = f"\1{int(part):09}" if number else "\2" + part.translate(_LOWEST)
        self[part] = found
        return found


_KEYS = _Keys()


# Names that runtimes give to modules they fuse of several, at load. A runtime looks a module up in a
# quantization config under its own name. Classes with a `packed_modules_mapping` find the parts' names
# too, others do not (read in sglang and vLLM).

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}


def with_fused_names(modules: Iterable[str]) -> list[str]:
    """The modules in their order, each followed by the name of what it is fused to, once."""
    found: dict[str, None] = {}
    for module in modules:
        parent, dot, last = module.rpartition(".")
        found[module] = None
        if last in _FUSED:
            found[f"{parent}{dot}{_FUSED[last]}"] = None
    return list(found)


def with_vllms_name(modules: Iterable[str]) -> list[str]:
    """The modules, and behind each q_a_proj what vLLM calls it with kv_a_proj_with_mqa: its
    DeepSeek class finds the parts' names, its draft class, which has no mapping, the whole's alone."""
    found: dict[str, None] = {}
    for module in modules:
        found[module] = None
        if module.endswith(".q_a_proj"):
            found[f"{module.removesuffix('q_a_proj')}fused_qkv_a_proj"] = None
    return list(found)
