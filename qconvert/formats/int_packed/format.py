"""Integers: compressed-tensors' packed form and INT8, GPTQ's own form and AutoAWQ's, which are packed
along the inputs or the outputs, transposed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qconvert.checkpoint.integer_config import awq_form, gptq_form, packed_scheme
from qconvert.core.encodings import AWQ, GPTQ, INT8, PACKED
from qconvert.core.errors import PlanError
from qconvert.formats.base import Format, Read, stored
from qconvert.plan.plan import Plan


def read_packed(plan: Plan, module: str) -> Read | None:
    """A module with a `weight_packed` that is no FP4. `weight_shape` repeats the shape and is not
    read."""
    codes, scale, zero, order, shape = (f"{module}.{part}" for part in PACKED)
    if codes not in plan.tensors or plan.tensors[codes].type.dtype == "U8":
        return None
    from qconvert.ops.ints import DequantInts

    scheme = packed_scheme(plan.checkpoint, module)
    names = [codes, scale]
    if not scheme.symmetric:
        names.append(zero)
    elif zero in plan.tensors:
        raise PlanError(f"{zero!r} exists, and the config says symmetric: one of them is wrong")
    ordered = scheme.actorder == "group"
    if ordered:
        names.append(order)
    elif order in plan.tensors:
        raise PlanError(
            f"{order!r} exists, and the config states no actorder group: one of them is wrong"
        )
    decoder = DequantInts(scheme.bits, scheme.group, scheme.symmetric, ordered)
    taken = (*names, shape) if shape in plan.tensors else tuple(names)
    return stored(plan, names, decoder), taken


def read_awq(plan: Plan, module: str) -> Read | None:
    """A module with a `qweight`, where the config states awq."""
    names = [f"{module}.{part}" for part in AWQ]
    form = awq_form(plan.checkpoint)
    if names[0] not in plan.tensors or form is None:
        return None
    from qconvert.ops.awq import WORD, DequantAwq

    if not form.zero_point:
        del names[-1]
    shape = plan.tensors[names[0]].type.shape
    rows = WORD * shape[1] if len(shape) == 2 else 1
    return stored(plan, names, DequantAwq(form.group, form.zero_point, 0, rows)), tuple(names)


def read_gptq(plan: Plan, module: str) -> Read | None:
    """A module with a `qweight`. Draft layers have no g_idx where the config says no desc_act."""
    names = [f"{module}.{part}" for part in GPTQ]
    if names[0] not in plan.tensors:
        return None
    from qconvert.ops.gptq_packed import DequantGptq

    form = gptq_form(plan.checkpoint, module)
    if form.scheme.actorder is None and names[-1] not in plan.tensors:
        del names[-1]
    scheme, shape = form.scheme, plan.tensors[names[0]].type.shape
    rows = shape[1] if len(shape) == 2 else 1
    decoder = DequantGptq(scheme.bits, scheme.group, form.version, 0, rows)
    return stored(plan, names, decoder), tuple(names)


def read_int8(plan: Plan, module: str) -> Read | None:
    """A module with an I8 `weight` and a `weight_scale` in floats."""
    codes, scale, zero = (f"{module}.{part}" for part in INT8)
    weight, factor = plan.tensors.get(codes), plan.tensors.get(scale)
    if weight is None or weight.type.dtype != "I8" or factor is None:
        return None
    from qconvert.ops.int8 import DequantInt8

    scheme = packed_scheme(plan.checkpoint, module, "int-quantized")
    if scheme.bits != 8 or scheme.actorder == "group":
        raise PlanError(
            f"weight {codes!r} is I8, and the config states {scheme.bits} bits, actorder "
            f"{scheme.actorder}: integers that are not packed are read with 8 bits and groups side by "
            "side"
        )
    names = [codes, scale] if scheme.symmetric else [codes, scale, zero]
    if scheme.symmetric and zero in plan.tensors:
        raise PlanError(f"{zero!r} exists, and the config says symmetric: one of them is wrong")
    found = stored(plan, names, DequantInt8(scheme.symmetric))
    groups = factor.type.shape[1]
    expected = 1 if scheme.group is None else found.columns // scheme.group
    if groups != expected:
        raise PlanError(
            f"{scale!r}: expected {expected} scales a row by the config, found {groups}"
        )
    return found, tuple(names)


def _int8_group(targets: Iterable[str]) -> dict[str, Any]:
    from qconvert.formats.int_packed.config import int8_group_config

    return int8_group_config(targets)


_PTQ = "llm-compressor 0.14 model_free_ptq"
FORMATS = (
    Format(
        name="int-packed", title="packed integers", parameters=PACKED, cut=(1, "group"), order=30,
        equals=f"{_PTQ} W4A16, W8A16", read=read_packed,
    ),
    Format(
        name="awq", title="AWQ", parameters=AWQ, cut=("word", "group"), order=50,
        equals="compressed-tensors 0.19 AutoAWQConverter", read=read_awq,
    ),
    Format(
        name="gptq", title="GPTQ", parameters=GPTQ, cut=("word", "group"), order=60,
        equals="AutoGPTQ 0.7, GPTQModel", read=read_gptq,
    ),
    Format(
        name="int8", title="INT8", parameters=INT8[:2], cut=(1, 0), order=70,
        equals=f"{_PTQ} INT8", read=read_int8, config_group=_int8_group,
    ),
)  # fmt: skip
