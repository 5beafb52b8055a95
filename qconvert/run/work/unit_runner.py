"""Carry out one unit: read, compute, leave the results with the sink, and hash what passed by."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import xxhash

from qconvert.core.errors import RowError, RunError, ScaleError
from qconvert.core.graph import Apply, Buffer, Output, Part, Piece, Source, nodes
from qconvert.core.profiling import AGAIN, COPY, HASH, OFF, Meter
from qconvert.plan.units import (
    COPY_BYTES,
    FAR_REREAD_BYTES,
    PART_BYTES,
    REREAD_BYTES,
    Compute,
    Copy,
    Unit,
    Write,
    gathered_of,
    kept_in,
    node_bytes,
    parts_of,
    read_whole,
    scratch_of,
    taken_by_others,
)
from qconvert.run.work.meters import kind_of
from qconvert.run.work.reader import Arena, Reader
from qconvert.run.work.sink import Sink

_JSON = json.JSONEncoder(separators=(",", ":")).encode

# What of a part is read and hashed at a time: it is in the processor's second cache then. Of 14.5 GB in
# parts of 3 MB hashing took 0.37 of the time of reading for 0.43 (medians of three in turn).
_HASHED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Place of an output's bytes: file index, offset in it. `linked` files are the source's own:
    their bytes are read and hashed, and not written."""

    file: int
    offset: int
    linked: bool = False


@dataclass(frozen=True, slots=True)
class UnitResult:
    """Result of a finished unit: a receipt line a tensor, in the order of the unit's
    outputs, and remarks for the user. Lines are text, because a model has very many, and as dicts
    they would take five times the memory.
    `files` are the indexes of the files written, which must be synced before it counts."""

    records: tuple[str, ...]
    remarks: tuple[str, ...]
    files: tuple[int, ...]
    written: int


class OutputHash:
    """xxh3-128 over an output's bytes, fed as they are written. Bytes that come out of order make
    it give up, and the output is read back at the end."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._hash = xxhash.xxh3_128()
        self._next = 0
        self.ordered = True

    def feed(self, at: int, data: memoryview) -> None:
        if at != self._next:
            self.ordered = False
        if self.ordered:
            with self._meter.step(HASH, data.nbytes):
                self._hash.update(data)
            self._next = at + data.nbytes

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class SourceHashes:
    """xxh3-128 over the ranges of each source that are read. Reads that touch are one range, and
    bytes read again count once: how an op's work is cut, which depends on the memory there is, must
    not show."""

    def __init__(self, meter: Meter = OFF) -> None:
        self._meter = meter
        self._open: dict[str, tuple[int, int, xxhash.xxh3_128]] = {}
        self._done: list[dict[str, Any]] = []

    def feed(self, name: str, start: int, data: memoryview) -> None:
        found = self._open.get(name)
        if found is not None and not found[0] <= start <= found[1]:
            self._close(name)
            found = None
        begin, end, digest = found or (start, start, xxhash.xxh3_128())
        with self._meter.step(HASH, data.nbytes):
            digest.update(data[end - start :])
        self._open[name] = (begin, max(end, start + data.nbytes), digest)

    def _close(self, name: str) -> None:
        begin, end, digest = self._open.pop(name)
        self._done.append(_range(name, begin, end, digest.hexdigest()))

    def records(self) -> list[dict[str, Any]]:
        for name in list(self._open):
            self._close(name)
        unique = {(r["name"], r["start"], r["stop"]): r for r in self._done}
        return [unique[key] for key in sorted(unique)]


def _range(name: str, start: int, stop: int, xxh3: str) -> dict[str, Any]:
    return {"name": name, "start": start, "stop": stop, "xxh3": xxh3}


class UnitRunner:
    """Runs units one at a time in one arena.

    `names` are those of the files the sink writes; `places` says where each output goes. `progress`
    is told of bytes as they are made.
    """

    def __init__(
        self,
        reader: Reader,
        sink: Sink,
        names: Sequence[str],
        arena: Arena,
        progress: Callable[[int], None],
        meter: Meter = OFF,
    ) -> None:
        self._reader = reader
        self._meter = meter
        self._sink = sink
        self._names = names
        self._arena = arena
        self._progress = progress

    def expect(self, units: Iterable[Unit]) -> None:
        """These are run next, in this order."""
        self._reader.expect(units, self._arena.size)

    def run(self, unit: Unit, places: Mapping[str, Place]) -> UnitResult:
        """Make the unit's outputs and leave them with the sink, which writes them in its own time.
        Raises RunError naming the tensor whose data cannot be right."""
        job = UnitState(self, unit, [places[name] for name in unit.names])
        for step in job.steps:
            self._arena.reset()
            if isinstance(step, Copy):
                job.copy(step)
            else:
                job.compute(step)
        return job.result()

    def write(
        self,
        unit: Unit,
        places: Mapping[str, Place],
        results: Sequence[Buffer],
        read: Sequence[Mapping[str, Any]],
    ) -> UnitResult:
        """Leave a unit's outputs with the sink that were computed elsewhere: the results of its one
        step's one node, whole. `read` are the source ranges they were computed from, with hashes."""
        (step,) = unit.steps
        assert isinstance(step, Compute)
        assert len(step.nodes) == 1
        assert tuple(b.type for b in results) == step.nodes[0].types, "results of other types"
        job = UnitState(self, unit, [places[name] for name in unit.names])
        job.write_whole(step, [b.data for b in results])
        return job.result([dict(record) for record in read])

    def close(self) -> None:
        self._reader.close()


