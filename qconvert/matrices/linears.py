"""The matrices that runtimes build as linear layers, beside the routed experts: which exist, which
of them can be quantized, and which must be quantized together.

What runtimes do was read in sglang 0.5.23 and vLLM 0.33.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output
from qconvert.core.names import split_parameter
from qconvert.core.patterns import compiled
from qconvert.core.roles import Kind, joined_with
from qconvert.ops.fp8 import WEIGHT_DTYPES
from qconvert.plan.plan import Plan

# Matrices that no runtime asks a quantization config about.
_NEVER_ASKED = (Kind.EMBEDDING, Kind.HEAD, Kind.ROUTER, Kind.DRAFT_JOIN)


def runtime_linears(plan: Plan, others: Mapping[str, Output]) -> dict[str, bool]:
    """Modules among `others` of which a config may have to say that they are not quantized, and whether
    they are FP8. Names that no role fits are among them: an extra name does no harm here."""
    found = {}
    for name, output in others.items():
        module, parameter = split_parameter(name)
        if parameter != "weight" or len(output.type.shape) != 2:
            continue
        if plan.role_index.kind(name) in _NEVER_ASKED:
            continue
        found[module] = output.type.dtype in WEIGHT_DTYPES
    return found


def quantizable(plan: Plan, taken: Iterable[str]) -> Iterator[tuple[str, Kind]]:
    """Modules of linears that runtimes are known to load quantized, and their kinds, except those of the
    tensors `taken` (experts). A name that no role fits is not among them. Nor are draft layers: a draft
    that is wrong more often costs more than its bytes; nor Qwen3-Next's fused GDN inputs: sglang 0.5.23
    (`models/qwen3_next.py`, `_make_packed_weight_loader`) asks them for a `weight`."""
    known, dims = set(taken), plan.role_index.dims
    for name, output in plan.tensors.items():
        module, parameter = split_parameter(name)
        if name in known or parameter not in ("weight", "weight_packed", "qweight"):
            continue
        kind = plan.role_index.kind(name)
        if not kind.quantizable or len(output.type.shape) != 2 or plan.family.is_mtp(name, dims):
            continue
        if kind is Kind.GDN_QKVZ and plan.family.name == "qwen3_next":
            continue
        yield module, kind


def matches(module: str, patterns: Iterable[str]) -> str | None:
    """The first that fits of patterns as compressed-tensors and runtimes match them: a whole name, the
    end of one, `re:` and a pattern that is matched from the beginning, or `Linear`, the class of all.
    Raises PlanError for an invalid pattern."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                fits = compiled(pattern[3:]).match(module) is not None
            except re.error as error:
                raise PlanError(f"{pattern!r} is no regular expression: {error}") from error
        else:
            fits = pattern in ("Linear", module) or module.endswith(f".{pattern}")
        if fits:
            return pattern
    return None


def check_sets(chosen: Mapping[str, Kind], left: Mapping[str, Kind]) -> None:
    """Runtimes fuse q, k and v, or gate and up, to one layer with one scheme. Raises PlanError where one
    is quantized and another is left."""
    others = {(module.rpartition(".")[0], kind): module for module, kind in left.items()}
    for module, kind in chosen.items():
        parent = module.rpartition(".")[0]
        for member in joined_with(kind):
            if (parent, member) in others:
                raise PlanError(
                    f"{module!r} is to be quantized and {others[parent, member]} is not; runtimes "
                    "make one layer of them: target or ignore both"
                )
