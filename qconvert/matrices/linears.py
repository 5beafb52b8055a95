"""The matrices that runtimes build as linear layers, beside the routed experts: which there are, which
of them can be quantized to integers, which must be so together, and how tensor parallelism cuts them.

What runtimes do was read in sglang 0.5.23 and vLLM 0.33.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from qconvert.checkpoint.family import Place
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output
from qconvert.core.int_scheme import IntScheme
from qconvert.core.names import split_parameter
from qconvert.ops.fp8 import WEIGHT_DTYPES
from qconvert.plan.plan import Plan

TP_SIZES = (1, 2, 4, 8, 16)
_GROUPS = (128, 32)  # what all kernels take (sglang's Triton WNA16 no other)

# Matrices that runtimes do not build as linear layers, so no quantization config is asked of them:
# embeddings and heads, the router, the draft layers' projection of two hidden states.
_NO_LINEARS = ("embed_tokens", "lm_head", "router", "eh_proj", "fc", "shared_head.head")
# Linear layers that are read in the dtype they have, or are too small for a kernel: the gate of a shared
# expert is one row; gates of linear attention are a row a head; kv_b_proj is taken apart after
# loading, and q_a_proj with kv_a_proj_with_mqa joined to one before it.
_AS_THEY_ARE = (
    "shared_expert_gate", "gdn.in_proj_ba", "gdn.in_proj_b", "gdn.in_proj_a", "attn.kv_b_proj",
    "attn.q_a_proj", "attn.kv_a_proj_with_mqa",
)  # fmt: skip
_APART = ("vision.", "indexer.")
# Linears whose columns, not rows, are dealt out to the ranks.
_BY_COLUMNS = ("down_proj", "o_proj", "out_proj")
# A scale a row is on every rank; what a rank has of a row fits kernels in multiples of this.
_CHANNEL_STEP = 64


@dataclass(frozen=True, slots=True)
class Matrix:
    """A quantized matrix [rows, columns] by its module's name."""

    module: str
    rows: int
    columns: int


def runtime_linears(plan: Plan, others: Mapping[str, Output]) -> dict[str, bool]:
    """Modules among `others` that runtimes build as linear layers, and whether they are FP8."""
    found = {}
    for name, output in others.items():
        module, parameter = split_parameter(name)
        if parameter != "weight" or len(output.type.shape) != 2:
            continue
        if _role(plan.census.places.get(name)) in _NO_LINEARS:
            continue
        found[module] = output.type.dtype in WEIGHT_DTYPES
    return found


def quantizable(plan: Plan, taken: Iterable[str]) -> Iterator[str]:
    """Modules of linears that can be quantized, but for those of the tensors `taken` (experts). Draft
    layers' are left: a draft that is wrong more often costs more than its bytes."""
    spent, dims = set(taken), plan.census.dims
    for name, output in plan.tensors.items():
        module, parameter = split_parameter(name)
        if name in spent or parameter not in ("weight", "weight_packed", "qweight"):
            continue
        place = plan.census.places.get(name)
        if place is None:  # of no known role: nobody says that it is a linear layer
            continue
        role = _role(place)
        if len(output.type.shape) != 2 or role in _NO_LINEARS or role in _AS_THEY_ARE:
            continue
        if role.startswith(_APART) or plan.family.is_mtp(name, dims):
            continue
        yield module


def _role(place: Place | None) -> str:
    return "" if place is None else place.role.name.removeprefix("mtp.")


def matches(module: str, patterns: Iterable[str]) -> str | None:
    """The first that fits of patterns as compressed-tensors and runtimes have them: a whole name, the
    end of one, `re:` and a pattern that is matched from the beginning, or `Linear`, the class of all.
    Raises PlanError for a pattern that is none."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                fits = re.match(pattern[3:], module) is not None
            except re.error as error:
                raise PlanError(f"{pattern!r} is no regular expression: {error}") from error
        else:
            fits = pattern in ("Linear", module) or module.endswith(f".{pattern}")
        if fits:
            return pattern
    return None


def check_sets(plan: Plan, chosen: Iterable[str], left: Iterable[str]) -> None:
    """Runtimes fuse q, k and v, or gate and up, to one layer with one scheme. Raises PlanError where one
    is quantized and another is left."""
    quantized, others = set(chosen), set(left)
    for module in quantized:
        parent, _, last = module.rpartition(".")
        for members in plan.family.shared_scale:
            if last not in members:
                continue
            for member in members:
                if f"{parent}.{member}" in others:
                    raise PlanError(
                        f"{module!r} is to be quantized and {parent}.{member} is not; runtimes make "
                        "one layer of them: target or ignore both"
                    )


def loads_at(matrices: Iterable[Matrix], scheme: IntScheme, tp: int, words: bool = False) -> bool:
    """Whether each of `tp` ranks gets whole groups of every matrix, and whole words of zero points where
    the format packs those along rows: `words`, or asymmetric."""
    for matrix in matrices:
        if matrix.module.rpartition(".")[2] in _BY_COLUMNS:
            step = _CHANNEL_STEP if scheme.group is None else scheme.group
            if tp > 1 and matrix.columns % (tp * step):
                return False
            continue
        step = scheme.word if tp > 1 and (words or not scheme.symmetric) else 1
        if matrix.rows % (tp * step):
            return False
    return True


def fitting_groups(
    matrices: Iterable[Matrix], scheme: IntScheme, tp: int, words: bool = False
) -> list[int]:
    """Group sizes that hold every matrix whole and load at `tp`, largest first."""
    known = list(matrices)
    return [
        group
        for group in _GROUPS
        if all(matrix.columns % group == 0 for matrix in known)
        and loads_at(known, replace(scheme, group=group), tp, words)
    ]
