"""Names, dtypes and config must agree: what headers alone can show.

QC010 the index states another total_size than the tensors add up to.
QC011 a scale without its weight, an FP8 or packed weight without its other parts.
QC012 a quantization block is stated but no tensor is quantized (or the other way round).
QC013 a tensor that the family requires is missing.
QC014 embeddings are tied by the config but differ in type.
QC044 config.json states both that embeddings are tied and that they are not.
QC046 the model's tensors have two prefixes.
QC048 a text-only class's tensors have the names of the multi-modal one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from qconvert.checkpoint.checkpoint import INDEX, Checkpoint
from qconvert.core.errors import PlanError
from qconvert.core.graph import Source
from qconvert.core.names import is_scale, scale_candidates, split_parameter, weight_candidates
from qconvert.core.shown import count
from qconvert.validation.findings import Finding, Proved, Skipped
from qconvert.validation.runner import Folder, NotChecked, validator
from qconvert.validators.formats.fp8 import fp8_blocks
from qconvert.validators.reading.decode import FP8
from qconvert.validators.reading.forms import coded_weights, each_coded
from qconvert.validators.reading.model import (
    draft_alone,
    forms_in,
    layer_of,
    other,
    stage_of,
    unread_quantization,
    where_of,
)
from qconvert.validators.reading.quantization import HF_QUANT_CONFIG, judged
from qconvert.validators.reading.quantization_tensors import coded, lost, weights_of

# Dtypes or parameters only quantized checkpoints have.
_PACKED = (".weight_packed", ".qweight", "_blocks", ".weight_scale_2", ".w13_weight_scale")
# Packed weights need other tensors beside them.
_PARTS = (".weight_packed",)
_OF_INTS = (".weight_zero_point", ".weight_g_idx")  # QC088
_TIE = "tie_word_embeddings"
# Parameters that depend on another: QC011 and QC088 report missing parts.
_OTHER_FORMS: Mapping[str, tuple[str, ...]] = {
    "weight": ("weight_packed", "qweight"),
    "weight_packed": ("weight", "qweight"),
    "weight_shape": ("weight", "qweight"),
    "weight_scale": ("weight", "qweight"),
    "weight_scale_inv": ("weight_packed", "qweight"),
    "weight_zero_point": ("weight", "qweight", "weight_packed"),
    "weight_g_idx": ("weight", "qweight", "weight_packed"),
    "qweight": ("weight", "weight_packed"),
    **dict.fromkeys(("qzeros", "scales", "g_idx"), ("weight", "weight_packed", "qweight")),
    **dict.fromkeys(("weight_global_scale", "input_global_scale"), ("weight", "qweight")),
}
# Of `weight_packed` the dtypes of codes, and of scales, beside which a layer has no such parameter.
_OTHER_CODES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "weight_shape": (("U8",), ()),
    "weight_global_scale": (("I32",), ("U8", "F8_E8M0")),
    "input_global_scale": (("I32",), ("U8", "F8_E8M0")),
}
# Qwen3.5's: text-only names lack a component of the multi-modal ones.
_LANGUAGE, _TEXT_ONLY = "model.language_model.", ("qwen3_5_text", "qwen3_5_moe_text")


@validator("scales are paired, config and tensors agree, no required tensor is missing")
def structure(folder: Folder) -> Iterator[Finding | Proved | Skipped]:
    checkpoint = folder.checkpoint
    yield from _total_size(checkpoint)
    yield from _unpaired(checkpoint)
    yield from _scale_names(checkpoint)
    yield from _quantization(checkpoint)
    yield from _missing(checkpoint)
    yield from _tied(checkpoint)
    yield from _tied_and_not(checkpoint)
    yield from _prefixes(checkpoint)
    yield from _proved(checkpoint)


def _proved(checkpoint: Checkpoint) -> Iterator[Proved | Skipped]:
    """Proofs about a model whose family or quantization is unknown."""
    unread, unknown = unread_quantization(checkpoint), checkpoint.family.name == "generic"
    if not unread and checkpoint.family.layers_counted:
        yield Proved(
            "scales are paired, config and tensors agree, no tensor of a layer's block is missing"
        )
        yield Skipped(
            "whether a block of a layer is missing (which layers have one is counted in the checkpoint: "
            f"{checkpoint.family.class_name} is known by its usual sizes alone)"
        )
        return
    if not unread and not unknown:
        return
    if unread and unknown:
        raise NotChecked(f"{unread}, {checkpoint.family.undescribed}")
    if unread:
        yield Proved("no required tensor is missing")
        yield Skipped(f"whether scales are paired, and config and tensors agree ({unread})")
    else:
        yield Proved("scales are paired, quantization blocks and tensors agree")
        yield Skipped(f"whether a required tensor is missing ({checkpoint.family.undescribed})")


def _total_size(checkpoint: Checkpoint) -> Iterator[Finding]:
    for text in checkpoint.warnings:
        if "total_size" in text:
            ours = checkpoint.manifest is not None
            yield Finding("QC010", "error" if ours else "warning", INDEX, text)


def _unpaired(checkpoint: Checkpoint) -> Iterator[Finding]:
    there = checkpoint.sources
    alone = {name for name in lost(checkpoint) if not name.endswith(_OF_INTS)}
    if not alone and checkpoint.dtypes.isdisjoint(FP8) and checkpoint.ends.isdisjoint(_PARTS):
        return
    for name, source in there.items():
        if name in alone:
            what = "the shape of no weight" if name.endswith("_shape") else "has no weight"
            yield Finding("QC011", "error", name, f"{what} ({' or '.join(weights_of(name))})")
        elif source.type.dtype in FP8 and not is_scale(name):
            # torchao stores a tensor's parts beside one another: `_weight_qdata`, `_weight_scale`.
            twin = [f"{name.removesuffix('qdata')}scale"] if name.endswith("_weight_qdata") else []
            tried = (*twin, *scale_candidates(name))
            if there.keys().isdisjoint(tried):
                yield Finding("QC011", "error", name, f"FP8 without a scale ({' or '.join(tried)})")
        elif name.endswith(".weight_packed"):
            parts = ["weight_scale", *(["weight_shape"] if source.type.dtype == "I32" else [])]
            stem = name.removesuffix("weight_packed")
            for part in parts:
                if stem + part not in checkpoint:
                    yield Finding("QC011", "error", name, f"packed without {stem}{part}")


def _scale_names(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Scales under the other dialect's name. sglang and vLLM create a parameter of one name:
    fp8.py's weight_scale_inv if blocks are stated, compressed-tensors' weight_scale."""
    configs = checkpoint.quantization_configs
    taken = judged(configs)
    methods = {config.method for config in configs if config.where != HF_QUANT_CONFIG}
    if taken is None or len(methods) > 1 or "linear_fp8_config" in taken.block:
        return  # unknown which linear layers are of which dialect; QC037 for contradictions
    if taken.method == "fp8" and fp8_blocks([taken]):
        asked, found = ".weight_scale_inv", ".weight_scale"
    elif taken.method == "compressed-tensors":
        asked, found = ".weight_scale", ".weight_scale_inv"
    else:
        return
    for name in checkpoint:
        weight = checkpoint.sources.get(f"{name.removesuffix(found)}.weight")
        if name.endswith(found) and weight is not None and weight.type.dtype in FP8:
            message = f"runtimes of {taken.where} ({taken.method}) look for *{asked}"
            yield Finding("QC011", "error", name, message)