@dataclass(slots=True)
class SharedArgument:
    """Argument that several nodes of a step read, and how much of it has been; `mapped`: it is all
    there."""

    data: memoryview
    filled: int = 0
    mapped: bool = False


class UnitState:
    """The state of one unit while it runs."""

    def __init__(self, runner: UnitRunner, unit: Unit, places: Sequence[Place]) -> None:
        self._runner = runner
        self._meter = runner._meter
        self._reader = runner._reader
        self._arena = runner._arena
        self._sink = runner._sink
        self._unit = unit
        self.steps = unit.steps  # made anew each time that they are asked for
        self._places = places
        self._out = [OutputHash(self._meter) for _ in places]
        self._in = SourceHashes(self._meter)
        # A unit that is one copy has the same bytes on both sides: they are hashed once.
        self._same = len(self.steps) == 1 and isinstance(self.steps[0], Copy)
        self._remarks: Counter[tuple[str, str]] = Counter()
        self._kept: dict[Piece, SharedArgument] = {}

    def copy(self, step: Copy) -> None:
        """Source bytes to output bytes, undecoded, read to where they are written from."""
        place = self._places[step.output]
        # At least one byte, or an empty tensor could not be stepped through.
        size = max(1, min(step.stop - step.start, COPY_BYTES, self._sink.limit))
        if place.linked:
            size = min(size, self._arena.size)
            spare = self._arena.take(size)
        for start in range(step.start, step.stop, size):
            at = step.at + start - step.start
            count = min(size, step.stop - start)
            if place.linked:
                chunk = spare[:count]
            else:
                chunk = self._sink.room(place.file, place.offset + at, count)
            self._reader.read(step.source, start, chunk)
            if not self._same:
                self._in.feed(step.source.name, start, chunk)
            self._made(step.output, at, chunk)

    def compute(self, step: Compute) -> None:
        """Nodes one after another; the results that later ones take live whole until the last."""
        kept = taken_by_others(step)
        results: dict[int, list[Buffer]] = {}
        self._keep_what_is_reread(step)
        for number, node in enumerate(step.nodes):
            if id(node) not in kept:
                mark = self._arena.mark()
                self._compute_in_parts(step, number, results)
                self._arena.reset(mark)
                continue
            made = [Buffer(kind, self._arena.take(kind.nbytes)) for kind in node.types]
            self._into(node, made, results)
            results[id(node)] = made
            for port, buffer in enumerate(made):
                self._emit(step, number, port, 0, buffer.data)
        self._kept.clear()

    def _into(
        self, node: Apply, made: Sequence[Buffer], results: Mapping[int, list[Buffer]]
    ) -> None:
        """Compute a node's results whole, part by part."""
        data = [buffer.data for buffer in made]
        for part, ins in self._parts(node, results):
            self._apply(node, part, ins, _slices(data, part))

    def _parts(
        self, node: Apply, results: Mapping[int, list[Buffer]]
    ) -> Iterator[tuple[Part, list[Buffer]]]:
        """The parts of a node's work, as large as there is room for, with their arguments. What is
        taken of the arena after one is asked for is free again when the next is."""
        mark = self._arena.mark()
        room = self._arena.size - mark
        limit = min(PART_BYTES, room)
        while limit > 1 and node_bytes(node, limit) > room:
            limit //= 2
        for part in parts_of(node, limit):
            self._arena.reset(mark)
            ins = []
            for arg, (at, kind) in zip(node.args, part.args, strict=True):
                ins.append(Buffer(kind, self._argument(arg, at, kind.nbytes, results)))
            yield part, ins
        self._arena.reset(mark)

    def _keep_what_is_reread(self, step: Compute) -> None:
        """Take room for what several nodes read, where there is that much beside all else."""
        most = FAR_REREAD_BYTES if self._reader.far else REREAD_BYTES
        wanted = kept_in(step, self._arena.size - self._arena.mark(), most)
        self._kept = {piece: self._kept_of(piece, count) for piece, count in wanted.items()}

    def _kept_of(self, piece: Piece, count: int) -> SharedArgument:
        """Return where a piece lies in the page cache, or memory to read it to."""
        origin, start, stop = piece
        assert isinstance(origin, Source)
        data = self._reader.mapped(origin, start, stop)
        return (
            SharedArgument(self._arena.take(count))
            if data is None
            else SharedArgument(data, mapped=True)
        )

    def _argument(
        self, arg: Output, at: int, size: int, results: Mapping[int, list[Buffer]]
    ) -> memoryview:
        """Bytes [at, at + size) of an argument; of one that is kept, read the first time alone."""
        kept = self._kept.get(arg.pieces[0]) if self._kept and read_whole(arg) else None
        if kept is None:
            data = self._arena.take(size)
            self._fill(arg, at, data, results)
            return data
        if kept.filled < at + size:
            new = kept.data[kept.filled : at + size]
            if kept.mapped:
                ((source, start, _),) = arg.sources
                self._in.feed(source.name, start + kept.filled, new)
            else:
                self._fill(arg, kept.filled, new, results)
            kept.filled = at + size
        return kept.data[at : at + size]

    def _compute_in_parts(
        self, step: Compute, number: int, results: Mapping[int, list[Buffer]]
    ) -> None:
        node = step.nodes[number]
        gathered = gathered_of(node)
        if gathered and gathered + node_bytes(node) <= self._arena.size - self._arena.mark():
            self._gather(step, number, results)
            return
        for part, ins in self._parts(node, results):
            write = self._straight_out(step, number, part, 0) if len(part.outs) == 1 else None
            outs = [self._out_of(part, 0, write)] if write else self._results(part)
            self._apply(node, part, ins, outs)
            for port, (at, _) in enumerate(part.outs):
                if write:
                    self._made(write.output, write.at + at - write.start, outs[port].data)
                else:
                    self._emit(step, number, port, at, outs[port].data)

    def _gather(self, step: Compute, number: int, results: Mapping[int, list[Buffer]]) -> None:
        """Results that are better written whole. The largest, where one output wants all of it, goes
        straight out beside them: of a matrix's codes and scales 0.04 CPU s a GB of codes."""
        node = step.nodes[number]
        first = max(range(len(node.types)), key=lambda port: node.types[port].nbytes)
        if writes := self._side_by_side(step, number):
            self._compute_there(node, writes, first, results)
            return
        made = [Buffer(kind, self._arena.take(kind.nbytes)) for kind in node.types]
        wanted = [w for w in step.writes if w.node == number and w.port == first]
        alone = len(wanted) == 1 and wanted[0].stop - wanted[0].start == made[first].type.nbytes
        data = [buffer.data for buffer in made]
        for part, ins in self._parts(node, results):
            outs = _slices(data, part)
            write = self._straight_out(step, number, part, first) if alone else None
            if write:
                outs[first] = self._out_of(part, first, write)
            self._apply(node, part, ins, outs)
            at, _ = part.outs[first]
            if write:
                self._made(write.output, write.at + at - write.start, outs[first].data)
            elif alone:
                self._emit(step, number, first, at, outs[first].data)
        self.write_whole(step, data, number, but=first if alone else None)

    def _side_by_side(self, step: Compute, number: int) -> list[Write]:
        """Writes that want a node's results whole, in file order, where these lie side by side in one
        file and the sink has room for all of them at once; else none."""
        kinds = step.nodes[number].types
        writes = sorted([w for w in step.writes if w.node == number], key=self._file_order)
        if sorted([w.port for w in writes]) != list(range(len(kinds))):
            return []
        begin = stop = self._file_order(writes[0])
        for write in writes:
            nbytes = kinds[write.port].nbytes
            whole = (write.start, write.stop) == (0, nbytes)
            if not whole or self._places[write.output].linked or self._file_order(write) != stop:
                return []
            stop = stop[0], stop[1] + nbytes
        return writes if stop[1] - begin[1] <= self._sink.limit else []

    def _compute_there(
        self,
        node: Apply,
        writes: Sequence[Write],
        largest: int,
        results: Mapping[int, list[Buffer]],
    ) -> None:
        """Compute results right where they are written from: a matrix's codes and its scales, which
        come before them, are one run of bytes then, and not two that end in parts of blocks. The
        `largest` is hashed part by part, while the processor's cache has it."""
        file, at = self._file_order(writes[0])
        room = self._sink.room(file, at, sum([kind.nbytes for kind in node.types]))
        data = [room] * len(node.types)
        ports = {write.port: write for write in writes}
        begin = 0
        for port in ports:
            data[port] = room[begin : begin + node.types[port].nbytes]
            begin += node.types[port].nbytes
        for part, ins in self._parts(node, results):
            outs = _slices(data, part)
            self._apply(node, part, ins, outs)
            write = ports[largest]
            self._made(write.output, write.at + part.outs[largest][0], outs[largest].data)
        for port, write in ports.items():
            if port != largest:
                self._made(write.output, write.at, data[port])

    def write_whole(
        self,
        step: Compute,
        results: Sequence[memoryview],
        number: int = 0,
        *,
        but: int | None = None,
    ) -> None:
        """Write whole results of one of a step's nodes, in file order; `but` one, which is written."""
        for write in sorted(step.writes, key=self._file_order):
            if write.node == number and write.port != but:
                self._write(write.output, write.at, results[write.port][write.start : write.stop])

    def _file_order(self, write: Write) -> tuple[int, int]:
        place = self._places[write.output]
        return place.file, place.offset + write.at

    def _straight_out(self, step: Compute, number: int, part: Part, port: int) -> Write | None:
        """The write that wants all of one of a part's results, which can then be computed right where
        it is written from."""
        start, stop = part.outs[port][0], part.outs[port][0] + part.outs[port][1].nbytes
        wanted = [
            w
            for w in step.writes
            if w.node == number and w.port == port and max(w.start, start) < min(w.stop, stop)
        ]
        if len(wanted) != 1 or stop - start > self._sink.limit:
            return None
        (write,) = wanted
        whole_part = write.start <= start and stop <= write.stop
        return write if whole_part and not self._places[write.output].linked else None

    def _out_of(self, part: Part, port: int, write: Write) -> Buffer:
        """Return where a result of a part is written from. The sink is not asked for more until it is
        there."""
        start, kind = part.outs[port]
        place, at = self._places[write.output], write.at + start - write.start
        return Buffer(kind, self._sink.room(place.file, place.offset + at, kind.nbytes))

    def _results(self, part: Part) -> list[Buffer]:
        return [Buffer(kind, self._arena.take(kind.nbytes)) for _, kind in part.outs]

    def _apply(self, node: Apply, part: Part, ins: Sequence[Buffer], outs: list[Buffer]) -> None:
        if not self._meter.on:
            self._run(node, part, ins, outs)
            return
        nbytes = sum(buffer.data.nbytes for buffer in (*ins, *outs))
        with self._meter.step(kind_of(node.op), nbytes):
            self._run(node, part, ins, outs)

    def _run(
        self, node: Apply, part: Part, ins: Sequence[Buffer], outs: list[Buffer]
    ) -> list[Buffer]:
        types = tuple([buffer.type for buffer in ins])
        scratch = self._arena.take(scratch_of(node.op, types))
        try:
            counts = node.op.run(ins, outs, scratch)
        except RowError as error:
            where = _place_of(node, part, error)
            wanted = f"wanted for {self._unit.names[0]!r}"
            raise RunError(f"{self._label(node)}: {where}, {wanted}, {error.what}") from error
        except ScaleError as error:
            where = _scale_of(node, part, error)
            raise RunError(f"{self._label(node)}: {where} {error.what}") from error
        except RunError as error:
            raise RunError(f"{self._label(node)}: {error}") from error
        if counts:
            self._remarks.update({(self._label(node), what): n for what, n in counts.items()})
        return outs

    def _label(self, node: Apply) -> str:
        names = dict.fromkeys(source.name for arg in node.args for source in _sources(arg))
        return "tensor " + " with ".join(repr(name) for name in names)

    def _fill(
        self, arg: Output, start: int, into: memoryview, results: Mapping[int, list[Buffer]]
    ) -> None:
        """Assemble bytes of an argument from the sources and earlier results it is made of."""
        if (whole := arg.source) is not None:  # nearly all are
            source, first, _ = whole
            # Of a store each read is a request. Of no bytes is a record, too: once.
            size = max(1, into.nbytes) if self._reader.far else _HASHED_BYTES
            for at in range(0, max(1, into.nbytes), size):
                piece = into[at : at + size]
                self._reader.read(source, first + start + at, piece)
                self._in.feed(source.name, first + start + at, piece)
            return
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
        for start in range(0, data.nbytes, self._sink.limit):
            chunk = data[start : start + self._sink.limit]
            if not place.linked:
                room = self._sink.room(place.file, place.offset + at + start, chunk.nbytes)
                with self._meter.step(COPY, chunk.nbytes):
                    room[:] = chunk
            self._made(output, at + start, chunk)

    def _made(self, output: int, at: int, data: memoryview) -> None:
        """Bytes of an output have come to be, and are on their way."""
        self._out[output].feed(at, data)
        self._runner._progress(data.nbytes)

    def result(self, given: Sequence[dict[str, Any]] | None = None) -> UnitResult:
        """`given` are the source ranges that were read, where somebody else read them."""
        records = []
        read = self._read() if given is None else given
        # All that was read here is of results of one node.
        alone = given is None and self._unit.node is not None
        for i, (name, output) in enumerate(self._unit.outputs):
            place, digest = self._places[i], self._out[i]
            wanted = None if alone else {source.name for source in _sources(output)}
            record = {
                "name": name,
                "dtype": output.type.dtype,
                "shape": list(output.type.shape),
                "file": self._runner._names[place.file],
                "offset": place.offset,
                "nbytes": output.type.nbytes,
                "xxh3": digest.hexdigest() if digest.ordered else self._reread(i),
                "sources": [one for one in read if wanted is None or one["name"] in wanted],
            }
            records.append(_JSON(record))
        return UnitResult(
            tuple(records),
            tuple(f"{label}: {n} {what}" for (label, what), n in self._remarks.items()),
            tuple(sorted({place.file for place in self._places if not place.linked})),
            self._unit.write,
        )

    def _read(self) -> list[dict[str, Any]]:
        (step, *_) = self.steps or (None,)
        if not self._same or not isinstance(step, Copy):
            return self._in.records()
        everything = _range(step.source.name, step.start, step.stop, self._out[0].hexdigest())
        return [everything] if step.start < step.stop else []

    def _reread(self, output: int) -> str:
        """Hash an output that was not written front to back by reading it again."""
        place = self._places[output]
        self._sink.flush()
        left = self._unit.made[output].type.nbytes
        digest = xxhash.xxh3_128()
        at = place.offset
        with self._meter.step(AGAIN, left):
            while left:
                data = self._sink.read(place.file, at, min(left, COPY_BYTES))
                if not data:
                    raise RunError(f"{self._runner._names[place.file]}: ends at byte {at}")
                digest.update(data)
                at, left = at + len(data), left - len(data)
        return digest.hexdigest()


