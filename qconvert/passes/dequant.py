"""dequant: every weight in an encoding that is read here becomes BF16; its scales are consumed, every
quantization block goes.

The block size of FP8 comes from the config and is never inferred from shapes: dividing rows by scale
rows is silently wrong for hundreds of ragged row counts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from qconvert.core.dtypes import Shape
from qconvert.core.errors import PlanError
from qconvert.core.graph import Op, Output, apply, stack
from qconvert.core.names import NOTED, activations_of, is_scale, split_parameter
from qconvert.formats.base import Stored
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.fp8.format import fp8_reading, fp8_scale_name, fp8_scheme_of
from qconvert.formats.mx.format import stacks
from qconvert.formats.registry import check_from_source, encoded, unmixed
from qconvert.ops.cast import DequantTo
from qconvert.ops.rowwise import Decoder, FloatDecoder, with_overflow
from qconvert.passes.replace_weights import replace_weights, sources_of, with_experts_in
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import LogEntry, Plan

STALE_RULE = "dequant: activation scales and shapes beside quantized weights"


@dataclass(frozen=True, slots=True)
class Dequant:
    """Dequantize all weights to BF16, F16 or F32.

    Read are FP8 (block, per-channel, per-tensor or MX scales), NVFP4 of either dialect, MXFP4
    (compressed-tensors', DeepSeek-V4's, gpt-oss's), integers of compressed-tensors, GPTQ's and
    AutoAWQ's own forms, types of GGUF files, and formats of other packages. `dtype` is what they
    become; gpt-oss's stacks and other packages' formats become BF16 alone.

    Raises PlanError where there are none, where the config does not say how FP8 is scaled, where a
    weight lacks its scale or a scale its weight, where a grid does not fit, and where a role it touches
    lacks a layer or expert that the config counts. A weight times its scale that is beyond bf16 ends the
    run, unless `allow_overflow`: then it is written as infinite, and counted.
    """

    name: ClassVar[str] = "dequant"

    allow_overflow: bool = False
    dtype: Literal["bf16", "f16", "f32"] = "bf16"

    def __call__(self, plan: Plan) -> Plan:
        check_from_source(plan)
        overflow = self.allow_overflow
        others = {
            names[0]: (f"{module}.weight", stored, names)
            for module, (stored, names) in encoded(plan)
            if stored.decoder is not None
        }
        for name, (stored, names) in unmixed(plan):
            others.setdefault(name, (name, stored, names))
        taken = {name for _, _, names in others.values() for name in names}
        stacked = {names[0]: (stem, names) for stem, names in stacks(plan).items()}
        fp8 = [n for n, o in plan.tensors.items() if n not in taken and _is_fp8_weight(n, o)]
        if not fp8 and not others and not stacked:
            raise PlanError(_why_none(plan))
        scales = {name: fp8_scale_name(plan, name) for name in fp8}
        consumed = {*scales.values(), *taken, *(n for _, names in stacked.values() for n in names)}
        weights = {weight for weight, _, _ in others.values()}
        stale = set(_stale(plan, {*fp8, *weights, *(stem for stem, _ in stacked.values())}))
        for _, stored, names in others.values():
            stale |= set(names[len(stored.args) :])
            stale -= set(names[: len(stored.args)])
        tensors: dict[str, Output] = {}
        made = []
        for name, output in plan.tensors.items():
            weight = name
            if name in others:
                weight, stored, _ = others[name]
                tensors[weight] = self._decoded(weight, stored, output.type.shape)
            elif name in scales:
                tensors[name] = self._dequantized(name, scales[name], plan)
            elif name in stacked:
                weight, names = stacked[name]
                if self.dtype != "bf16":
                    raise PlanError(f"{name!r}: gpt-oss's stacks are decoded to bf16 only")
                tensors[weight] = _unstacked(plan, *names, overflow=overflow)
            else:
                if name not in consumed and name not in stale:
                    tensors[name] = output
                continue
            made.append(weight)
        decoded = replace(plan, tensors=tensors)
        dropped = sources_of(plan, sorted(stale), STALE_RULE)
        entry = _counted(LogEntry(self.name, options_of(self), len(made), None), decoded, made)
        done = replace_weights(plan, entry, tensors, dropped=dropped)
        done = replace(done, config=with_experts_in(done.config, "bf16"))
        return done.sorted_as(decoded)

    def _decoded(self, name: str, stored: Stored, shape: Shape) -> Output:
        """The matrix in the dtype, or the stack whose codes have this shape."""
        assert stored.decoder is not None
        return stored.as_stored(apply(self._op(name, stored.decoder), *stored.args)[0], shape)

    def _op(self, name: str, decoder: Decoder) -> Op:
        if self.allow_overflow:
            decoder = with_overflow(decoder)
        if self.dtype == "bf16":
            return decoder
        if not isinstance(decoder, FloatDecoder):
            raise PlanError(f"{name!r}: its format is decoded to bf16 only")
        return DequantTo(decoder, "F16" if self.dtype == "f16" else "F32")

    def _dequantized(self, name: str, scale_name: str, plan: Plan) -> Output:
        weight, scale = plan.tensors[name], plan.tensors[scale_name]
        scheme = fp8_scheme_of(plan, scale_name)
        if len(weight.type.shape) < 2 or not weight.type.numel:
            raise PlanError(
                f"FP8 weight {name!r}: expected a matrix or a stack, found {weight.type}"
            )
        try:
            op, *args = fp8_reading(weight, scale, scheme)
            return apply(self._op(name, op), *args)[0].reshape(weight.type.shape)
        except PlanError as error:
            raise PlanError(f"weight {name!r} with scale {scale_name!r}: {error}") from error


def _stale(plan: Plan, weights: Collection[str]) -> list[str]:
    """Shapes, and what is known of activations, of these weights, or left by another conversion beside
    weights in floats. Models have parameters of such names that belong to no weight, or to one that was
    never quantized in this way."""
    shape, found, ends = "weight_shape", list[tuple[str, str, str]](), set[str]()
    for name in plan.tensors:
        module, parameter = split_parameter(name)
        is_read = parameter == shape or parameter in NOTED
        of = (module, parameter) if is_read else activations_of(name)
        if of is not None:
            stem, end = of
            found.append((name, stem, end))
            if stem in weights or f"{stem}.weight" in weights:
                ends.add(end)
    return [
        name for name, stem, end in found
        if stem in weights or f"{stem}.weight" in weights
        or (end in (*ends, shape) and f"{stem}.weight" in plan.tensors)
    ]  # fmt: skip


def _is_fp8_weight(name: str, output: Output) -> bool:
    return output.type.dtype in WEIGHT_DTYPES and not is_scale(name)


def _unstacked(plan: Plan, codes: str, scales: str, *, overflow: bool) -> Output:
    """gpt-oss's stack in BF16, [E, K, N]: each matrix transposed, as the model's class has it."""
    from qconvert.formats.mx.decode import DequantMxfp4Columns

    made = []
    experts, rows, blocks, size = plan.tensors[codes].type.shape
    for expert in range(experts):
        packed = plan.tensors[codes].index(expert).reshape((rows, blocks * size))
        exponents = plan.tensors[scales].index(expert)
        made.append(apply(DequantMxfp4Columns(overflow), packed, exponents)[0])
    return stack(made)


def _counted(entry: LogEntry, plan: Plan, weights: list[str]) -> LogEntry:
    """The entry with how many weights the config counts, unless the family cannot. Every layer and
    expert of every role with a dequantized weight must exist."""
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
        return entry
    made = set(weights)
    unquantized = {
        name
        for name, place in found.places.items()
        if (place.role.name, place.parameter) in touched and name not in made
    }
    unplaced = [name for name in weights if name not in found.places]
    counts = sum(len(found.expected(role)) for role in touched.values())
    counted = replace(entry, expected=counts - len(unquantized) + len(unplaced))
    if counted.matched == counted.expected:
        return counted
    names = [
        name
        for (_, parameter), role in touched.items()
        for name in found.names(role, parameter, found.expected(role))
    ]
    return counted.against(weights, [*(n for n in names if n not in unquantized), *unplaced])


def _why_none(plan: Plan) -> str:
    """The cause of there being no weight to dequantize: nothing is quantized, or in another format."""
    dtypes = {output.type.dtype for output in plan.tensors.values()}
    packed = sorted(dtypes & {"U8", "I8", "I32"})
    if packed:
        return (
            f"no quantized weight found that is read here, and tensors in {', '.join(packed)}: start "
            "from the FP8 or BF16 release"
        )
    return (
        f"no quantized weight found: all tensors are {', '.join(sorted(dtypes))}, so there is "
        "nothing to dequantize"
    )


PASSES = (Dequant,)
