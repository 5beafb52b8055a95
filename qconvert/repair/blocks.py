"""Quantization blocks of config.json against the tensors that are stored: blocks that describe none of
them are removed, the form of FP8 linears beside packed experts is stated, and
hf_quant_config.json says what config.json says.

Which block describes which tensors: compressed-tensors (`weight_packed`), AutoGPTQ and AutoAWQ
(`qweight`), modelopt (`weight_scale_2`), DeepSeek's FP8 (`weight_scale_inv`).

The list of modules that a quantization block leaves out, made true to the tensors.

Entries that name a quantized module, and expressions that cannot be read, are removed; unquantized
linears that no entry names are added under the names that a conversion would write
(models/unquantized.py). Other entries stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qconvert.checkpoint.checkpoint import HF_QUANT_CONFIG, Checkpoint, QuantConfig
from qconvert.checkpoint.quantization_config import complete_ignore_lists
from qconvert.core.json_text import parse_object
from qconvert.core.names import natural_key, split_parameter, with_fused_names
from qconvert.core.roles import Kind
from qconvert.core.shown import count
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.fp8.format import fp8_group_config
from qconvert.formats.nvfp4.format import mixed_config
from qconvert.models.linears import runtime_linears
from qconvert.models.unquantized import (
    ignored,
    ignored_globs,
    ignored_linears,
    ignored_names,
    shared_paths,
    with_draft_names,
)
from qconvert.ops.cast import FLOAT_DTYPES
from qconvert.plan.plan import Plan
from qconvert.validators.headers.quantization_config import nested_alone
from qconvert.validators.headers.stated_numbers import wrong_numbers
from qconvert.validators.reading.quantization import LISTS, Listed

_CODES = frozenset({"I8", "U8", "I32", "F4", *WEIGHT_DTYPES})
_GPTQ = frozenset({"gptq", "awq", "gptq_marlin", "awq_marlin", "auto-round"})
# Keys of the form that is replaced.
_HYBRID = frozenset({"quant_algo", "moe_quant_algo", "group_size", "exclude_modules"})
_SIZES = tuple(1 << power for power in range(4, 11))  # blocks of FP8 scales that exist


@dataclass(frozen=True, slots=True)
class MendedConfig:
    """A changed config.json, and what was changed for what reason."""

    config: Mapping[str, Any]
    why: tuple[str, ...]


def packed_modules(checkpoint: Checkpoint) -> set[str]:
    """Modules whose weight is packed codes (not FP8 alone). A stack of experts is a module."""
    found = set()
    for name in checkpoint:
        for end in (".weight_packed", ".qweight", ".weight_scale_2", "_scale_2"):
            if name.endswith(end) and (not end.endswith("_2") or _scales_codes(checkpoint, name)):
                found.add(name.removesuffix(end))
                break
    return found


def _scales_codes(checkpoint: Checkpoint, name: str) -> bool:
    """Tell whether a `_scale_2` is that of a weight in codes: models have a `layer_scale_2` of their
    own."""
    weight = checkpoint.get(name.removesuffix("_scale_2"))
    return weight is not None and weight.type.dtype in _CODES


def fp8_modules(checkpoint: Checkpoint) -> set[str]:
    """Modules whose weight is FP8, with scales of any kind."""
    return {
        name.removesuffix(".weight")
        for name, source in checkpoint.items()
        if source.type.dtype in WEIGHT_DTYPES and not name.endswith(("_scale", "_scale_inv"))
    }


def int8_modules(checkpoint: Checkpoint) -> set[str]:
    """Modules whose weight is INT8, a number each."""
    return {
        name.removesuffix(".weight")
        for name, source in checkpoint.items()
        if source.type.dtype == "I8" and name.endswith(".weight") and f"{name}_scale" in checkpoint
    }


def methods_of(checkpoint: Checkpoint) -> frozenset[str] | None:
    """Values of `quant_method` that can describe the tensors: none where nothing is quantized. None
    where codes are stored in a form that is not known here."""
    ends = _ends(checkpoint)
    if "qweight" in ends:
        return _GPTQ
    if "weight_packed" in ends:
        return frozenset({"compressed-tensors"})
    if any(n.endswith("_scale_2") and _scales_codes(checkpoint, n) for n in checkpoint):
        return frozenset({"modelopt", "modelopt_fp4", "fp8"})
    if not any(source.type.dtype in _CODES for source in checkpoint.values()):
        return frozenset()
    fp8 = fp8_modules(checkpoint)
    others = (
        name
        for name, source in checkpoint.items()
        if source.type.dtype in _CODES.difference(WEIGHT_DTYPES)
        and not name.endswith(("_scale", "_inv"))
    )
    if not fp8 or next(others, None) is not None:
        return None
    if any(name.endswith("_scale_inv") for name in checkpoint):
        return frozenset({"fp8"})
    return frozenset({"fp8", "fbgemm_fp8", "compressed-tensors", "modelopt"})


def without_stale_blocks(checkpoint: Checkpoint) -> MendedConfig | None:
    """config.json without blocks that describe no tensor of the folder, where one that does is left or
    none is needed."""
    methods = methods_of(checkpoint)
    blocks = _own_blocks(checkpoint)
    if methods is None or not blocks:
        return None
    stale = [one for one in blocks if one.method not in methods]
    if not stale or (methods and len(stale) == len(blocks)):
        return None
    config: Mapping[str, Any] = checkpoint.config
    why = []
    for one in stale:
        _, *path = one.where.split(": ")
        config = _without(config, path)
        why.append(
            f"{': '.join(path)} states {one.method or 'no method'}, and no tensor is stored so"
        )
    return MendedConfig(config, tuple(why))


def with_root_block(checkpoint: Checkpoint) -> MendedConfig | None:
    """The quantization block of text_config at the root, where every runtime and transformers look for
    it; not of a class whose own config takes it from there."""
    config = checkpoint.config
    if nested_alone(config) is None:
        return None
    block = config["text_config"]["quantization_config"]
    moved = _without(config, ["text_config", "quantization_config"])
    why = (
        "quantization_config stood in text_config alone, where sglang and transformers do not look"
    )
    return MendedConfig({**moved, "quantization_config": block}, (why,))


def with_true_numbers(checkpoint: Checkpoint) -> MendedConfig | None:
    """Numbers that config.json leaves out, or states otherwise than the tensors' shapes or
    qconvert.json."""
    config: Mapping[str, Any] = checkpoint.config
    why = []
    for number in wrong_numbers(checkpoint):
        if not number.proof:
            continue
        config = _with(config, number.path, number.value)
        why.append(
            f"{': '.join(number.path)} {number.value!r} instead of "
            f"{'nothing' if number.stated is None else repr(number.stated)}: {number.proof}"
        )
    return MendedConfig(config, tuple(why)) if why else None


def _with(config: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """With a value at a path."""
    first, *rest = path
    return {**config, first: _with(config[first], rest, value) if rest else value}


def with_fp8_linears(checkpoint: Checkpoint) -> MendedConfig | None:
    """A statement of the block FP8 of linears beside packed experts, where nothing says so: a group for
    all linears where their scales are called `weight_scale`, `linear_fp8_config` where every linear is
    FP8 and has a `weight_scale_inv`. The block is the one power of two that fits the scales of every
    linear; where several fit, None."""
    block = checkpoint.config.get("quantization_config")
    if not isinstance(block, Mapping) or block.get("quant_method") != "compressed-tensors":
        return None
    if "linear_fp8_config" in block or _states_float(block):
        return None
    packed = packed_modules(checkpoint)
    plan = Plan.identity(checkpoint)
    others = {n: o for n, o in plan.tensors.items() if split_parameter(n)[0] not in packed}
    linears = runtime_linears(plan, others)
    fp8 = [module for module, is_fp8 in linears.items() if is_fp8]
    scales = (
        [n for n in ("weight_scale", "weight_scale_inv") if f"{fp8[0]}.{n}" in plan.tensors]
        if fp8
        else []
    )
    if not packed or len(scales) != 1:
        return None
    rows, columns = (_fitting(checkpoint, fp8, scales[0], axis) for axis in (0, 1))
    if len(rows) != 1 or len(columns) != 1:
        return None
    size = rows[0], columns[0]
    beside = (
        f"{len(fp8)} linears are FP8 beside packed experts, in blocks {size[0]} x {size[1]}, the only "
        "size that fits all scales"
    )
    if scales == ["weight_scale"]:
        stated = _with_group(block, size)
        if stated is None:
            return None
        why = f"a group for FP8: {beside}"
    elif len(fp8) < len(linears):
        return None
    else:
        stated = {
            **block,
            "linear_fp8_config": {
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": list(size),
            },
        }  # fmt: skip
        why = f"linear_fp8_config: {beside}"
    return MendedConfig({**checkpoint.config, "quantization_config": stated}, (why,))


def _with_group(block: Mapping[str, Any], size: tuple[int, int]) -> dict[str, Any] | None:
    """The block with a group for FP8 linears; None where another one is for all linears."""
    groups = block.get("config_groups")
    if not isinstance(groups, Mapping) or any(
        isinstance(group, Mapping) and "Linear" in (group.get("targets") or ())
        for group in groups.values()
    ):
        return None
    name = next(name for n in range(len(groups) + 1) if (name := f"group_{n}") not in groups)
    return {**block, "config_groups": {**groups, name: fp8_group_config(size)}}


def with_mixed_precision(checkpoint: Checkpoint) -> MendedConfig | None:
    """modelopt's MIXED_PRECISION with an entry for each layer, in place of block FP8 with a
    `moe_quant_algo` beside it, which sglang reads for NVFP4 with input scales alone."""
    block = checkpoint.config.get("quantization_config")
    packed = packed_modules(checkpoint)
    if not isinstance(block, Mapping) or not packed or "weight_scale_2" not in _ends(checkpoint):
        return None
    if block.get("quant_method") != "fp8" or not block.get("weight_block_size"):
        return None
    stated = block.get("quant_algo"), block.get("moe_quant_algo"), "group_size" in block
    if stated == ("MIXED_PRECISION", "NVFP4", True) and "input_scale" in _ends(checkpoint):
        return None  # what sglang and vLLM read of DeepSeek-V4
    plan = Plan.identity(checkpoint)
    others = {n: o for n, o in plan.tensors.items() if split_parameter(n)[0] not in packed}
    fp8 = [module for module, is_fp8 in runtime_linears(plan, others).items() if is_fp8]
    own = {key: value for key, value in block.items() if key not in _HYBRID}
    mixed = mixed_config(
        own, with_draft_names(plan, ignored_linears(plan, others)), sorted(packed, key=natural_key),
        with_draft_names(plan, fp8), inputs="input_scale" in _ends(checkpoint),
    )  # fmt: skip
    return MendedConfig(
        {**checkpoint.config, "quantization_config": mixed},
        ("quant_algo MIXED_PRECISION with an entry for each layer, which sglang reads",),
    )


def _ends(checkpoint: Checkpoint) -> set[str]:
    """Names of parameters."""
    return {split_parameter(name)[1] for name in checkpoint}


def hf_quant_config(checkpoint: Checkpoint) -> bytes | None:
    """hf_quant_config.json as it should be, b"" for one that should go, None for nothing to change."""
    data = checkpoint.read(HF_QUANT_CONFIG)
    if data is None:
        return None
    own = next((b for b in _own_blocks(checkpoint) if b.method.startswith("modelopt")), None)
    if own is None:
        # A file beside config.json's other block, or beside weights that are not quantized, is stale.
        stale = bool(_own_blocks(checkpoint)) or methods_of(checkpoint) == frozenset()
        return b"" if stale else None
    whole = parse_object(data, checkpoint.root / HF_QUANT_CONFIG)
    nested = isinstance(whole.get("quantization"), dict)
    inner = whole["quantization"] if nested else whole
    listed = own.block.get("ignore", own.block.get("exclude_modules", []))
    wanted = {**inner, "exclude_modules": listed}
    wanted |= {key: own.block[key] for key in ("quant_algo", "group_size") if key in own.block}
    if wanted == inner:
        return None
    return as_json({**whole, "quantization": wanted} if nested else wanted)


def as_json(value: Mapping[str, Any]) -> bytes:
    """As conversions write config.json."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _own_blocks(checkpoint: Checkpoint) -> list[QuantConfig]:
    """Those of config.json."""
    return [one for one in checkpoint.quantization_configs if one.where != HF_QUANT_CONFIG]