def _quantization(checkpoint: Checkpoint) -> Iterator[Finding]:
    quantized = _first_quantized(checkpoint)
    blocks = checkpoint.quantization_configs
    if quantized is None and "stage" in (checkpoint.manifest or {}):
        return  # of dense layers alone: all stages have the whole model's config
    if blocks and quantized is None and not unread_quantization(checkpoint):
        for block in blocks:
            yield Finding("QC012", "error", block.where, "states a quantization that no tensor has")
    if quantized is not None and not blocks:
        yield Finding("QC012", "error", quantized, "is quantized, but no config block says how")


def _first_quantized(checkpoint: Checkpoint) -> str | None:
    """The first tensor of codes, else of what only quantized checkpoints have."""
    first, _ = next(each_coded(checkpoint), (None, None))
    odd = "F4" in checkpoint.dtypes or any(end.endswith(_PACKED) for end in checkpoint.ends)
    if first is not None or not odd:
        return first
    for name, source in checkpoint.items():
        packed = name.endswith(_PACKED) and _is_of_codes(checkpoint.sources, name)
        if packed or source.type.dtype == "F4":
            return name
    return None


def _is_of_codes(sources: Mapping[str, Source], name: str) -> bool:
    """Tell whether a tensor with such a name is of codes, or a scale beside some."""
    return any(coded(sources, one) for one in (name, *weights_of(name)))


