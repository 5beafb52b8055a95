"""Tensors of a GGUF file, each of the type that its header states."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.gguf.stated import SECOND, StoredAs, stored_in
from qconvert.formats.base import FolderTensors, Format, Read, Stored
from qconvert.formats.gguf.decode import DequantGguf, DequantGgufStack
from qconvert.plan.plan import Plan


@lru_cache(maxsize=8)  # asked for each matrix
def _stated(checkpoint: Checkpoint) -> StoredAs:
    return stored_in(checkpoint)


def read(plan: Plan, module: str) -> Read | None:
    """A module's weight in a GGUF file. Raises PlanError where it does not fit its type."""
    name = f"{module}.weight"
    if name not in _stated(plan.checkpoint).kinds or not _is_as_read(plan, name):
        return None
    return _stored(plan, name), (name,)


def _is_as_read(plan: Plan, name: str) -> bool:
    """Return whether a tensor is in the plan as the file has it."""
    return name in plan.tensors and plan.tensors[name].source is not None


def _stored(plan: Plan, name: str) -> Stored:
    stated, output = _stated(plan.checkpoint), plan.tensors[name]
    second = plan.tensors.get(name + SECOND)
    if second is not None or len(output.type.shape) == 3:
        args = (output,) if second is None else (output, second)
        stack = DequantGgufStack(stated.kinds[name])
        (kind,) = stack.infer(*(arg.type for arg in args))
        return Stored(stack, args, kind.shape[0], kind.numel // max(1, kind.shape[0]))
    halves = stated.halves.get(name, 0)
    decoder = DequantGguf(stated.kinds[name], halves, name in stated.plus_one)
    (kind,) = decoder.infer(output.type)
    rows = kind.shape[0]
    return Stored(decoder, (output,), rows, kind.numel // max(1, rows))


def unmixed(plan: Plan) -> Iterator[tuple[str, Read]]:
    """All tensors of a GGUF file that no folder holds as they are: blocks, numbers in F32 as it has
    them, rows in another order. Raises PlanError for one that does not fit its type."""
    for name in _stated(plan.checkpoint).kinds:
        if _is_as_read(plan, name) and not name.endswith(SECOND):
            second = (name + SECOND,) if name + SECOND in plan.tensors else ()
            yield name, (_stored(plan, name), (name, *second))


def _label(folder: FolderTensors, module: str, parameter: str) -> str | None:
    return folder.once(_stated).kinds.get(f"{module}.{parameter}")


FORMATS = (
    Format(
        name="gguf", title="GGUF", parameters=("weight", "_proj"), codes=("U8",), cut=(1, 0), order=5,
        equals="gguf 0.19 quants.py", read=read, unmixed=unmixed, label=_label,
    ),
)  # fmt: skip
