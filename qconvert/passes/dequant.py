"""dequant: every FP8 weight becomes BF16, its scales are consumed, every quantization block goes.

The block size comes from the config and is never inferred from shapes: dividing rows by scale rows
is silently wrong for hundreds of ragged row counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from qconvert.checkpoint.checkpoint import without_quantization
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply
from qconvert.core.names import weight_candidates
from qconvert.matrices.stored import fp8_reading, fp8_scale_name, fp8_scheme_of
from qconvert.ops.fp8 import WEIGHT_DTYPES
from qconvert.plan.plan import LogEntry, Plan

SPENT_RULE = "dequant: activation and KV-cache scales of an FP8 model"
_SPENT = (".input_scale", ".k_scale", ".v_scale", ".q_scale")


@dataclass(frozen=True, slots=True)
class Dequant:
    """FP8 weights (block, per-channel or per-tensor scales) to BF16.

    Raises PlanError where nothing is FP8, where the config does not say how, where a weight lacks
    its scale or a scale its weight, where a grid does not fit, and where a role it touches lacks a
    layer or expert that the config counts. A weight times its scale that is beyond bf16 ends the run,
    unless `allow_overflow`: then it is written as infinite, and counted.
    """

    name: ClassVar[str] = "dequant"
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    allow_overflow: bool = False

    def __repr__(self) -> str:
        """As it was before there was an option, where that is not given: manifests keep it."""
        return f"Dequant({'allow_overflow=True' if self.allow_overflow else ''})"

    def __call__(self, plan: Plan) -> Plan:
        weights = [name for name in plan.tensors if _is_fp8_weight(name, plan.tensors[name])]
        if not weights:
            raise PlanError(_why_none(plan))
        expected = _require_complete(plan, weights)
        tensors: dict[str, Output] = {}
        scales = {name: fp8_scale_name(plan, name) for name in weights}
        consumed = set(scales.values())
        dropped = dict(plan.dropped)
        for name, output in plan.tensors.items():
            if name in scales:
                tensors[name] = _dequantized(name, scales[name], plan, overflow=self.allow_overflow)
            elif name.endswith(_SPENT):
                for piece in output.pieces:
                    dropped[piece.origin.name] = SPENT_RULE  # type: ignore[union-attr]
            elif name not in consumed:
                tensors[name] = output
        files = dict.fromkeys(_STALE, "dequant: its quantization block no longer holds")
        present = {name: why for name, why in files.items() if name in plan.side_files}
        return plan.logged(
            LogEntry(self.name, repr(self), len(weights), expected),
            tensors=tensors,
            config=without_quantization(plan.config),
            side_files=tuple(name for name in plan.side_files if name not in present),
            dropped=dropped,
            dropped_files={**plan.dropped_files, **present},
        )


_STALE = ("hf_quant_config.json",)


def _is_fp8_weight(name: str, output: Output) -> bool:
    return output.type.dtype in WEIGHT_DTYPES and not weight_candidates(name)


def _dequantized(name: str, scale_name: str, plan: Plan, *, overflow: bool) -> Output:
    weight, scale = plan.tensors[name], plan.tensors[scale_name]
    scheme = fp8_scheme_of(plan, scale_name)
    if len(weight.type.shape) < 2 or not weight.type.numel:
        raise PlanError(f"FP8 weight {name!r}: expected a matrix or a stack, found {weight.type}")
    try:
        op, *args = fp8_reading(weight, scale, scheme)
        return apply(replace(op, overflow=overflow), *args)[0].reshape(weight.type.shape)
    except PlanError as error:
        raise PlanError(f"weight {name!r} with scale {scale_name!r}: {error}") from error


def _require_complete(plan: Plan, weights: list[str]) -> int | None:
    """Every layer and expert of every role this pass touches must be there. Returns how many
    weights that makes, None for a family that cannot count."""
    found = plan.census
    touched = {}
    for name in weights:
        place = found.places.get(name)
        if place is not None:
            touched[place.role.name, place.parameter] = place.role
    for (_, parameter), role in touched.items():
        missing = found.missing(role, parameter)
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise PlanError(
                f"{missing[0]!r}{more} is missing: the config counts {found.dims.num_layers} "
                f"layers and {found.dims.num_experts} experts, and {role.name!r} has fewer"
            )
    if plan.checkpoint.family.name == "generic":
        return None
    fp8 = set(weights)
    unquantized = sum(
        1
        for name, place in found.places.items()
        if (place.role.name, place.parameter) in touched and name not in fp8
    )
    unplaced = sum(name not in found.places for name in weights)
    return sum(len(found.expected(role)) for role in touched.values()) - unquantized + unplaced


def _why_none(plan: Plan) -> str:
    """The cause of there being no FP8 weight: nothing is quantized, or something else is."""
    dtypes = {output.type.dtype for output in plan.tensors.values()}
    packed = sorted(dtypes & {"U8", "I8", "I32"})
    if packed:
        return (
            f"no FP8 weight found: its quantized weights are packed in {', '.join(packed)}, which this "
            "pass does not read; start from the FP8 or BF16 release"
        )
    return (
        f"no FP8 weight found: all is {', '.join(sorted(dtypes))}, so nothing is to be dequantized"
    )


PASSES = (Dequant,)