def _missing(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Required tensors. QC016 and QC017 decide which of two forms is right, and QC011 reports missing
    parts of a weight."""
    try:
        stage_of(checkpoint)
    except PlanError:
        return  # QC054: the tensors of this stage are unknown
    absent = checkpoint.absent()
    if absent and draft_alone(checkpoint):
        there = set(map(layer_of, checkpoint)) - {None}
        absent = [name for name in absent if layer_of(name) in there]
    family = checkpoint.role_index.family.name
    for name in in_no_form(checkpoint, absent):
        yield Finding("QC013", "error", name, f"missing: family {family} requires it by config")


def in_no_form(checkpoint: Checkpoint, absent: Sequence[str]) -> list[str]:
    """Names of tensors that a family requires, without those that the layer has in another form: the
    formats of a checkpoint may differ by layer."""
    forms = forms_in(checkpoint) if absent else {}
    whole = checkpoint if unread_quantization(checkpoint) else coded_weights(checkpoint)
    stored = {name.rpartition(".")[0] for name in whole} if absent else set()
    found = []
    for name in absent:
        module, parameter = split_parameter(name)
        is_stored = module in stored and (parameter == "weight" or whole is checkpoint)
        if is_stored or _is_otherwise_there(name, checkpoint):
            continue
        at = where_of(name)
        if at is not None:
            where, side = at
            present = forms.get(where)
            if present is not None and present.whole(where.forms, other(side)):
                continue
        found.append(name)
    return found


def _is_otherwise_there(name: str, checkpoint: Checkpoint) -> bool:
    """Tell whether a name belongs to a format that other layers have: some releases leave some layers
    unquantized, so theirs have no scales."""
    if any(weight in checkpoint for weight in weight_candidates(name)):
        return True
    module, parameter = split_parameter(name)
    if any(f"{module}.{one}" in checkpoint for one in _OTHER_FORMS.get(parameter, ())):
        return True
    codes, scales = (
        None if (found := checkpoint.sources.get(f"{module}.{one}")) is None else found.type.dtype
        for one in ("weight_packed", "weight_scale")
    )
    of_codes, of_scales = _OTHER_CODES.get(parameter, ((), ()))
    return codes in of_codes or (codes is not None and scales in of_scales)


def _tied(checkpoint: Checkpoint) -> Iterator[Finding]:
    role_index = checkpoint.role_index
    if role_index.dims.tied and role_index.family.tied is not None:
        names = [n for role in role_index.family.tied if (n := role_index.named(role)) is not None]
        if len({checkpoint[name].type for name in names}) > 1:
            yield Finding("QC014", "error", names[0], f"tied to {names[1]}, but of another type")


def _tied_and_not(checkpoint: Checkpoint) -> Iterator[Finding]:
    root, nested = checkpoint.config, checkpoint.config.get("text_config")
    flags = [root.get(_TIE), nested.get(_TIE) if isinstance(nested, Mapping) else None]
    if None not in flags and bool(flags[0]) != bool(flags[1]):
        message = f"{_TIE} is {flags[0]!r}, but text_config's is {flags[1]!r}"
        yield Finding("QC044", "warning", "config.json", message)


def _prefixes(checkpoint: Checkpoint) -> Iterator[Finding]:
    """For tensors that may have several prefixes; a finding for the first of each layer that differs."""
    role_index = checkpoint.role_index
    longest = sorted(role_index.family.prefixes, key=len, reverse=True)
    found: dict[str, list[tuple[int | None, str]]] = {}
    for name, place in role_index.places.items():
        if place.role.module.startswith("@"):
            prefix = next(prefix for prefix in longest if name.startswith(prefix))
            found.setdefault(prefix, []).append((place.layer, name))
    if not found:
        return
    usual = max(found, key=lambda prefix: len(found[prefix]))
    for prefix, named in found.items():
        first = dict(reversed(named)) if prefix != usual else {}
        for name in reversed(first.values()):
            others = f"{count(len(found[usual]), 'other')} have {usual!r}"
            yield Finding("QC046", "error", name, f"has the prefix {prefix!r}, but {others}")
    if usual == _LANGUAGE and checkpoint.config.get("model_type") in _TEXT_ONLY:
        message = (
            f"{checkpoint.config['model_type']} names its layers model.layers.*; "
            "transformers loads this name, but sglang drops it with a warning"
        )
        yield Finding("QC048", "warning", found[usual][0][1], message)
