"""Matrices quantized anew in the scheme that they are stored in, with their scales found anew: by the
passes that write each format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qconvert.checkpoint.integer_config import gptq_form
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output
from qconvert.core.names import split_parameter
from qconvert.core.roles import joined_with
from qconvert.formats.ascend.format import DequantAscend
from qconvert.formats.base import Stored
from qconvert.formats.fp8.decode import DequantFp8
from qconvert.formats.fp8.format import fp8_scheme_of
from qconvert.formats.int_packed.awq import DequantAwq
from qconvert.formats.int_packed.decode import DequantInt8, DequantInts
from qconvert.formats.int_packed.gptq import DequantGptq
from qconvert.formats.mx.decode import BLOCK, DequantMxfp4
from qconvert.formats.nvfp4.decode import DequantNvfp4
from qconvert.formats.registry import code_parameters, read_matrix
from qconvert.ops.cast import FLOAT_DTYPES
from qconvert.passes.fp8 import ToFp8
from qconvert.passes.input_scales import NO_INPUTS
from qconvert.passes.nvfp4 import ToNvfp4
from qconvert.passes.quantize import Quantizing, ToInt8, ToMx
from qconvert.passes.selection import Linear, Selection
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Plan

_INSTEAD = "--requantize bf16 writes the whole model in BF16"


def step_of(plan: Plan, module: str, stored: Stored, names: tuple[str, ...]) -> Quantizing:
    """The pass that writes a matrix as it is stored. Raises PlanError where none does."""
    op, ends = stored.decoder, {name.rpartition(".")[2].rpartition("_proj_")[2] for name in names}
    made: Quantizing | None = None
    try:
        if isinstance(op, DequantFp8):
            made = _fp8(plan, op, stored, names[1], ends)
        elif isinstance(op, DequantInts) and not op.g_idx and op.bits in (4, 8):
            made = ExpertsToW4A16(
                op.group, 4 if op.bits == 4 else 8, op.symmetric,
                scales="search" if op.bits == 4 else "amax",
            )  # fmt: skip
        elif isinstance(op, DequantGptq) and op.bits in (4, 8):
            scheme = gptq_form(plan.checkpoint, module).scheme
            if scheme.actorder is None:
                made = ExpertsToW4A16(
                    op.group, 4 if op.bits == 4 else 8, scheme.symmetric,
                    packing="gptq" if op.version == 1 else "gptq-v2",
                    scales="search" if op.bits == 4 else "amax",
                )  # fmt: skip
        elif isinstance(op, DequantAwq) and len(stored.args) == 3:
            made = ExpertsToW4A16(op.group, 4, symmetric=False, packing="awq", scales="search")
        elif isinstance(op, DequantInt8) and stored.args[1].type.shape[-1] == 1:
            made = ToInt8()
        elif isinstance(op, DequantNvfp4):
            made = ToNvfp4(op.dialect, scales="search")
        elif isinstance(op, DequantMxfp4):
            made = ToMx("mxfp4", dialect="quark" if "weight" in ends else "compressed-tensors")
        elif isinstance(op, DequantAscend):
            made = ToInt8(dialect="msmodelslim")
    except PlanError as error:
        raise PlanError(f"{module}: {error}; {_INSTEAD}") from error
    if made is None:
        raise PlanError(f"{module}: is not written here in the form it is stored in; {_INSTEAD}")
    return made


def _fp8(
    plan: Plan, op: DequantFp8, stored: Stored, name: str, ends: set[str]
) -> Quantizing | None:
    """The pass for FP8 under the scale of this name."""
    scale = stored.args[1].type
    own = bool({"weight_scale_inv", "scale_inv"} & ends)
    if op.block == (1, BLOCK) and scale.dtype == "U8":
        return ToMx("mxfp8")
    # A matrix no larger than a block has one scale, too.
    if scale.numel == 1 and fp8_scheme_of(plan, name).block is None:
        return ToFp8("fp8" if scale.dtype == "F32" else "compressed-tensors", tensor=True)
    if op.block[0] == 1 and op.block[1] >= stored.columns:
        return ToFp8("compressed-tensors", block=None)
    if op.block[0] != op.block[1]:
        return None
    formats = [config.block.get("scale_fmt") for config in plan.checkpoint.quantization_configs]
    exponents = own and "ue8m0" in formats
    return ToFp8("fp8" if own else "compressed-tensors", op.block[0], exponents=exponents)


def encoded_anew(
    plan: Plan, merged: Mapping[str, Stored]
) -> Iterator[tuple[str, dict[str, Output]]]:
    """Each module and its new tensors by name: the merged ones, and those that share a scale with one.
    Raises PlanError where a tensor would be of another type than the plan's."""
    steps: dict[Quantizing, dict[str, Linear]] = {}
    for module, stored in merged.items():
        before, names = read_matrix(plan, module)
        step = step_of(plan, module, before, names)
        kind = plan.role_index.kind(names[0])
        chosen = steps.setdefault(step, {})
        chosen[module] = Linear(kind, stored, names)
        shared = isinstance(step, ToNvfp4) or (isinstance(step, ToFp8) and step.tensor)
        for mate in _mates(plan, module) if shared else ():
            other, beside = read_matrix(plan, mate)
            if mate not in merged and type(other.decoder) is type(before.decoder):
                chosen.setdefault(mate, Linear(plan.role_index.kind(beside[0]), other, beside))
    for step, linears in steps.items():
        made = step.encoded(plan, Selection(None, linears), NO_INPUTS, None)
        for module in linears:
            ends = {name: one for name, one in made.items() if split_parameter(name)[0] == module}
            kept = read_matrix(plan, module)
            used = kept[1][: len(kept[0].args)]
            new = {name: _alike(plan, name, ends, module) for name in used}
            yield module, new


def _mates(plan: Plan, module: str) -> Iterator[str]:
    """Modules that runtimes compute as one with this one."""
    at = module.rpartition(".")[0]
    codes = code_parameters()
    kinds = {plan.role_index.kind(f"{module}.{code}") for code in codes}
    joined = {kind for one in kinds for kind in joined_with(one) if len(joined_with(one)) > 1}
    for name in plan.tensors:
        other, last = split_parameter(name)
        beside = last in codes and other != module and other.rpartition(".")[0] == at
        if beside and plan.role_index.kind(name) in joined:
            yield other


def _alike(plan: Plan, name: str, made: Mapping[str, Output], module: str) -> Output:
    """The new tensor of that name, in the old one's shape. Scales may be of another float."""
    before, found = plan.tensors[name].type, made.get(name)
    if found is not None and found.type.numel == before.numel:
        shaped = found.reshape(before.shape)
        if shaped.type == before or {shaped.type.dtype, before.dtype} <= set(FLOAT_DTYPES):
            return shaped
    what = "is not made" if found is None else f"would be {found.type}"
    raise PlanError(f"{module}: {name!r} is {before}, and {what}; {_INSTEAD}")
