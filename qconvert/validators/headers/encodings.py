"""Every quantized module in the format that the config states for it, and no format that nothing judges.

QC096 a module is stored in another format than the config states for it.
QC097 no rule judges how weights are stored: the config's method, its form, or tensors of codes.

What is stored is told by parameters and types; what is stated by the block, for compressed-tensors by
the group that covers the module. Parts and shapes: structure, shapes, validators/formats.
A folder that is stored in a way that is judged nowhere has no finding otherwise, also a broken one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.core.graph import Source
from qconvert.core.names import is_scale, scale_candidates
from qconvert.core.shown import count
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, validator
from qconvert.validators.formats.fp8 import fp8_blocks
from qconvert.validators.formats.qweight import states_qweight
from qconvert.validators.reading.decode import FP8
from qconvert.validators.reading.forms import Spec, coded_weights, specs
from qconvert.validators.reading.quantization import (
    group_of,
    read_methods,
    scheme_of,
    taken_block,
    weight_groups,
)
from qconvert.validators.reading.stated_schemes import (
    AUTO_ROUND,
    MIXED,
    algorithm,
    auto_round_weights,
    layer_table,
)

Kinds = frozenset[str]

_FLOATS = ("BF16", "F16", "F32", "F64")
# Names of codes, in whatever type.
_ALWAYS = ("weight_packed", "qweight", "_blocks")
_PACKED_TYPES = (
    "U8", "I8", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "U16", "U32",
)  # fmt: skip
# Formats of compressed-tensors (`config/format.py`) that may store anything.
_OPEN = ("mixed-precision", "dense")


@validator("every quantized module is stored in the format that the config states for it", "model")
def encodings(folder: Folder) -> Iterator[Finding]:
    checkpoint = folder.checkpoint
    unjudged = list(_unjudged(checkpoint))
    yield from unjudged
    if unjudged:
        return
    coded, config = coded_weights(checkpoint), taken_block(checkpoint.quantization_configs)
    unread: dict[str, list[str]] = {}
    other: dict[str, list[tuple[str, str]]] = {}
    for name, source in checkpoint.items():
        if source.type.dtype in _FLOATS and not name.endswith(_ALWAYS):
            continue
        if name not in coded and not _is_code(checkpoint, name, source):
            continue
        if name not in coded:
            unread.setdefault(source.type.dtype, []).append(name)
        elif config is not None:
            said = _misstated(checkpoint, config, name, coded[name].name)
            if said is not None:
                other.setdefault(said, []).append((name, coded[name].name))
    for dtype, names in unread.items():
        message = f"{count(len(names), 'tensor')} of {dtype} that no format here has: not judged"
        yield Finding("QC097", "error", names[0], message)
    for said, found in other.items():
        name, stored = found[0]
        more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
        yield Finding("QC096", "error", name, f"is stored as {stored}, but {said}{more}")


def _unjudged(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Blocks that state a method or a form of it that no rule knows."""
    for config in checkpoint.quantization_configs:
        said = _unknown(config)
        if said:
            message = f"states {said}: how weights are stored is not judged"
            yield Finding("QC097", "error", config.where, message)


