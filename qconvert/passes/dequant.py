"""dequant: every FP8 and NVFP4 weight becomes BF16, and every one in a format that another package
adds; its scales are consumed, every quantization block goes.

The block size of FP8 comes from the config and is never inferred from shapes: dividing rows by scale
rows is silently wrong for hundreds of ragged row counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply
from qconvert.core.names import weight_candidates
from qconvert.formats.nvfp4.config import NAMES
from qconvert.formats.nvfp4.decode import nvfp4_matrices
from qconvert.matrices.stored import fp8_reading, fp8_scale_name, fp8_scheme_of, read_added
from qconvert.ops.fp8 import WEIGHT_DTYPES
from qconvert.passes.replace_weights import replace_weights, sources_of
from qconvert.plan.plan import LogEntry, Plan

STALE_RULE = "dequant: activation and KV-cache scales of an FP8 model"
_STALE = (".input_scale", ".k_scale", ".v_scale", ".q_scale")
NVFP4_RULE = "dequant: activation scales of NVFP4 weights"
_INPUTS = tuple(names.input for names in NAMES.values())


@dataclass(frozen=True, slots=True)
class Dequant:
    """FP8 weights (block, per-channel or per-tensor scales) and NVFP4 weights of either dialect to BF16.

    Raises PlanError where there are none, where the config does not say how FP8 is scaled, where a
    weight lacks its scale or a scale its weight, where a grid does not fit, and where a role it touches
    lacks a layer or expert that the config counts. A weight times its scale that is beyond bf16 ends the
    run, unless `allow_overflow`: then it is written as infinite, and counted.
    """

    name: ClassVar[str] = "dequant"
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    allow_overflow: bool = False

    def __repr__(self) -> str:
        """As it was before there was an option, where that is not given: manifests keep it."""
        return f"Dequant({'allow_overflow=True' if self.allow_overflow else ''})"

    def __call__(self, plan: Plan) -> Plan:
        overflow = self.allow_overflow
        fp8 = [name for name in plan.tensors if _is_fp8_weight(name, plan.tensors[name])]
        nvfp4 = {matrix.weight: matrix for matrix in nvfp4_matrices(plan)}
        added = {m: found for m, found in read_added(plan).items() if found[0].decoder is not None}
        fp8 = [name for name in fp8 if not any(name in names for _, names in added.values())]
        if not fp8 and not nvfp4 and not added:
            raise PlanError(_why_none(plan))
        scales = {name: fp8_scale_name(plan, name) for name in fp8}
        consumed = {*scales.values(), *(name for m in nvfp4.values() for name in m.scales)}
        first = {names[0]: module for module, (_, names) in added.items()}
        consumed |= {name for _, names in added.values() for name in names}
        stale = {name: STALE_RULE for name in plan.tensors if name.endswith(_STALE)}
        inputs = (f"{m.module}.{suffix}" for m in nvfp4.values() for suffix in _INPUTS)
        stale |= {name: NVFP4_RULE for name in inputs if name in plan.tensors}
        tensors: dict[str, Output] = {}
        made = []
        for name, output in plan.tensors.items():
            if name in first:
                stored, _ = added[first[name]]
                assert stored.decoder is not None
                weight = f"{first[name]}.weight"
                tensors[weight] = apply(stored.decoder, *stored.args)[0]
                made.append(weight)
            elif name in scales:
                tensors[name] = _dequantized(name, scales[name], plan, overflow=overflow)
                made.append(name)
            elif name in nvfp4:
                weight = f"{nvfp4[name].module}.weight"
                tensors[weight] = nvfp4[name].decoded(plan, overflow=overflow)
                made.append(weight)
            elif name not in consumed and name not in stale:
                tensors[name] = output
        expected = _require_complete(replace(plan, tensors=tensors), made)
        dropped: dict[str, str] = {}
        for name, rule in stale.items():
            dropped |= sources_of(plan, (name,), rule)
        entry = LogEntry(self.name, repr(self), len(made), expected)
        return replace_weights(plan, entry, tensors, dropped=dropped)


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
    """Every layer and expert of every role with a dequantized weight must exist. Returns how many
    weights that makes, None for a family that cannot count."""
    found = plan.role_index
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
    made = set(weights)
    unquantized = sum(
        1
        for name, place in found.places.items()
        if (place.role.name, place.parameter) in touched and name not in made
    )
    unplaced = sum(name not in found.places for name in weights)
    return sum(len(found.expected(role)) for role in touched.values()) - unquantized + unplaced


def _why_none(plan: Plan) -> str:
    """The cause of there being no weight to dequantize: nothing is quantized, or in another format."""
    dtypes = {output.type.dtype for output in plan.tensors.values()}
    packed = sorted(dtypes & {"U8", "I8", "I32"})
    if packed:
        return (
            f"no FP8 or NVFP4 weight found: quantized weights are packed in {', '.join(packed)}, which "
            "this pass does not read; start from the FP8 or BF16 release"
        )
    return (
        f"no FP8 or NVFP4 weight found: all tensors are {', '.join(sorted(dtypes))}, so there is "
        "nothing to dequantize"
    )


PASSES = (Dequant,)
