"""Each op, and each task of a validator, in both of its forms: numpy's and compiled loops, of any size.

A run takes loops for large inputs, and tests have small ones. So whatever a test converts or validates
in its own process, or runs by ops_harness, is run again in the other form, and must come to the same
bytes, counts and errors. An op's arguments are read only there and, like its results, lie at odd
addresses, as in a mapped file. A loop declines an array of a type that it has none for; here that is an
error.

QCONVERT_TEST_FORMS says what the other form is: `loops` (the default), or `none`, for tests of wrong
products (mutants.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from qconvert.compiled.jit import _Lazy
from qconvert.core.errors import QConvertError
from qconvert.core.extras import is_installed
from qconvert.core.graph import Apply, Buffer, Op, Part
from qconvert.ops import compiled
from qconvert.run.work.unit_runner import UnitState
from qconvert.validation import workers
from qconvert.validation.compiled import LOOPS
from qconvert.validation.workers import Folders, Numbered, Result

VARIABLE = "QCONVERT_TEST_FORMS"

# Results and counts, or the error and what it says.
Outcome = tuple[list[bytes], dict[str, int]] | tuple[type[Exception], str]


def begin(patch: pytest.MonkeyPatch) -> None:
    """From now on, in this process."""
    if is_installed("numba"):
        patch.setattr(UnitState, "_run", _run)
        patch.setattr(workers, "_together", _together)
        patch.setattr(_Lazy, "__call__", _called)


def _asked() -> str:
    asked = os.environ.get(VARIABLE, "loops")
    assert asked in ("loops", "none"), asked
    return asked


class Both:
    """An op that runs in both forms."""

    def __init__(self, op: Op) -> None:
        self._op = op

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        if _asked() == "none":
            return self._op.run(ins, outs, scratch)
        other = _other_form(self._op, ins)
        counts: Mapping[str, int] = {}
        failed: QConvertError | None = None
        try:
            counts = self._op.run(ins, outs, scratch)
        except QConvertError as error:
            failed = error
        found: Outcome = [bytes(one.data) for one in outs], dict(counts)
        if failed is not None:
            found = type(failed), str(failed)
        assert other == found, self._op
        if failed is not None:
            raise failed
        return counts


def _other_form(op: Op, ins: Sequence[Buffer]) -> Outcome:
    types = [one.type for one in ins]
    given = [Buffer(one.type, _odd(bytes(one.data)).toreadonly()) for one in ins]
    made = [Buffer(kind, _odd(bytes(kind.nbytes))) for kind in op.infer(*types)]
    on = compiled.OPS.on
    compiled.use(not on)
    try:
        counts = op.run(given, made, memoryview(bytearray(op.scratch(*types))))
    except QConvertError as error:
        return type(error), str(error)
    finally:
        compiled.use(on)
    return [bytes(one.data) for one in made], dict(counts)


def _odd(data: bytes) -> memoryview:
    """A copy at an odd address."""
    return memoryview(bytearray(b"\0" + data))[1:]


_really_run, _really_together, really_call = UnitState._run, workers._together, _Lazy.__call__


def _run(
    self: UnitState, node: Apply, part: Part, ins: Sequence[Buffer], outs: list[Buffer]
) -> list[Buffer]:
    both: Any = Both(node.op)
    return _really_run(self, replace(node, op=both), part, ins, outs)


def _together(group: Sequence[Numbered], folders: Folders) -> Iterator[tuple[int, Result]]:
    """Tasks of the product (others may say what they run in)."""
    ours = [one for one in group if type(one[1]).__module__.startswith("qconvert.")]
    # A matrix and its bias may have one number.
    numbers = {number for number, task in ours if getattr(task, "computes", False)}
    numbers -= {number for number, task in group if isinstance(task, workers.Watch)}
    again = [(number, task) for number, task in ours if number in numbers]
    found = list[tuple[int, Result]]()
    for item in _really_together(group, folders):
        found.append(item)
        yield item
    if _asked() == "none":
        return
    on = LOOPS.on
    LOOPS.use(not on)
    try:
        other = [*_really_together(again, folders)]
    finally:
        LOOPS.use(on)
    # As text, in which a NaN is itself.
    assert repr(other) == repr([item for item in found if item[0] in numbers])


def _called(self: _Lazy, *args: Any) -> bool:
    for number, (one, value) in enumerate(zip(self.arguments, args, strict=True), 1):
        fits = one.fitted(value) is not None
        assert fits, f"{self.plain.__name__}, argument {number}: {one.refused(value)}"
    return really_call(self, *args)