def _without(config: Mapping[str, Any], path: list[str]) -> dict[str, Any]:
    """Without the entry at a path, and without objects that held nothing else: transformers would take
    an empty text_config for the model's."""
    first, *rest = path
    if not rest:
        return {key: value for key, value in config.items() if key != first}
    inner = _without(config[first], rest)
    kept = {key: inner if key == first else value for key, value in config.items()}
    return kept if inner else {key: value for key, value in kept.items() if key != first}


def _states_float(block: Mapping[str, Any]) -> bool:
    groups = block.get("config_groups")
    weights = (
        group.get("weights")
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping)
    )
    return any(isinstance(w, Mapping) and w.get("type") == "float" for w in weights)


def _fitting(
    checkpoint: Checkpoint, modules: Iterable[str], parameter: str, axis: int
) -> list[int]:
    """Block sizes along an axis that every module's weight and scale agree on."""
    sizes = list(_SIZES)
    for module in modules:
        scale = checkpoint.get(f"{module}.{parameter}")
        if scale is None or len(scale.type.shape) != 2:
            return []
        length, blocks = checkpoint[f"{module}.weight"].type.shape[axis], scale.type.shape[axis]
        sizes = [size for size in sizes if -(-length // size) == blocks]
    return sizes


_KEY = "quantization_config"
_FP8_LIST = "modules_to_not_convert"
_IN_TRANSFORMERS = (Kind.HEAD, Kind.SHARED_WEIGHT)


def true_ignore_list(checkpoint: Checkpoint, *, every: bool = False) -> MendedConfig | None:
    """config.json with the list of its block mended; None where it is right, or where the block is of
    a method whose lists are not known here. `every`: each unquantized linear by its own name, and by
    that of the module that runtimes fuse it to, whatever patterns name."""
    own = _own_block(checkpoint)
    if own is None or own.method not in LISTS:
        return None
    entries, why = _kept(
        own, packed_modules(checkpoint) | fp8_modules(checkpoint) | int8_modules(checkpoint)
    )
    linears = _plain_linears(checkpoint, own)
    wanted = _wanted(checkpoint, own, linears)
    listed, literal = Listed(own.method, tuple(entries)), frozenset(entries)
    stored = {split_parameter(name)[0] for name in checkpoint}
    fused = with_fused_names(linears) if every else []
    added = [
        entry
        for entry in dict.fromkeys([*wanted, *fused])
        if entry not in literal
        and (entry in fused or not _covered(entry, listed, linears))
        # modelopt's readers ask for embeddings too. Names that are not stored are those of fused modules
        # and of draft models.
        and (own.method == "modelopt" or entry in linears or entry not in stored)
    ]
    if added:
        why.append(f"lists {count(len(added), 'unquantized module')} more: {_some(added)}")
    key = _key(own)
    block = {**own.block, key: [*entries, *added]} if entries or added else dict(own.block)
    others = [k for k in LISTS[own.method] if k != key and k in block]
    if len([k for k in LISTS[own.method] if isinstance(own.block.get(k), list)]) > 1:
        why.append(f"one list, {key}, instead of {' and '.join([key, *others])}")
    config = {**checkpoint.config, _KEY: {k: v for k, v in block.items() if k not in others}}
    if own.method in ("fp8", "compressed-tensors"):
        config = complete_ignore_lists(config, ())
        if config != checkpoint.config and not why:
            why.append(f"{key}: names that runtimes look up together are listed together")
    return MendedConfig(config, tuple(why)) if why else None


def _covered(entry: str, listed: Listed, linears: Iterable[str]) -> bool:
    """Tell whether a list names all that an entry does: of an expression, the linears; one that names
    none is of names that only runtimes have."""
    own = Listed(listed.method, (entry,))
    found = [m for m in linears if own.names(m)] if entry.startswith("re:") else []
    if found:
        return all(listed.names(module) for module in found)
    return listed.names(entry.replace("*", "any"))


def _own_block(checkpoint: Checkpoint) -> QuantConfig | None:
    block = checkpoint.config.get(_KEY)
    return QuantConfig(f"config.json: {_KEY}", block) if isinstance(block, Mapping) else None


def _key(own: QuantConfig) -> str:
    """The key under which the list is written."""
    if own.method in ("fp8", "fbgemm_fp8"):
        return _FP8_LIST
    if own.method == "modelopt" and "exclude_modules" in own.block:
        return "exclude_modules"
    return "ignore"


def _kept(own: QuantConfig, quantized: set[str]) -> tuple[list[str], list[str]]:
    """Entries of all lists that stay, and why others go."""
    entries: dict[str, None] = {}
    for key in LISTS[own.method]:
        value = own.block.get(key)
        entries |= (
            dict.fromkeys(e for e in value if isinstance(e, str)) if isinstance(value, list) else {}
        )
    listed = Listed(own.method, tuple(entries))
    why = [f"removes {entry!r}: {fault}" for entry, fault in listed.broken.items()]
    gone = set(listed.broken)
    wrong = [module for module in quantized if listed.names(module)]
    if wrong:
        culprits = [e for e in entries if any(Listed(own.method, (e,)).names(m) for m in wrong)]
        gone |= set(culprits)
        why.append(
            f"removes {_some(culprits)}: {_some(sorted(wrong))} "
            f"{'is' if len(wrong) == 1 else 'are'} quantized"
        )
    return [entry for entry in entries if entry not in gone], why


def _wanted(checkpoint: Checkpoint, own: QuantConfig, linears: Iterable[str]) -> Sequence[str]:
    """The list that a conversion would write; of FP8, the linears."""
    plan, packed = Plan.identity(checkpoint), packed_modules(checkpoint)
    if not packed:  # codes of a byte each; beside others FP8 linears are a group of their own
        packed = int8_modules(checkpoint) or fp8_modules(checkpoint)
    others = {n: o for n, o in plan.tensors.items() if split_parameter(n)[0] not in packed}
    if own.method == "compressed-tensors":
        dims = plan.role_index.dims
        drafts = [m for m in packed if plan.family.is_mtp(f"{m}.weight", dims)]
        if any(name.endswith(".weight_global_scale") for name in checkpoint):
            return ignored_names(plan, others, drafts=bool(drafts))
        routed = any(plan.role_index.kind(n).routed for n in plan.tensors if n not in others)
        shared = any(path in module for path in shared_paths(plan) for module in drafts)
        return ignored(plan, others, experts=routed, shared=shared)
    if own.method == "modelopt":
        if "quantized_layers" in own.block:
            return with_draft_names(plan, ignored_linears(plan, others))
        return ignored_globs(plan, others, packed)
    return list(linears)


def _plain_linears(checkpoint: Checkpoint, own: QuantConfig) -> dict[str, None]:
    """Modules that are not quantized and that readers of the block take for linears: those that runtimes
    build as such, and heads and gates of shared experts, which are torch.nn.Linear in transformers,
    where compressed-tensors or a list of FP8 says what is left out. Others, such as embeddings, a
    conversion may list too, but their absence is no fault."""
    floats = {
        name.removesuffix(".weight"): place.role.kind
        for name, place in checkpoint.role_index.places.items()
        if place.parameter == "weight"
        and len(checkpoint[name].type.shape) == 2
        and checkpoint[name].type.dtype in FLOAT_DTYPES
    }
    linears = {module: None for module, kind in floats.items() if kind.linear}
    has_list = linears or any(isinstance(own.block.get(k), list) for k in LISTS[own.method])
    if own.method != "compressed-tensors" and not (_key(own) == _FP8_LIST and has_list):
        return linears
    return {m: None for m, kind in floats.items() if m in linears or kind in _IN_TRANSFORMERS}


def _some(entries: Sequence[str]) -> str:
    shown = ", ".join(map(repr, list(entries)[:3]))
    return shown if len(entries) <= 3 else f"{shown} and {len(entries) - 3} more"
