"""Run an op outside the engine: on whole arguments, or part by part as the engine would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from both_forms import Both

from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Buffer, Op, whole
from qconvert.ops import compiled

_GUARD = b"\xa5" * 64


def buffer(kind: TensorType, data: bytes) -> Buffer:
    """A writable buffer holding `data`."""
    assert len(data) == kind.nbytes
    return Buffer(kind, memoryview(bytearray(data)))


def run_op(
    op: Op, ins: Sequence[Buffer], limit: int | None = None
) -> tuple[list[bytes], Counter[str]]:
    """Results as bytes, and the counts of remarks. With `limit` in parts of that size, checking that
    parts cover every result once, in ascending order, that the first is the largest, and that
    nothing is written beyond the buffers the op declared."""
    types = [b.type for b in ins]
    inferred = op.infer(*types)
    parts = [whole(op, types)] if limit is None else list(op.parts(limit, *types))
    results = [bytearray() for _ in inferred]
    remarks: Counter[str] = Counter()
    sizes = []
    for part in parts:
        slices = [
            Buffer(kind, whole_in.data[at : at + kind.nbytes])
            for whole_in, (at, kind) in zip(ins, part.args, strict=True)
        ]
        assert op.infer(*(kind for _, kind in part.args)) == tuple(kind for _, kind in part.outs)
        guarded = [bytearray(kind.nbytes) + bytearray(_GUARD) for _, kind in part.outs]
        outs = [
            Buffer(kind, memoryview(raw)[: kind.nbytes])
            for raw, (_, kind) in zip(guarded, part.outs, strict=True)
        ]
        need = op.scratch(*(kind for _, kind in part.args))
        scratch = bytearray(need) + bytearray(_GUARD)
        run = op.run if compiled.OPS.on else Both(op).run
        remarks.update(run(slices, outs, memoryview(scratch)[:need]))
        assert bytes(scratch[need:]) == _GUARD
        sizes.append(sum(b.type.nbytes for b in [*slices, *outs]) + need)
        for result, raw, (at, kind) in zip(results, guarded, part.outs, strict=True):
            assert at == len(result), "parts must fill results front to back"
            assert bytes(raw[kind.nbytes :]) == _GUARD
            result += raw[: kind.nbytes]
    assert [len(result) for result in results] == [kind.nbytes for kind in inferred]
    assert max(sizes, default=0) == (sizes[0] if sizes else 0), "the first part must be the largest"
    return [bytes(result) for result in results], remarks
