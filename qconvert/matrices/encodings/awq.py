"""AutoAWQ's own form: packed along the outputs, transposed, the columns of a word interleaved."""

from __future__ import annotations

from qconvert.checkpoint.integer_config import awq_form
from qconvert.core.encodings import AWQ
from qconvert.matrices.stored import Stored, stored
from qconvert.plan.plan import Plan


def read(plan: Plan, module: str) -> tuple[Stored, tuple[str, ...]] | None:
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
