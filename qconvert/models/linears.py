"""The matrices that runtimes build as linear layers, beside the routed experts: which exist, which
of them can be quantized, and which must be quantized together.

What runtimes do was read in sglang and vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, Source
from qconvert.core.int_scheme import CodePacker
from qconvert.core.names import parse, split_parameter
from qconvert.core.patterns import compiled
from qconvert.core.roles import Kind, joined_with
from qconvert.core.shown import count
from qconvert.core.versions import SGLANG, VLLM
from qconvert.formats.base import Stored
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.registry import code_parameters
from qconvert.models.calibrated import Calibrated
from qconvert.models.experts import of_checkpoint, solved_by
from qconvert.ops.cast import FLOAT_DTYPES
from qconvert.plan.plan import Plan

# --- Linear layers beside the routed experts, whose codes a calibration finds ---------------------


def calibrated_linear(
    plan: Plan,
    module: str,
    weight: Stored,
    names: Iterable[str],
    packers: tuple[CodePacker, ...],
    digest: str,
) -> tuple[tuple[Output, ...], ...]:
    """A linear's matrix whose codes a calibration finds: the results of each packer. `names` are the
    tensors of the plan that it is read from.

    Raises PlanError where the matrix is of no size that a packer takes, is in no decoder layer, or is
    not one of the checkpoint, from which a calibration reads the model."""
    weight = of_checkpoint(module, weight)
    places = plan.role_index.places
    layers = {places[name].layer for name in names if name in places}
    layer = layers.pop() if len(layers) == 1 else None
    if layer is None:
        raise PlanError(
            f"{module} is in no decoder layer, and a calibration runs these one after the other: "
            "ignore it"
        )
    op = Calibrated(weight.decoder, packers, layer, None, _stored_as(module, weight), digest)
    return solved_by(op, module, weight)


def _stored_as(module: str, weight: Stored) -> str:
    """The module that a matrix is in the checkpoint, which an earlier pass may have renamed."""
    pieces = [piece for arg in weight.args for piece in arg.pieces]
    sources = [piece.origin for piece in pieces if isinstance(piece.origin, Source)]
    whole = all(
        piece.start == 0 and piece.stop == source.type.nbytes
        for piece, source in zip(pieces, sources, strict=True)
    )
    found = {split_parameter(source.name)[0] for source in sources}
    if whole and len(found) == 1 and len(pieces) == len(weight.args):
        return found.pop()
    raise PlanError(
        f"{module} is cut or joined by an earlier pass from {', '.join(sorted(found))}, and a "
        "calibration solves matrices as the checkpoint has them: make that pass a conversion of its "
        "own, or ignore this module"
    )


# --- Why a linear that a target names stays as it is ----------------------------------------------


_FUSED_INPUT = (
    f"{SGLANG} joins q_a_proj and kv_a_proj_with_mqa while it loads them, their weight_shape too, "
    "which then has four numbers"
)
_ROW_A_HEAD = "it has one row a head, which is too few for a kernel"
_WHY = {
    Kind.QUERY_DOWN: _FUSED_INPUT,
    Kind.KV_DOWN: _FUSED_INPUT,
    Kind.KV_UP: f"{SGLANG} takes its `weight` apart once it is loaded, and a packed one has none",
    Kind.OUTPUT_DOWN: f"{SGLANG} and {VLLM} read its `weight` themselves, in BF16 or in FP8 by blocks",
    Kind.GDN_QKVZ: f"{SGLANG} asks Qwen3-Next's fused inputs of linear attention for a `weight`",
    **dict.fromkeys((Kind.GDN_BA, Kind.GDN_B, Kind.GDN_A, Kind.INDEXER_WEIGHTS), _ROW_A_HEAD),
    Kind.VISION: f"it is of a vision tower, which {SGLANG} builds unquantized (quant_config=None in "
    "models/qwen3_vl.py)",
}
WhyOther = Callable[[str], str]
_UNSEEN = "; nor could it be calibrated, because samples hold no images: nothing goes through it"


def skip_reason(
    plan: Plan,
    target: str,
    why_other: WhyOther,
    *,
    calibrated: bool,
    kept: Container[Kind] = (),
) -> str | None:
    """Why no linear that a target matches is quantized, with the first of them; None where it matches
    none. `why_other`: why one of no known purpose is not; `kept` are shared experts where they shall be
    kept. Raises PlanError for an invalid pattern."""
    dims = plan.role_index.dims
    for name, output in plan.tensors.items():
        module, parameter = split_parameter(name)
        if parameter != "weight" or len(output.type.shape) != 2 or not matches(module, (target,)):
            continue
        kind = plan.role_index.kind(name)
        if kind.never_quantized:
            return f"{module}: no runtime loads such a matrix quantized"
        if kind in kept and not plan.family.is_mtp(name, dims):
            return f"{module}: shared_experts says keep"
        why = _why(plan, name, kind, why_other)
        return f"{module}: {why}{_UNSEEN if calibrated and kind is Kind.VISION else ''}"
    return None


def unquantizable(
    plan: Plan, known: Container[str], ignore: Iterable[str], why_other: WhyOther
) -> list[str]:
    """Notes on the unquantized linears that no target takes, one a reason, with the names of their roles
    or their own; `known` are modules and tensors that are taken, or left for a reason that is said, and
    none that a pattern of `ignore` matches is named."""
    found: dict[str, dict[str, int]] = {}
    for name, output in plan.tensors.items():
        module, parameter = split_parameter(name)
        kind = plan.role_index.kind(name)
        if parameter != "weight" or len(output.type.shape) != 2 or name in known or module in known:
            continue
        if output.type.dtype not in FLOAT_DTYPES or kind.never_quantized or kind.routed:
            continue
        if matches(module, ignore):
            continue
        place = plan.role_index.places.get(name)
        role = place.role.module if place is not None else parse(module).template
        modules = found.setdefault(_why(plan, name, kind, why_other), {})
        modules[role] = modules.get(role, 0) + 1
    return [
        f"{count(sum(roles.values()), 'linear')} left as they are ({', '.join(roles)}), each since {why}"
        for why, roles in found.items()
    ]


def _why(plan: Plan, name: str, kind: Kind, why_other: WhyOther) -> str:
    """Why a linear's weight stays that a target names."""
    if plan.family.is_mtp(name, plan.role_index.dims):
        return "a draft layer's linears stay, as codes cost it more guesses than bytes"
    return _WHY.get(kind) or why_other(split_parameter(name)[0])


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
    that is wrong more often costs more than its bytes; nor Qwen3-Next's fused GDN inputs: sglang
    (`models/qwen3_next.py`, `_make_packed_weight_loader`) asks them for a `weight`."""
    known, dims = set(taken), plan.role_index.dims
    for name, output in plan.tensors.items():
        module, parameter = split_parameter(name)
        if name in known or parameter not in code_parameters():
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


def linears_and_routers(plan: Plan, others: Mapping[str, Output]) -> list[str]:
    """The same for AutoAWQ's list: transformers and some classes of vLLM ask about routers, too."""
    routers = (
        split_parameter(name)[0]
        for name, output in others.items()
        if plan.role_index.kind(name) is Kind.ROUTER and len(output.type.shape) == 2
    )
    return [*runtime_linears(plan, others), *routers]
