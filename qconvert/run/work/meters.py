"""The meters of a worker, and the names of what it computes: for a run that is profiled."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from qconvert.core.graph import Op
from qconvert.core.profiling import Meter, Stopwatch, Word
from qconvert.ops.compiled import in_use
from qconvert.plan.units import Compute, Unit

T = TypeVar("T")


class Meters:
    """The meters of a worker, if they are `on`: of the thread that runs units, and of the one that
    writes."""

    def __init__(self, on: bool) -> None:
        self.on, self.own, self.writing = on, Meter(on=on), Meter(on=on)
        self._watch = Stopwatch()

    def word(self) -> Word:
        """Return what was spent since the last word."""
        seconds, cpu = self._watch.take()
        computes = "numpy" if in_use() is None else "numba"
        return Word(os.getpid(), seconds, cpu, self.own.take(), self.writing.take(), computes)

    def resume(self) -> None:
        """Count from now on."""
        self._watch.resume()

    def counting(self, stream: Generator[T]) -> Generator[T]:
        """The stream, made in this process: what is done with it does not count as a worker's."""
        self._watch.resume()
        with closing(stream):
            for item in stream:
                self._watch.pause()
                yield item
                self._watch.resume()

    def taking(self, stream: Generator[T]) -> Generator[T]:
        """The stream, whose making in this process does not count as a worker's."""
        with closing(stream):
            while True:
                self._watch.pause()
                try:
                    item = next(stream)
                except StopIteration:
                    return
                finally:
                    self._watch.resume()
                yield item


def kind_of(op: Op) -> str:
    """An op by the name of its class, with those of the ops that it is made of: `Recode(DequantFp8,
    Amx)`."""
    parts = [kind_of(part) for part in _within(op)]
    return type(op).__name__ + (f"({', '.join(parts)})" if parts else "")


def _within(op: Op) -> list[Any]:
    if not is_dataclass(op):
        return []
    values = [getattr(op, field.name) for field in fields(op)]
    parts = [each for value in values for each in (value if isinstance(value, tuple) else [value])]
    return [part for part in parts if hasattr(part, "infer") and hasattr(part, "run")]


def kinds_in(units: Sequence[Unit]) -> list[str]:
    """Every kind of op that units run, in the order of the first."""
    ops = {
        step.nodes[n].op
        for unit in units
        for step in unit.steps
        if isinstance(step, Compute)
        for n in range(len(step.nodes))
    }
    return sorted({kind_of(op) for op in ops})