def _unknown(config: QuantConfig) -> str:
    block = config.block
    if config.method not in read_methods():
        return f"quant_method {config.method!r}, which no rule here reads"
    if config.method == "awq" and not states_qweight(config):
        keys = ("bits", "group_size", "version")
        return "an AWQ form that is not read here: " + ", ".join(
            f"{k} {block.get(k)!r}" for k in keys
        )
    if config.method == "gptq" and block.get("bits") not in range(2, 9):
        return f"GPTQ of bits {block.get('bits')!r}: 2 to 8 are read here"
    if config.method == AUTO_ROUND and not _by_numbers(auto_round_weights(block)):
        return f"AutoRound's {block.get('bits')!r} bits of data_type {block.get('data_type')!r}"
    if config.method == "modelopt" and _by_algorithm(config) is None:
        return f"quant_algo {block.get('quant_algo')!r} of modelopt, which no rule here reads"
    if config.method == "quark" or layer_table(config) is not None:
        unread = (one for one in weight_groups(config) if one.get("type") is None)
        said = next((one.get("stated") or one.get("quant_algo") for one in unread), None)
        return "" if said is None else f"weights as {said}, which no rule here reads"
    if config.method != "compressed-tensors":
        return ""
    groups = block.get("config_groups")
    every = (
        [g for g in groups.values() if isinstance(g, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    for stated in (block, *every):
        form = stated.get("format")
        if isinstance(form, str) and _by_form(form) is None:
            return f"format {form!r} of compressed-tensors, which no rule here reads"
    for group in every:
        weights = group.get("weights")
        if isinstance(weights, Mapping) and not _by_numbers(weights):
            kind = f"{weights.get('num_bits')!r} bits of type {weights.get('type')!r}"
            return f"weights of {kind}, which no rule here reads"
    return ""


def _is_code(checkpoint: Checkpoint, name: str, source: Source) -> bool:
    """Tell whether a tensor holds the codes of a weight, by its name and type. Models have parameters
    that end in `_blocks`: floats are codes, of a wrong type, only beside scales."""
    last, dtype = name.rpartition(".")[2], source.type.dtype
    if is_scale(name) and dtype not in ("I32", "I8"):
        return False
    if last in _ALWAYS[:2]:
        return True
    if last.endswith("_blocks"):
        return dtype not in _FLOATS or f"{name.removesuffix('_blocks')}_scales" in checkpoint
    if last.startswith(("w13_", "w2_")) or last.endswith(("scale", "scales", "scale_inv")):
        return False  # QC105 to QC107: of kernels' own layouts
    experts = ".experts." in name and len(source.type.shape) == 3
    if last != "weight" and not experts:
        return False
    return dtype in FP8 or (dtype in _PACKED_TYPES and len(source.type.shape) > 1)


def _misstated(checkpoint: Checkpoint, config: QuantConfig, name: str, stored: str) -> str | None:
    """The form that the block states for a module instead of how it is stored; None if nothing else."""
    module = name.rpartition(".")[0] if "." in name else name
    method, block = config.method, config.block
    wanted = _by_method(method)
    if method == "quark" or layer_table(config) is not None:
        own = scheme_of(checkpoint, module)
        if own is None:
            return None  # QC034
        wanted = _by_numbers(own)
    elif method == "modelopt":
        wanted = _by_algorithm(config) or _named(specs())
    elif method == AUTO_ROUND:
        weights = scheme_of(checkpoint, module)
        if weights is None:
            return None  # QC034
        wanted = wanted if weights["type"] == "int" else _by_numbers(weights)
    elif "FP8" in wanted:
        beside = _experts_beside(checkpoint, config, name)
        if stored == "FP8" and beside is None:
            return _other_fp8(checkpoint, config, name)
        if stored == "MXFP4" and name.endswith(".weight") and beside is None:
            return None  # DeepSeek-V4's experts, of which its block says nothing
        wanted = beside or wanted
    elif method == "compressed-tensors":
        group = group_of(checkpoint, module)
        if group is None:
            return None  # QC034
        wanted = _by_numbers(group.get("weights") or {})
        form = group.get("format") or block.get("format")
        by_form = _by_form(form) if isinstance(form, str) else None
        wanted = wanted if by_form is None else wanted & by_form
    elif not wanted:
        return None
    if stored in wanted:
        return None
    return (
        f"{config.where} states {' or '.join(sorted(wanted)) or 'formats that exclude one another'}"
    )


def _experts_beside(checkpoint: Checkpoint, config: QuantConfig, name: str) -> Kinds | None:
    """The form that `moe_quant_algo` states for routed experts beside FP8 layers; None where it states
    nothing. sglang (`HybridFp8NvFp4Config`): a draft's experts are as the block says without
    it."""
    algorithm, index = config.block.get("moe_quant_algo"), checkpoint.role_index
    if algorithm is None or ".experts." not in name or index.family.is_mtp(name, index.dims):
        return None
    return _of_algorithm(algorithm)


def _other_fp8(checkpoint: Checkpoint, config: QuantConfig, name: str) -> str | None:
    """Of quant_method fp8: another FP8 type, or a scale a row where blocks are stated."""
    source, fmt = checkpoint[name], str(config.block.get("fmt", "")).lower()
    stated = source.type.dtype
    if fmt in ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"):
        stated = f"F8_{fmt.upper()}"
    if stated != source.type.dtype:
        return f"{source.type.dtype}, {config.where} states fmt {fmt}"
    scale = next((s for s in scale_candidates(name) if s in checkpoint), None)
    if scale is None or config.method != "fp8" or len(source.type.shape) != 2:
        return None
    rows, columns = source.type.shape
    if checkpoint[scale].type.shape != (rows, 1) or not (blocks := fp8_blocks([config])):
        return None
    high, wide = next(iter(blocks))
    if (high > 1 or columns > wide) and rows > 1:
        return f"with a scale a row, {config.where} states blocks of {high}x{wide}"
    return None


def _named(found: Iterable[Spec]) -> Kinds:
    return frozenset(spec.name for spec in found)


def _by_algorithm(config: QuantConfig) -> Kinds | None:
    algorithm = config.block.get("quant_algo")
    if algorithm is None:
        return _named(specs())  # QC037, QC103: modelopt's block of another version
    return _of_algorithm(algorithm)


def _of_algorithm(name: object) -> Kinds | None:
    found = algorithm(str(name))
    every = str(name) == MIXED or str(name).startswith(f"{MIXED}_")
    return _named(specs()) if every else None if found is None else _named(found[:1])


@lru_cache(maxsize=16)  # called for each matrix
def _by_method(method: str) -> Kinds:
    return _named(spec for spec in specs() if method in spec.methods)


@lru_cache(maxsize=16)
def _by_form(form: str) -> Kinds | None:
    found = _named(spec for spec in specs() if form in spec.formats or form in _OPEN)
    return found or None


def _by_numbers(weights: Mapping[str, Any]) -> Kinds:
    """Formats that a group's type and bits are stored as; nothing for those that are not read here."""
    return _named(spec for spec in specs() if spec.states(weights))
