"""The list of modules that a quantization block leaves out, made true to the tensors.

Entries that name a quantized module, and expressions that cannot be read, are removed; unquantized
linears that no entry names are added under the names that a conversion would write
(models/unquantized.py). Other entries stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.checkpoint.quantization_config import complete_ignore_lists
from qconvert.core.names import split_parameter, with_fused_names
from qconvert.core.shown import count
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
from qconvert.repair.blocks import MendedConfig, fp8_modules, int8_modules, packed_modules
from qconvert.validators.reading.quantization import LISTS, Listed

_KEY = "quantization_config"


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
    wanted = _wanted(checkpoint, own)
    listed, literal = Listed(own.method, tuple(entries)), frozenset(entries)
    linears = _plain_linears(checkpoint)
    stored = {split_parameter(name)[0] for name in checkpoint}
    fused = with_fused_names(linears) if every else []
    added = [
        entry
        for entry in dict.fromkeys([*wanted, *fused])
        if entry not in literal
        and (entry in fused or not listed.names(entry.replace("*", "any")))
        # modelopt's readers ask for embeddings and heads too, others for linears alone. Names that are
        # not stored are those of fused modules and of draft models.
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
    if own.method == "fp8":
        config = complete_ignore_lists(config, ())
        if config != checkpoint.config and not why:
            why.append(f"{key}: names that runtimes look up together are listed together")
    return MendedConfig(config, tuple(why)) if why else None


def _own_block(checkpoint: Checkpoint) -> QuantConfig | None:
    block = checkpoint.config.get(_KEY)
    return QuantConfig(f"config.json: {_KEY}", block) if isinstance(block, Mapping) else None


def _key(own: QuantConfig) -> str:
    """The key under which the list is written."""
    if own.method in ("fp8", "fbgemm_fp8"):
        return "modules_to_not_convert"
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


def _wanted(checkpoint: Checkpoint, own: QuantConfig) -> Sequence[str]:
    """The list that a conversion would write."""
    plan, packed = Plan.identity(checkpoint), packed_modules(checkpoint)
    if not packed:  # codes of a byte each; beside packed ones FP8 linears are a group of their own
        packed = fp8_modules(checkpoint) | int8_modules(checkpoint)
    others = {n: o for n, o in plan.tensors.items() if split_parameter(n)[0] not in packed}
    if own.method == "compressed-tensors":
        if any(name.endswith(".weight_global_scale") for name in checkpoint):
            dims = plan.role_index.dims
            drafts = any(plan.family.is_mtp(f"{module}.weight", dims) for module in packed)
            return ignored_names(plan, others, drafts=drafts)
        routed = any(plan.role_index.kind(n).routed for n in plan.tensors if n not in others)
        shared = any(path in module for path in shared_paths(plan) for module in packed)
        return ignored(plan, others, experts=routed, shared=shared)
    if own.method == "modelopt":
        if "quantized_layers" in own.block:
            return with_draft_names(plan, ignored_linears(plan, others))
        return ignored_globs(plan, others, packed)
    return list(_plain_linears(checkpoint))


def _plain_linears(checkpoint: Checkpoint) -> dict[str, None]:
    """Modules that runtimes build as linears and that are not quantized. Others, such as embeddings, a
    conversion may list too, but their absence is no fault."""
    return {
        name.removesuffix(".weight"): None
        for name, place in checkpoint.role_index.places.items()
        if place.parameter == "weight"
        and place.role.kind.linear
        and len(checkpoint[name].type.shape) == 2
        and checkpoint[name].type.dtype in FLOAT_DTYPES
    }


def _some(entries: Sequence[str]) -> str:
    shown = ", ".join(map(repr, list(entries)[:3]))
    return shown if len(entries) <= 3 else f"{shown} and {len(entries) - 3} more"
