"""What a worker is made of, with a meter in it: for a run that is profiled, and for no other."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from qconvert.checkpoint.checkpoint import Shard
from qconvert.core.graph import Apply, Buffer, Op, Part, Source
from qconvert.core.profiling import Meter, Stopwatch, Word
from qconvert.ops.compiled.choice import in_use
from qconvert.plan.units import Compute, Unit
from qconvert.run.arena import Arena
from qconvert.run.files import Files
from qconvert.run.reader import Reader
from qconvert.run.sink import Sink, Window
from qconvert.run.unit_runner import Job, OutputHash, Place, SourceHashes, UnitRunner

READ, WRITE, HASH, COPY, AGAIN = "read", "write", "hash", "copy", "read back"
FOR_WORK, FOR_DISK = "wait for work", "wait for disk"
# Steps that a worker takes beside its ops, in the order in which they are shown.
STEPS = (READ, COPY, HASH, AGAIN, FOR_DISK, FOR_WORK)

T = TypeVar("T")


class Meters:
    """The meters of a worker: of the thread that runs units, and of the one that writes."""

    def __init__(self) -> None:
        self.own, self.writing = Meter(), Meter()
        self._watch = Stopwatch()

    def word(self) -> Word:
        """What was spent since the last word."""
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


class MeteredReader(Reader):
    def __init__(self, shards: Sequence[Shard], meter: Meter, *, maps: bool = False) -> None:
        super().__init__(shards, maps=maps)
        self._meter = meter

    def mapped(self, source: Source, start: int, stop: int) -> memoryview | None:
        with self._meter.step(READ, stop - start):
            return super().mapped(source, start, stop)

    def read(self, source: Source, start: int, into: memoryview) -> None:
        with self._meter.step(READ, into.nbytes):
            super().read(source, start, into)


class MeteredSink(Sink):
    def __init__(self, files: Files, paths: Sequence[Path], window: int, work: Meters) -> None:
        super().__init__(files, paths, window)
        self._work = work

    def _wait(self, stop: int) -> None:
        with self._work.own.step(FOR_DISK):
            super()._wait(stop)

    def flush(self) -> None:
        with self._work.own.step(FOR_DISK):
            super().flush()

    def _put(self, window: Window) -> None:
        meter = self._work.writing if self._files.beside else self._work.own
        with meter.step(WRITE, window.stop - window.start):
            super()._put(window)


class _OutputHash(OutputHash):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def feed(self, at: int, data: memoryview) -> None:
        with self._meter.step(HASH, data.nbytes):
            super().feed(at, data)


class _SourceHashes(SourceHashes):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def feed(self, name: str, start: int, data: memoryview) -> None:
        with self._meter.step(HASH, data.nbytes):
            super().feed(name, start, data)


class _MeteredJob(Job):
    def __init__(
        self, runner: UnitRunner, unit: Unit, places: Sequence[Place], meter: Meter
    ) -> None:
        super().__init__(runner, unit, places)
        self._meter = meter
        self._out = [_OutputHash(meter) for _ in places]
        self._in = _SourceHashes(meter)

    def _run(
        self, node: Apply, part: Part, ins: Sequence[Buffer], outs: list[Buffer]
    ) -> list[Buffer]:
        nbytes = sum(buffer.data.nbytes for buffer in (*ins, *outs))
        with self._meter.step(kind_of(node.op), nbytes):
            return super()._run(node, part, ins, outs)

    def _write(self, output: int, at: int, data: memoryview) -> None:
        with self._meter.step(COPY, 0 if self._places[output].linked else data.nbytes):
            super()._write(output, at, data)

    def _reread(self, output: int) -> str:
        with self._meter.step(AGAIN, self._unit.made[output].type.nbytes):
            return super()._reread(output)


class MeteredRunner(UnitRunner):
    def __init__(
        self,
        shards: Sequence[Shard],
        sink: Sink,
        names: Sequence[str],
        arena: Arena,
        progress: Callable[[int], None],
        work: Meters,
        *,
        maps: bool = False,
    ) -> None:
        reader = MeteredReader(shards, work.own, maps=maps)
        super().__init__(reader, sink, names, arena, progress)
        self._work = work

    def _job(self, unit: Unit, places: Mapping[str, Place]) -> Job:
        return _MeteredJob(self, unit, [places[name] for name in unit.names], self._work.own)
