"""MXFP4 matrices under NVFP4's scales: `relabel --to nvfp4`, and `nvfp4` of a source in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply
from qconvert.core.names import split_parameter
from qconvert.core.parameter_names import MXFP4, MXFP4_BESIDE, NVFP4, Dialect
from qconvert.formats.base import Read
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.nvfp4.format import constant_input, modelopt_config
from qconvert.formats.nvfp4.relabel import hybrid_block, relabelled, relabelled_block
from qconvert.models.experts import check_described
from qconvert.models.unquantized import OutputsByName, ignored_globs
from qconvert.ops.constant import constant_f32
from qconvert.passes.input_scales import InputScales
from qconvert.passes.kv_scale import with_source_cache
from qconvert.passes.replace_weights import replace_weights
from qconvert.passes.shared_scales import shared_groups
from qconvert.plan.plan import LogEntry, Plan

WEIGHTS_ONLY = "weights only: no input scales"


def as_nvfp4(
    plan: Plan,
    step: tuple[str, Mapping[str, Any]],
    found: Mapping[str, Read],
    dialect: Dialect,
    input_scale: float | None,
) -> Plan:
    """The plan with every MXFP4 matrix of `found`, by module, under NVFP4's scales; `step` is the name
    of the pass and its options. `input_scale`: one constant for the inputs of all of them.

    Beside FP8 layers, as DeepSeek-V4 has its experts, the result is what runtimes call a hybrid: those
    of draft layers stay MXFP4, as sglang builds them (`model_loader/loader.py`).

    Raises PlanError for what is no linear layer that runtimes load so, for draft layers, for a dialect
    in which there is no place for the others, and, beside FP8, without an input scale.
    """
    dims = plan.role_index.dims
    drafts = [module for module in found if plan.family.is_mtp(f"{module}.weight", dims)]
    hybrid = any(output.type.dtype in WEIGHT_DTYPES for output in plan.tensors.values())
    if hybrid:
        _check_hybrid(found, dialect, input_scale)
        found = {module: read for module, read in found.items() if module not in drafts}
    elif drafts and dialect == "modelopt":
        raise PlanError(
            f"{drafts[0]!r} is MXFP4 and of a draft layer, which sglang builds unquantized in "
            f"modelopt's dialect: drop the MTP layers first (a recipe of `drop: {{what: mtp}}` and "
            f"`{step[0]}`), or take dialect compressed-tensors"
        )
    taken = {name for _, names in found.values() for name in names}
    others = {name: output for name, output in plan.tensors.items() if name not in taken}
    check_described(plan)
    kinds = {module: plan.role_index.kind(names[0]) for module, (_, names) in found.items()}
    for module, kind in kinds.items():
        if not kind.quantizable:
            raise PlanError(f"{module!r} is MXFP4, and no linear layer that runtimes load so")
    made: dict[str, Output] = {}
    for group in shared_groups(kinds):
        made.update(relabelled({module: found[module][0].args for module in group}, dialect))
    if input_scale is not None:
        made |= inputs_of(dict.fromkeys(found, constant_input(input_scale, dialect)), dialect)
    inputs = InputScales(input_scale)
    notes = ["MXFP4 codes as they are, under NVFP4's scales", *(inputs.notes() or [WEIGHTS_ONLY])]
    if hybrid and drafts:
        notes.append("experts of MTP layers stay MXFP4, as runtimes build them beside NVFP4")
    block = _block(plan, others, found, dialect, hybrid=hybrid, inputs=input_scale is not None)
    entry = LogEntry(*step, len(found), None, tuple(notes), "matrices")
    tensors = {**others, **made}
    return replace_weights(plan, entry, tensors, dropped={}, block=block, facts=inputs.facts)


def _check_hybrid(found: Mapping[str, Read], dialect: Dialect, input_scale: float | None) -> None:
    first, (_, names) = next(iter(found.items()))
    if split_parameter(names[0])[1] == MXFP4[0]:
        raise PlanError(
            f"{first!r} is MXFP4 beside FP8 layers in compressed-tensors' groups, and only models whose "
            "groups are all MXFP4 are relabelled"
        )
    if split_parameter(names[1])[1] != MXFP4_BESIDE[1]:
        raise PlanError(
            f"{first!r} is Quark's MXFP4 beside FP8 layers, and only folders that are all MXFP4 are "
            "relabelled"
        )
    if dialect != "modelopt":
        raise PlanError(
            f"{first!r} would be NVFP4 beside FP8 layers with the names of DeepSeek-V4, for which "
            "compressed-tensors has no place: take dialect modelopt"
        )
    if input_scale is None:
        raise PlanError(
            f"{first!r} would be NVFP4 beside FP8 layers, where runtimes quantize its activations too "
            "and take their scales from the checkpoint: give an input scale (--input-scale 1.0)"
        )


def _block(
    plan: Plan,
    others: OutputsByName,
    found: Mapping[str, Read],
    dialect: Dialect,
    *,
    hybrid: bool,
    inputs: bool,
) -> Mapping[str, Any]:
    if hybrid:
        (own, *_) = (config.block for config in plan.checkpoint.quantization_configs)
        return hybrid_block(own)
    if dialect == "modelopt":
        made = modelopt_config(ignored_globs(plan, others, found), inputs=inputs)
        return with_source_cache(plan, made)
    names = next(names for _, names in found.values())
    if split_parameter(names[0])[1] != MXFP4[0]:
        raise PlanError(
            f"{names[0]!r} is of no compressed-tensors config whose groups could be kept: take dialect "
            "modelopt"
        )
    return relabelled_block(plan, inputs=inputs)


def inputs_of(values: Mapping[str, float], dialect: Dialect) -> dict[str, Output]:
    """The input scales of matrices, given as the dialect stores them, by the tensors' names."""
    names = NVFP4[dialect]
    return {
        f"{module}.{names.input}": apply(constant_f32(value, names.scalar))[0]
        for module, value in values.items()
    }
