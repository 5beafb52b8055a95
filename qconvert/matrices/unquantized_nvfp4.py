"""Modules left unquantized next to NVFP4 weights, as either dialect's config names them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from re import escape
from typing import Any

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output
from qconvert.core.names import split_parameter
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.matrices.unquantized import (
    Named,
    draft_as_first_layer,
    ignored,
    renamed_towers,
    renames_lists,
    tied_head,
    tower_of,
    with_runtime_names,
)
from qconvert.plan.plan import Plan

# sglang's draft models call a layer so that checkpoints number on from the model's own.
_NUMBERED_ON = "model.decoder."
_DRAFT_HEAD = "model.shared_head.head"
_FIRST_OF_DRAFT = "mtp.layers.0.self_attn."
_DRAFT_ATTENTION = "model.layers.0.self_attn.*"


def draft_prefixes(plan: Plan) -> list[str]:
    """Return how names of draft layers begin, [] where there is none."""
    dims, family = plan.role_index.dims, plan.family
    found: dict[str, None] = {}
    for name in plan.tensors:
        if not family.is_mtp(name, dims):
            continue
        named = [prefix for prefix in family.mtp if name.startswith(prefix)]
        at, layers, rest = name.partition(".layers.")
        found[named[0] if named else f"{at}{layers}{rest.partition('.')[0]}."] = None
    return list(found)


def draft_patterns(plan: Plan) -> list[str]:
    """The same as regular expressions, with what runtimes call them."""
    prefixes = draft_prefixes(plan)
    if any(".layers." in prefix for prefix in prefixes):
        prefixes.append(_NUMBERED_ON)
    return [escape(prefix) for prefix in prefixes]


def ignored_names(plan: Plan, others: Named, *, drafts: bool) -> list[str]:
    """compressed-tensors' list: every unquantized matrix beside the packed ones by name; draft layers,
    where nothing of them is FP8, by a pattern each. `drafts`: experts of theirs are packed too."""
    if drafts:
        return ignored(plan, others, experts=True)
    draft_names = tuple(draft_prefixes(plan))
    found = ignored(
        plan, {n: o for n, o in others.items() if not n.startswith(draft_names)}, experts=True
    )
    inside = {name: o for name, o in others.items() if name.startswith(draft_names)}
    plain = [name for name, o in inside.items() if _is_matrix(plan, name, o)]
    if not plain:
        return found
    if any(output.type.dtype in WEIGHT_DTYPES for output in inside.values()):
        return found + [split_parameter(name)[0] for name in plain]
    return found + [f"re:{pattern}.*" for pattern in draft_patterns(plan)]


def ignored_globs(plan: Plan, others: Named, quantized: Collection[str]) -> list[str]:
    """modelopt's list: a glob for each module under which nothing is quantized, or else the linear's
    own name. Runtimes find fused modules by the glob of what they are in, and sglang's draft model asks
    for its head as `model.shared_head.head`."""
    parents = {parent for module in quantized for parent in _parents(module)}
    drafts = [] if _any_draft(plan, quantized) else draft_prefixes(plan)
    found: dict[str, None] = {}
    for name, output in others.items():
        if not _is_matrix(plan, name, output):
            continue
        draft = next((prefix for prefix in drafts if name.startswith(prefix)), None)
        place = plan.role_index.places.get(name)
        module, _ = split_parameter(name)
        above = module.rpartition(".")[0]
        if draft is not None:
            found |= dict.fromkeys(_draft_globs(draft))
        elif place is not None and place.role.name.startswith("vision."):
            tower = tower_of(name)
            found[f"{module.partition(tower)[0]}{tower}*"] = None
            found |= {f"{other}*": None for other in renamed_towers([name])}
        else:
            entry = module if not above or above in parents else f"{above}.*"
            found |= dict.fromkeys(with_runtime_names(plan, others, [entry], start="*"))
    found |= dict.fromkeys(tied_head(plan))
    packed_drafts = not drafts and draft_as_first_layer(plan)
    if packed_drafts or any(".layers." in prefix for prefix in drafts):
        found[_DRAFT_HEAD] = None
    if packed_drafts:
        found[_DRAFT_ATTENTION] = None
    if renames_lists(plan) and not any(".self_attn." in module for module in quantized):
        found["*.self_attn.*"] = None
    return list(found)


def ignored_linears(plan: Plan, others: Named) -> list[str]:
    """FP8's list, and modelopt's beside FP8 layers: the name of every unquantized linear, and of a
    tower whose linears runtimes name otherwise."""
    names = [name for name, output in others.items() if _is_matrix(plan, name, output)]
    places = plan.role_index.places
    towers = [n for n in names if n in places and places[n].role.name.startswith("vision.")]
    linears = [split_parameter(name)[0] for name in names]
    found = with_runtime_names(plan, others, [*linears, *tied_head(plan)])
    return [*found, *renamed_towers(towers)]


def with_draft_names(plan: Plan, modules: Iterable[str]) -> list[str]:
    """The modules, those of draft layers also as sglang's draft model calls them: `model.decoder` where
    they are numbered on, `model.layers.0` in Qwen3-Next, whose experts are so called in both."""
    dims, family = plan.role_index.dims, plan.family
    found: list[str] = []
    for module in modules:
        found.append(module)
        _, layers, rest = module.partition(".layers.")
        numbered = layers and not module.startswith(family.mtp)
        if _FIRST_OF_DRAFT in module and draft_as_first_layer(plan):
            found.append(f"model{module.removeprefix('mtp')}")
        if numbered and family.is_mtp(f"{module}.weight", dims):
            found.append(_NUMBERED_ON + rest.partition(".")[2])
    return found


def _any_draft(plan: Plan, modules: Iterable[str]) -> bool:
    dims = plan.role_index.dims
    return any(plan.family.is_mtp(f"{module}.weight", dims) for module in modules)


def _draft_globs(prefix: str) -> list[str]:
    return [f"{prefix}*", f"{_NUMBERED_ON}*"] if ".layers." in prefix else [f"{prefix}*"]


def _parents(module: str) -> Iterable[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def _is_matrix(plan: Plan, name: str, output: Output) -> bool:
    """Return whether it is an unquantized linear's weight, or a stack of experts'."""
    kind = output.type
    if kind.dtype in WEIGHT_DTYPES:
        return False
    return (name.endswith(".weight") and len(kind.shape) == 2) or (
        plan.role_index.kind(name).routed and len(kind.shape) == 3
    )


def fp8_own_block(plan: Plan) -> Mapping[str, Any]:
    """The source's own block, where it is one of block FP8 under the names of DeepSeek and Qwen, whose
    layers can stay as they are. Raises PlanError for another."""
    for config in plan.checkpoint.quantization_configs:
        if config.method == "fp8" and config.block.get("weight_block_size"):
            return config.block
    raise PlanError(
        "FP8 layers stay as they are beside NVFP4 experts only with quant_method fp8 and a "
        "weight_block_size: take dialect compressed-tensors, or dequantize the checkpoint first "
        "(qconvert dequant)"
    )
