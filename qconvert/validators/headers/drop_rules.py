"""Tensors that were left out against the rule that left them out: a rule's text says what it is about.

QC099 a tensor was dropped by a rule that is not about it, or by one that no pass of the folder has.

The manifest lists what is missing by rule, and QC030 takes what it lists for accounted for: a bias under
a rule about scales would be lost with everything proved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from qconvert.checkpoint.adapter import Adapted
from qconvert.checkpoint.checkpoint import MANIFEST, Checkpoint
from qconvert.core.names import split_parameter
from qconvert.core.shown import count
from qconvert.validation.findings import Finding, Skipped
from qconvert.validation.runner import Folder, NotChecked, validator
from qconvert.validators.reading.adapters import bare, plain_own
from qconvert.validators.reading.pruned import EXPERTS_RULE, ROWS_RULE, Pruned, pruned
from qconvert.validators.reading.quantization_tensors import ACTIVATIONS

Takes = Callable[[str], bool]

_SCALES_OF_INPUTS = rf"[._]({'|'.join(ACTIVATIONS)})"
# Shapes, and what bitsandbytes and msmodelslim note of a matrix.
_NOTED = (
    r"\.weight_shape|\.weight\.quant_state\.bitsandbytes__(nf4|fp4)|\.weight_format"
    r"|\.(quant_bias|scale_bias|input_offset|deq_scale)"
)
_OF_CACHE = "elsewhere: scales of a KV cache, which no runtime reads beside unquantized weights"
# Rules by their whole text: the names that each may take.
_NAMES: Mapping[str, re.Pattern[str]] = {
    "derived: it follows from the scales that stay": re.compile(
        r".*\.(g1_alphas|g2_alphas|g1_scale_c|w13_input_scale_quant|w2_input_scale_quant)$"
    ),
    "elsewhere: what was noted beside expert weights, and is not of the new ones": re.compile(
        rf".*({_NOTED}|{_SCALES_OF_INPUTS})$"
    ),
    "dequant: activation scales and shapes beside quantized weights": re.compile(
        rf".*({_NOTED}|{_SCALES_OF_INPUTS})$"
    ),
    "merge: shapes and activation scales beside weights that are numbers now": re.compile(
        rf".*({_NOTED}|{_SCALES_OF_INPUTS})$"
    ),
    _OF_CACHE: re.compile(r".*\.[kv]_scale$"),
    "fuse: equal to the per-tensor scale kept for all parts": re.compile(
        rf".*(\.weight_scale(_inv|_2)?|\.weight_global_scale|{_SCALES_OF_INPUTS})$"
    ),
    "fuse: the size of packed rows, which is another now": re.compile(r".*\.weight_shape$"),
}
# Rules about a part of the model, which the source tells.
_DRAFT = ("drop: what=mtp", "amx: mtp=drop")
_NOT_DRAFT = "extract_draft: of the model, not of its draft"
_TOWERS = (
    "as_class: qwen3_next has no vision tower",
    "text_only: of a tower, or of what joins one to the text model",
)
_NO_RANK = "elsewhere: of a draft, or a table of positions, which vLLM's class reads in no rank"
_OTHER_RANKS = "elsewhere: routed experts that other ranks hold"
_NOT_EXPERTS = "elsewhere: no routed expert; the runtime reads it from its GPU side"
_REPLACED = "merge: replaced by the adapter's own tensor"
_SHARED = ("elsewhere", "derived")  # beginnings that are no pass's name
_ALSO_OF = {"fuse": "unfuse"}  # a pass that gives its reasons in another's name
_RENAMING = ("as_class", "text_only", "fuse", "unfuse", "stack", "unstack", "prepare")
_MOST = 20


@validator("each rule that left tensors out is about them")
def drop_rules(folder: Folder) -> Iterator[Finding | Skipped]:
    manifest = folder.checkpoint.manifest
    if manifest is None:
        raise NotChecked(f"the folder has no {MANIFEST}")
    unheld: list[str] = []
    for rule, names in manifest["dropped"].items():
        takes = _takes(rule, manifest, folder)
        if takes is None:
            unheld.append(rule)
            continue
        wrong = [name for name in names if isinstance(name, str) and not takes(name)]
        for name in wrong[:_MOST]:
            more = f" ({len(wrong) - 1} more)" if len(wrong) > 1 else ""
            message = f"was dropped by a rule that is not about it: {rule!r}{more}"
            yield Finding("QC099", "error", name, message)
    if unheld:
        why = "give --against SRC" if folder.source is None else "another package's, or renamed"
        yield Skipped(f"what {count(len(unheld), 'rule')} left out ({unheld[0]!r}: {why})")


def _takes(rule: str, manifest: Mapping[str, Any], folder: Folder) -> Takes | None:
    """Tell whether a rule may take a name; None where that cannot be told."""
    source = folder.source
    passes = [step for step in manifest["passes"] if isinstance(step, Mapping)]
    begins = rule.partition(":")[0]
    of_passes = {str(step.get("name")) for step in passes}
    if begins not in _SHARED and of_passes.isdisjoint((begins, _ALSO_OF.get(begins, begins))):
        return _none
    if rule == _OF_CACHE and folder.checkpoint.quantization_configs:
        return _none
    if rule in _NAMES:
        return partial(_fits, _NAMES[rule])
    if rule in (*_DRAFT, _NOT_DRAFT, *_TOWERS, _NOT_EXPERTS, _NO_RANK, _OTHER_RANKS):
        return None if source is None else partial(_is_part, rule, source)
    if rule == _REPLACED:
        return None if not isinstance(source, Adapted) else partial(_is_replaced, source)
    if rule in (EXPERTS_RULE, ROWS_RULE):
        less = None if source is None else pruned(folder.checkpoint, source)
        return None if less is None else partial(_is_left_out, rule, less)
    return _by_pattern(rule, passes) if begins == "drop" else None


def _none(name: str) -> bool:
    return False


def _fits(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.match(name) is not None


def _is_part(rule: str, source: Checkpoint, name: str) -> bool:
    index = source.role_index
    if rule in _DRAFT or rule == _NOT_DRAFT:
        return index.family.is_mtp(name, index.dims) == (rule in _DRAFT)
    if rule == _NO_RANK:
        return index.family.is_mtp(name, index.dims) or name.endswith("rotary_emb.inv_freq")
    if rule == _OTHER_RANKS:
        return index.kind(name).routed
    if rule == _NOT_EXPERTS:
        return not index.kind(name).routed
    place = index.places.get(name)
    if place is None:
        return "visual" in name or "vision" in name
    return place.role.vision


def _is_replaced(source: Adapted, name: str) -> bool:
    """Tell whether an adapter holds a tensor in place of this one."""
    module = split_parameter(bare(name))[0]
    held = (plain_own(own) for each in source.adapters for own in each.tensors)
    return any(split_parameter(own)[0] == module for own in held)


def _is_left_out(rule: str, less: Pruned, name: str) -> bool:
    """Tell whether a tensor is of an expert that goes, or has a part for each expert."""
    if name not in less.source:
        return False
    return less.name(name) is None if rule == EXPERTS_RULE else less.rows(name) is not None


def _by_pattern(rule: str, passes: list[Mapping[str, Any]]) -> Takes | None:
    """Names that the patterns of a recipe's drops match that gave this reason."""
    patterns = []
    for number, step in enumerate(passes):
        if step.get("name") != "drop":
            continue
        asked = step["options"]
        if asked.get("match") is not None and rule == f"drop: {asked.get('why')}":
            if any(before.get("name") in _RENAMING for before in passes[:number]):
                return None  # patterns are of the names at that step
            patterns.append(str(asked["match"]))
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)
