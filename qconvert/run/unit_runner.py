"""Carry out one unit: read, compute, write at known offsets, and hash what passed by."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from qconvert.errors import RunError
from qconvert.graph import Apply, Buffer, Output, Part, Source, whole
from qconvert.plan import nodes
from qconvert.run.arena import Arena
from qconvert.run.files import Files
from qconvert.run.reader import Reader
from qconvert.units import COPY_BYTES, PART_BYTES, Compute, Copy, Unit, compute_bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Where an output's bytes go: file index, offset in it. `linked` files are the source's own:
    their bytes are read and hashed, and not written."""

    file: int
    offset: int
    linked: bool = False


@dataclass(frozen=True, slots=True)
class UnitResult:
    """What a finished unit leaves behind: a receipt line a tensor, in the order of the unit's
    outputs, and remarks for the user. Lines are text, because a model has very many, and as dicts
    they would take five times the memory.
    `files` are the indexes of the files written, which must be synced before it counts."""

    records: tuple[str, ...]
    remarks: tuple[str, ...]
    files: tuple[int, ...]
    written: int


class _OutputHash:
    """xxh3-128 over an output's bytes, fed as they are written. Bytes that come out of order make
    it give up, and the output is read back at the end."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._next = 0
        self.ordered = True

    def feed(self, at: int, data: memoryview) -> None:
        if at != self._next:
            self.ordered = False
        if self.ordered:
            self._hash.update(data)
            self._next = at + data.nbytes

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class _SourceHashes:
    """xxh3-128 over the ranges of each source that are read. Reads that touch are one range, and
    bytes read again count once: how an op's work is cut, which depends on the memory there is, must
    not show."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, int, xxhash.xxh3_128]] = {}
        self._done: list[dict[str, Any]] = []

    def feed(self, name: str, start: int, data: memoryview) -> None:
        begin, end, digest = self._open.get(name, (start, start, xxhash.xxh3_128()))
        if not begin <= start <= end:
            self._close(name)
            begin = end = start
            digest = xxhash.xxh3_128()
        digest.update(data[end - start :])
        self._open[name] = (begin, max(end, start + data.nbytes), digest)

    def _close(self, name: str) -> None:
        begin, end, digest = self._open.pop(name)
        self._done.append({"name": name, "start": begin, "stop": end, "xxh3": digest.hexdigest()})

    def records(self) -> list[dict[str, Any]]:
        for name in list(self._open):
            self._close(name)
        unique = {(r["name"], r["start"], r["stop"]): r for r in self._done}
        return [unique[key] for key in sorted(unique)]


class UnitRunner:
    """Runs units one at a time in one arena.

    `paths` are the files being written; `places` says where each output goes. `progress` is told
    of bytes as they are written.
    """

    def __init__(
        self,
        reader: Reader,
        files: Files,
        paths: Sequence[Path],
        arena: Arena,
        progress: Callable[[int], None],
    ) -> None:
        self._reader = reader
        self._files = files
        self._paths = paths
        self._arena = arena
        self._progress = progress
        self._descriptors: dict[int, int] = {}

    def run(self, unit: Unit, places: Mapping[str, Place]) -> UnitResult:
        """Make the unit's outputs. Raises RunError naming the tensor whose data cannot be right."""
        job = _Job(self, unit, [places[name] for name, _ in unit.outputs])
        for step in unit.steps:
            self._arena.reset()
            if isinstance(step, Copy):
                job.copy(step)
            else:
                job.compute(step)
        return job.result()

    def close(self) -> None:
        for fd in self._descriptors.values():
            self._files.close(fd)
        self._descriptors.clear()
        self._reader.close()

    def descriptor(self, file: int) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = self._files.open(self._paths[file])
        return self._descriptors[file]


