"""compressed-tensors' packed integers (`pack-quantized`)."""

from __future__ import annotations

from qconvert.checkpoint.integer_config import packed_scheme
from qconvert.core.encodings import PACKED
from qconvert.core.errors import PlanError
from qconvert.matrices.stored import Stored, stored
from qconvert.plan.plan import Plan


def read(plan: Plan, module: str) -> tuple[Stored, tuple[str, ...]] | None:
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
