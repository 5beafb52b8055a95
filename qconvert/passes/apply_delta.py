"""apply_delta: the old checkpoint and a delta become the new one, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from qconvert.checkpoint.delta import BLOCK, ChangedTensor, Patched, blob_name, width
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, Piece, Source, apply
from qconvert.ops.constant import Patch
from qconvert.plan.pass_options import options_of
from qconvert.plan.plan import ELSEWHERE, LogEntry, Plan

_GONE = f"{ELSEWHERE} of the old checkpoint alone"
_REPLACED = f"{ELSEWHERE} the delta holds another in its place"


@dataclass(frozen=True, slots=True)
class ApplyDelta:
    """Put the changed chunks of a delta in the place of the old ones. No recipe has this pass: it needs
    two folders. Raises PlanError without a delta."""

    name: ClassVar[str] = "apply_delta"

    def __call__(self, plan: Plan) -> Plan:
        both = plan.checkpoint
        if not isinstance(both, Patched):
            raise PlanError("no delta is given: qconvert apply SRC DELTA OUT")
        made = both.delta.tensors
        tensors = {name: _made(both, name, one) for name, one in made.items()}
        gone = {
            name: _GONE if name not in made else _REPLACED
            for name in both.old_names
            if name not in made or made[name].whole
        }
        changed = sum(bool(one.chunks) for one in made.values())
        entry = LogEntry(self.name, options_of(self), changed, None)
        return plan.logged(entry, tensors=tensors, dropped={**plan.dropped, **gone})


def _made(both: Patched, name: str, one: ChangedTensor) -> Output:
    """A tensor of the new checkpoint. Raises PlanError where the old one has none, or another, to take
    chunks from."""
    old = both.sources.get(name)
    if one.whole:
        return Output(one.type, tuple(_whole(both, name, one)))
    if old is None or old.type != one.type:
        found = "none" if old is None else old.type
        raise PlanError(
            f"{name!r}: the delta changes {one.type}, found {found}; copy the delta again"
        )
    if not one.chunks:
        return old.output
    return Output(one.type, tuple(_patched(both, name, one, old)))


def _whole(both: Patched, name: str, one: ChangedTensor) -> Iterator[Piece]:
    """The chunks of a tensor that is in the delta as a whole."""
    for chunk in one.chunks:
        blob = both[blob_name(name, chunk)]
        yield Piece(blob, 0, blob.type.nbytes)


def _patched(both: Patched, name: str, one: ChangedTensor, old: Source) -> Iterator[Piece]:
    """The chunks of the old tensor, each that changed with its blob. All of the old one is read: an
    unchanged chunk between two is one range with its neighbours."""
    at = 0
    for chunk in one.chunks:
        if chunk.start > at:
            yield Piece(old, at, chunk.start)
        at = chunk.start + one.size(chunk)
        kind = TensorType("U8", (one.size(chunk),))
        op = Patch(width(one.type), chunk.changed, BLOCK, chunk.old, chunk.new)
        blob = both[blob_name(name, chunk)].output
        (result,) = apply(op, Output.of(kind, old, chunk.start, at), blob)
        yield from result.pieces
    if at < old.type.nbytes:
        yield Piece(old, at, old.type.nbytes)