def _place_of(node: Apply, part: Part, error: RowError) -> str:
    """A row (or column) of a part's first argument as the user knows it: of a source tensor, and of
    which expert where the tensor is a stack."""
    arg, (at, _) = node.args[0], part.args[0]
    origin, start, _ = arg.pieces[0]
    if error.by_column:
        stack = isinstance(origin, Source) and len(origin.type.shape) == 3
        which = f"expert {start // origin.type.row_nbytes}, " if stack else ""
        return f"{which}column {error.row}"
    row = error.row + at // arg.type.row_nbytes
    if not isinstance(origin, Source) or len(origin.type.shape) < 2:
        return f"row {row}"
    first = start // arg.type.row_nbytes
    if len(origin.type.shape) == 2:
        return f"row {first + row}"
    expert, first = divmod(start, origin.type.row_nbytes)
    return f"expert {expert}, row {first // arg.type.row_nbytes + row}"


def _scale_of(node: Apply, part: Part, error: ScaleError) -> str:
    """A scale as the user knows it: which block of its weight it is for, by rows and columns of the
    source's grid, and of which expert where that is a stack."""
    arg, (start, kind) = node.args[error.argument], part.args[error.argument]
    width = kind.nbytes // max(1, kind.numel)
    at = start + error.index * width
    origin, first, _ = next(arg.bytes_range(at, at + width))
    shape = origin.type.shape
    if len(shape) < 2:  # one a row, or one an expert of a stack
        shape = (*shape, 1, 1) if len(node.args[0].type.shape) > 2 else (*shape, 1)
    *lead, rows, columns = shape if len(shape) > 1 else (1, 1)
    expert, number = divmod(first // width, rows * columns)
    row, column = divmod(number, columns)
    stack = f"expert {expert}, " if prod(lead) > 1 else ""
    if rows * columns == 1:
        return f"{stack}its scale"
    if columns == 1:
        return f"{stack}row {row}: its scale"
    return f"{stack}block [{row}, {column}]: its scale"


def _slices(results: Sequence[memoryview], part: Part) -> list[Buffer]:
    """The places of a part's results within the whole ones."""
    return [
        Buffer(kind, data[at : at + kind.nbytes])
        for data, (at, kind) in zip(results, part.outs, strict=True)
    ]


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