class _Job:
    """The state of one unit while it runs."""

    def __init__(self, runner: UnitRunner, unit: Unit, places: Sequence[Place]) -> None:
        self._runner = runner
        self._reader = runner._reader
        self._arena = runner._arena
        self._unit = unit
        self._places = places
        self._out = [_OutputHash() for _ in places]
        self._in = _SourceHashes()
        self._remarks: Counter[tuple[str, str]] = Counter()

    def copy(self, step: Copy) -> None:
        """Source bytes to output bytes, undecoded, through one buffer."""
        # At least one byte, or an empty tensor could not be stepped through.
        size = max(1, min(step.stop - step.start, COPY_BYTES, self._arena.size))
        buffer = self._arena.take(size)
        for start in range(step.start, step.stop, size):
            chunk = buffer[: min(size, step.stop - start)]
            self._reader.read(step.source, start, chunk)
            self._in.feed(step.source.name, start, chunk)
            self._write(step.output, step.at + start - step.start, chunk)

    def compute(self, step: Compute) -> None:
        if len(step.nodes) == 1:
            self._compute_in_parts(step)
        else:
            self._compute_whole(step)

    def _compute_in_parts(self, step: Compute) -> None:
        node = step.nodes[0]
        limit = min(PART_BYTES, self._arena.size)
        while limit > 1 and compute_bytes(step, limit) > self._arena.size:
            limit //= 2
        for part in node.op.parts(limit, *(arg.type for arg in node.args)):
            self._arena.reset()
            ins = []
            for arg, (at, tensor_type) in zip(node.args, part.args, strict=True):
                data = self._arena.take(tensor_type.nbytes)
                self._fill(arg, at, data, {})
                ins.append(Buffer(tensor_type, data))
            outs = self._run(node, part, ins)
            for port, (at, _) in enumerate(part.outs):
                self._emit(step, 0, port, at, outs[port].data)

    def _compute_whole(self, step: Compute) -> None:
        """Several connected nodes: every result lives until the last has been computed."""
        results: dict[int, list[Buffer]] = {}
        for number, node in enumerate(step.nodes):
            part = whole(node.op, [arg.type for arg in node.args])
            ins = []
            for arg in node.args:
                data = self._arena.take(arg.type.nbytes)
                self._fill(arg, 0, data, results)
                ins.append(Buffer(arg.type, data))
            results[id(node)] = self._run(node, part, ins)
            for port, buffer in enumerate(results[id(node)]):
                self._emit(step, number, port, 0, buffer.data)

    def _run(self, node: Apply, part: Part, ins: Sequence[Buffer]) -> list[Buffer]:
        outs = [Buffer(t, self._arena.take(t.nbytes)) for _, t in part.outs]
        scratch = self._arena.take(node.op.scratch(*(b.type for b in ins)))
        try:
            counts = node.op.run(ins, outs, scratch)
        except RunError as error:
            raise RunError(f"{self._label(node)}: {error}") from error
        self._remarks.update({(self._label(node), what): n for what, n in counts.items()})
        return outs

    def _label(self, node: Apply) -> str:
        names = dict.fromkeys(source.name for arg in node.args for source in _sources(arg))
        return "tensor " + " with ".join(repr(name) for name in names)

    def _fill(
        self, arg: Output, start: int, into: memoryview, results: Mapping[int, list[Buffer]]
    ) -> None:
        """Assemble bytes of an argument from the sources and earlier results it is made of."""
        at = 0
        for origin, low, high in arg.bytes_range(start, start + into.nbytes):
            target = into[at : at + high - low]
            if isinstance(origin, Source):
                self._reader.read(origin, low, target)
                self._in.feed(origin.name, low, target)
            else:
                target[:] = results[id(origin.node)][origin.port].data[low:high]
            at += high - low

    def _emit(self, step: Compute, number: int, port: int, at: int, data: memoryview) -> None:
        """Write bytes [at, at + len(data)) of a node's port wherever the plan wants them."""
        for write in step.writes:
            if write.node != number or write.port != port:
                continue
            low, high = max(at, write.start), min(at + data.nbytes, write.stop)
            if low < high:
                self._write(write.output, write.at + low - write.start, data[low - at : high - at])

    def _write(self, output: int, at: int, data: memoryview) -> None:
        place = self._places[output]
        if not place.linked:
            fd = self._runner.descriptor(place.file)
            path = self._runner._paths[place.file]
            self._runner._files.write(fd, path, data, place.offset + at)
        self._out[output].feed(at, data)
        self._runner._progress(data.nbytes)

    def result(self) -> UnitResult:
        records = []
        read = self._in.records()
        for i, (name, output) in enumerate(self._unit.outputs):
            place, digest = self._places[i], self._out[i]
            wanted = {source.name for source in _sources(output)}
            record = {
                "name": name,
                "dtype": output.type.dtype,
                "shape": list(output.type.shape),
                "file": self._runner._paths[place.file].name,
                "offset": place.offset,
                "nbytes": output.type.nbytes,
                "xxh3": digest.hexdigest() if digest.ordered else self._reread(i),
                "sources": [record for record in read if record["name"] in wanted],
            }
            records.append(json.dumps(record, separators=(",", ":")))
        return UnitResult(
            tuple(records),
            tuple(f"{label}: {n} {what}" for (label, what), n in self._remarks.items()),
            tuple(sorted({place.file for place in self._places if not place.linked})),
            self._unit.write,
        )

    def _reread(self, output: int) -> str:
        """Hash an output that was not written front to back by reading it again."""
        place = self._places[output]
        fd = self._runner.descriptor(place.file)
        left = self._unit.outputs[output][1].type.nbytes
        digest = xxhash.xxh3_128()
        at = place.offset
        while left:
            data = os.pread(fd, min(left, COPY_BYTES), at)
            if not data:
                raise RunError(f"{self._runner._paths[place.file]}: ends at byte {at}")
            digest.update(data)
            at, left = at + len(data), left - len(data)
        return digest.hexdigest()


def _sources(output: Output) -> list[Source]:
    """Every source an output depends on, directly or through nodes."""
    found = [p.origin for p in output.pieces if isinstance(p.origin, Source)]
    for node in nodes([output]):
        found += [
            piece.origin
            for arg in node.args
            for piece in arg.pieces
            if isinstance(piece.origin, Source)
        ]
    return found
