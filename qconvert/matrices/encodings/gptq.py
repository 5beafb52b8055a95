"""GPTQ's own form: packed along the inputs, transposed."""

from __future__ import annotations

from qconvert.checkpoint.integer_config import gptq_form
from qconvert.core.encodings import GPTQ
from qconvert.matrices.stored import Stored, stored
from qconvert.plan.plan import Plan


def read(plan: Plan, module: str) -> tuple[Stored, tuple[str, ...]] | None:
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
