"""compressed-tensors' integers that are not packed (`int-quantized`)."""

from __future__ import annotations

from qconvert.checkpoint.integer_config import packed_scheme
from qconvert.core.encodings import INT8
from qconvert.core.errors import PlanError
from qconvert.matrices.stored import Stored, stored
from qconvert.plan.plan import Plan


def read(plan: Plan, module: str) -> tuple[Stored, tuple[str, ...]] | None:
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
