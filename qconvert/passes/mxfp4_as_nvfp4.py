"""MXFP4 matrices under NVFP4's scales: `relabel --to nvfp4`, and `nvfp4` of a source in MXFP4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from struct import pack
from typing import Any

from qconvert.checkpoint.checkpoint import HF_QUANT_CONFIG
from qconvert.core.encodings import MXFP4, NVFP4, Dialect
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply
from qconvert.core.names import split_parameter
from qconvert.formats.base import Read
from qconvert.formats.fp8.decode import WEIGHT_DTYPES
from qconvert.formats.nvfp4.config import constant_input, hf_quant_config, modelopt_config
from qconvert.formats.nvfp4.relabel import hybrid_block, relabelled, relabelled_block
from qconvert.models.experts import check_described
from qconvert.models.unquantized import Named, ignored_globs
from qconvert.ops.constant import Constant
from qconvert.passes.nvfp4_groups import shared_groups
from qconvert.passes.replace_weights import replace_weights
from qconvert.plan.plan import LogEntry, Plan


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
    of draft layers stay MXFP4, as sglang 0.5.23 builds them (`model_loader/loader.py`).

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
    made |= inputs_of(found, dialect, input_scale)
    notes = ["MXFP4 codes as they are, under NVFP4's scales", said_of_inputs(input_scale)]
    if hybrid and drafts:
        notes.append("experts of MTP layers stay MXFP4, as runtimes build them beside NVFP4")
    block = _block(plan, others, found, dialect, hybrid=hybrid, inputs=input_scale is not None)
    entry = LogEntry(*step, len(found), None, tuple(notes), "matrices")
    tensors = {**others, **made}
    facts = {} if input_scale is None else {"input_scale": input_scale}
    return with_modelopt_file(
        replace_weights(plan, entry, tensors, dropped={}, block=block, facts=facts)
    )


def _check_hybrid(found: Mapping[str, Read], dialect: Dialect, input_scale: float | None) -> None:
    first, (_, names) = next(iter(found.items()))
    if split_parameter(names[0])[1] == MXFP4[0]:
        raise PlanError(
            f"{first!r} is MXFP4 beside FP8 layers in compressed-tensors' groups, and only models whose "
            "groups are all MXFP4 are relabelled"
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
    others: Named,
    found: Mapping[str, Read],
    dialect: Dialect,
    *,
    hybrid: bool,
    inputs: bool,
) -> dict[str, Any]:
    if hybrid:
        (own, *_) = (config.block for config in plan.checkpoint.quantization_configs)
        return hybrid_block(own)
    if dialect == "modelopt":
        return modelopt_config(ignored_globs(plan, others, found), inputs=inputs)
    names = next(names for _, names in found.values())
    if split_parameter(names[0])[1] != MXFP4[0]:
        raise PlanError(
            f"{names[0]!r} is of no compressed-tensors config whose groups could be kept: take dialect "
            "modelopt"
        )
    return relabelled_block(plan, inputs=inputs)


def inputs_of(
    modules: Iterable[str], dialect: Dialect, input_scale: float | None
) -> dict[str, Output]:
    """The constant input scale of each matrix, by name; nothing where none is given."""
    if input_scale is None:
        return {}
    value = constant_input(input_scale, dialect)
    return {name: o for m in modules for name, o in input_of(m, dialect, value).items()}


def input_of(module: str, dialect: Dialect, value: float) -> dict[str, Output]:
    """A matrix's input scale, by name."""
    names = NVFP4[dialect]
    op = Constant("F32", names.scalar, pack("<f", value).hex())
    return {f"{module}.{names.input}": apply(op)[0]}


def said_of_inputs(input_scale: float | None) -> str:
    if input_scale is None:
        return "weights only: no input scales"
    return f"input scales are the constant {input_scale:g}, found from no data"


def with_modelopt_file(plan: Plan) -> Plan:
    """The plan with modelopt's own file beside a block in its dialect."""
    block = plan.config["quantization_config"]
    if block["quant_method"] != "modelopt":
        return plan
    return replace(plan, new_files={**plan.new_files, HF_QUANT_CONFIG: hf_quant_config(block)})
