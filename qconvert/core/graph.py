"""The lazy graph: what an output is made of, before any byte is read.

Bytes come from two places: a `Source` (a tensor in a shard) or a `Value` (one port of an `Apply`).
An `Output` is a dtype, a shape and the contiguous byte ranges, in order, that fill it. Cutting rows
out of a tensor, stacking experts and fusing projections are therefore only lists of ranges: they
cost no arithmetic, and nothing larger than the range has to be read. An op's argument is assembled
in just the same way, so it too is an `Output`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

from qconvert.core.dtypes import Shape, TensorType
from qconvert.core.errors import PlanError


@dataclass(slots=True, unsafe_hash=True)
class Source:
    """A tensor as a shard stores it. `shard` indexes Checkpoint.shards; `offset` is in bytes from
    the start of that file. Never changed; not `frozen`, as other classes of which a plan makes hundreds
    of thousands are not, because a frozen one takes 0.5 us to make instead of 0.13."""

    name: str
    type: TensorType
    shard: int
    offset: int

    @property
    def output(self) -> Output:
        """This tensor, whole, as an output."""
        return Output.of(self.type, self, 0, self.type.nbytes)

    def rows(self, start: int, stop: int) -> Output:
        """Rows [start, stop) of the first dimension: a contiguous range, so it costs nothing."""
        return self.output.rows(start, stop)


class Part(NamedTuple):
    """A slice of an op's work that can be computed alone: for each argument and each result, the
    byte it starts at within the whole and the type of the slice."""

    args: tuple[tuple[int, TensorType], ...]
    outs: tuple[tuple[int, TensorType], ...]


ALIGNMENT = 64  # of every buffer: a cache line, and enough for any dtype


def aligned(size: int) -> int:
    """`size` in bytes, rounded up to a whole number of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Buffer(NamedTuple):
    """Bytes with a type; `data` is a writable, contiguous memoryview of exactly `type.nbytes`."""

    type: TensorType
    data: memoryview


@runtime_checkable
class Op(Protocol):
    """Tensors in, tensors out. An op is a frozen dataclass: its repr is its identity in plans,
    fingerprints and journals, so every field that changes a bit of its result must show in it."""

    def __hash__(self) -> int: ...

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        """Types of the results. Reads nothing; raises PlanError where the arguments do not fit."""

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        """Cut the work into parts of about `limit` bytes of arguments and results, in ascending
        order of every result's bytes, covering each once. An op that cannot be cut yields one
        part. The result must not depend on `limit`."""

    def scratch(self, *args: TensorType) -> int:
        """Bytes of working memory `run` needs for arguments of these types."""

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        """Compute one part into `outs`, allocating nothing large. Returns counts of what the user
        should be told ({"NaN codes": 3}), which are added up over parts; raises RunError for invalid
        data."""

    def loss(self, *args: TensorType) -> str | None:
        """Return what is lost, as one phrase, or None if the step is exact."""


@runtime_checkable
class Several(Protocol):
    """An op that can make several things of one argument, each lossy in its own way, and not all of them
    for one folder."""

    @property
    def several(self) -> bool:
        """Return whether this one does."""

    def loss_of(self, ports: Set[int], *args: TensorType) -> str | None:
        """As `Op.loss`, for these results."""


def whole(op: Op, args: Sequence[TensorType]) -> Part:
    """The one part of an op that is not cut."""
    return Part(tuple((0, t) for t in args), tuple((0, t) for t in op.infer(*args)))


@dataclass(slots=True, eq=False)
class Apply:
    """An op applied to arguments. Compared by identity: one node is one computation. Nodes that `apply`
    made of equal ops on equal types have one `op` and one `types` between them: what is true of all of
    them can be remembered by the identity of `types`."""

    op: Op
    args: tuple[Output, ...]
    types: tuple[TensorType, ...]
    # Whether all arguments are read from sources: asked for each result, by each walk over a plan.
    reads_sources: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        read = True
        for arg in self.args:  # a generator in `all` takes twice as long
            read = read and arg.reads_sources
        self.reads_sources = read


@dataclass(frozen=True, slots=True)
class Value:
    """Port `port` of a node's results. Nodes are compared by identity."""

    node: Apply
    port: int

    @property
    def type(self) -> TensorType:
        return self.node.types[self.port]

    @property
    def output(self) -> Output:
        """This result, whole, as an output."""
        return Output.whole(self.node, self.port)


class Piece(NamedTuple):
    """Bytes [start, stop) of an origin."""

    origin: Source | Value
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def _merge(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Drop empty pieces and join neighbours that continue one another, so that taking a tensor
    apart and putting it together again gives back the one piece it was."""
    merged: list[Piece] = []
    for piece in pieces:
        if piece.start == piece.stop:
            continue
        if merged:
            last = merged[-1]
            if last.stop == piece.start and last.origin == piece.origin:
                merged[-1] = Piece(last.origin, last.start, piece.stop)
                continue
        merged.append(piece)
    return tuple(merged)


@lru_cache(maxsize=4096)
def _rows(kind: TensorType, start: int, stop: int) -> tuple[TensorType, int, int]:
    """The type of rows [start, stop), and their bytes. Raises PlanError outside the tensor."""
    if not kind.shape or not 0 <= start <= stop <= kind.shape[0]:
        raise PlanError(f"rows [{start}, {stop}) lie outside {kind}")
    size = kind.row_nbytes
    return kind.with_rows(stop - start), start * size, stop * size


class Output:
    """A tensor that shall exist: its type, and the byte ranges that fill it in order. Never changed.

    Nearly all are one range of a source, or the whole of a result. Those are kept without the tuple, the
    Piece and the Value around them, in 64 bytes for 240: a plan of Kimi-K2 to AMX has 510,000."""

    __slots__ = ("_first", "_from", "_last", "type")

    type: TensorType
    # Bytes [_first, _last) of a source; result number `_first` of a node; or pieces.
    _from: Source | Apply | tuple[Piece, ...]
    _first: int
    _last: int

    def __init__(self, type: TensorType, pieces: tuple[Piece, ...]) -> None:
        self.type, self._from, self._first, self._last = type, pieces, 0, 0
        if len(pieces) == 1:
            origin, start, stop = pieces[0]
            if isinstance(origin, Source):
                self._from, self._first, self._last = origin, start, stop
            elif start == 0 and stop == origin.type.nbytes:
                self._from, self._first, self._last = origin.node, origin.port, stop

    @classmethod
    def of(cls, type: TensorType, source: Source, start: int, stop: int) -> Output:
        """Bytes [start, stop) of a source."""
        made = cls.__new__(cls)
        made.type, made._from, made._first, made._last = type, source, start, stop
        return made

    @classmethod
    def whole(cls, node: Apply, port: int) -> Output:
        """A node's result."""
        made = cls.__new__(cls)
        made.type, made._from, made._first = node.types[port], node, port
        made._last = made.type.nbytes
        return made

    @property
    def pieces(self) -> tuple[Piece, ...]:
        origin = self._from
        if isinstance(origin, tuple):
            return origin
        if isinstance(origin, Source):
            return (Piece(origin, self._first, self._last),)
        return (Piece(Value(origin, self._first), 0, self._last),)

    @property
    def sources(self) -> Sequence[tuple[Source, int, int]]:
        """The ranges that are of sources. (`pieces` makes two objects for a result, this none.)"""
        origin = self._from
        if isinstance(origin, Source):
            return ((origin, self._first, self._last),)
        if isinstance(origin, tuple):
            return [(o, start, stop) for o, start, stop in origin if isinstance(o, Source)]
        return ()

    @property
    def results(self) -> Sequence[tuple[Apply, int, int, int]]:
        """The ranges that are of results: node, number of its result, first byte, end."""
        origin = self._from
        if isinstance(origin, Apply):
            return ((origin, self._first, 0, self._last),)
        if isinstance(origin, tuple):
            return [(o.node, o.port, at, end) for o, at, end in origin if isinstance(o, Value)]
        return ()

    @property
    def filled(self) -> int:
        """Bytes of all its ranges."""
        if isinstance(self._from, tuple):
            return sum([stop - start for _, start, stop in self._from])
        return self._last if isinstance(self._from, Apply) else self._last - self._first

    @property
    def result(self) -> tuple[Apply, int] | None:
        """The node and the number of its result that this is the whole of, if it is one."""
        return (self._from, self._first) if isinstance(self._from, Apply) else None

    @property
    def source(self) -> tuple[Source, int, int] | None:
        """The range of a source that this is, if it is one."""
        origin = self._from
        return (origin, self._first, self._last) if isinstance(origin, Source) else None

    @property
    def node(self) -> Apply | None:
        """The node that this is a whole result of, if it is one."""
        return self._from if isinstance(self._from, Apply) else None

    @property
    def reads_sources(self) -> bool:
        """Return whether no byte of it is computed."""
        origin = self._from
        if isinstance(origin, tuple):
            return not any(isinstance(piece.origin, Value) for piece in origin)
        return isinstance(origin, Source)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Output):
            return NotImplemented
        return self.type == other.type and self.pieces == other.pieces

    def __hash__(self) -> int:
        return hash((self.type, self.pieces))

    def __repr__(self) -> str:
        return f"Output(type={self.type!r}, pieces={self.pieces!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Output, (self.type, self.pieces)

    def bytes_range(self, start: int, stop: int) -> Iterator[Piece]:
        """The pieces that fill bytes [start, stop) of this tensor."""
        at = 0
        for piece in self.pieces:
            end = at + piece.nbytes
            if end > start and at < stop:
                low, high = max(start, at), min(stop, end)
                yield Piece(piece.origin, piece.start + low - at, piece.start + high - at)
            at = end
            if at >= stop:
                return

    def rows(self, start: int, stop: int) -> Output:
        """Rows [start, stop) of the first dimension. Raises PlanError outside the tensor."""
        kind, first, last = _rows(self.type, start, stop)
        if isinstance(self._from, Source) and first != last:  # most are cut from a source
            return Output.of(kind, self._from, self._first + first, self._first + last)
        return Output(kind, _merge(self.bytes_range(first, last)))

    def index(self, i: int) -> Output:
        """Entry i of the first dimension, that dimension taken away: expert i of [E, N, K]."""
        return self.rows(i, i + 1).reshape(self.type.shape[1:])

    def reshape(self, shape: Shape) -> Output:
        """The same bytes under another shape. Raises PlanError where the counts differ."""
        return Output(self.type.with_shape(shape), self.pieces)


def concat(outputs: Sequence[Output]) -> Output:
    """Join along the first dimension. All inner dimensions and dtypes must agree, else PlanError."""
    if not outputs:
        raise PlanError("no tensors to join")
    first = outputs[0].type
    for other in outputs[1:]:
        if other.type.dtype != first.dtype or other.type.shape[1:] != first.shape[1:]:
            raise PlanError(f"cannot join {other.type} to {first}: inner sizes or dtypes differ")
    rows = sum(output.type.shape[0] for output in outputs)
    return Output(
        first.with_rows(rows), _merge(piece for output in outputs for piece in output.pieces)
    )


def stack(outputs: Sequence[Output]) -> Output:
    """Join along a new first dimension: E matrices [N, K] -> [E, N, K]. All types must agree."""
    return concat([output.reshape((1, *output.type.shape)) for output in outputs])


_new = Output.__new__


def apply(op: Op, *args: Output) -> tuple[Output, ...]:
    """Apply an op lazily. Returns one output per result; raises PlanError as `op.infer` does."""
    known, types = inferred(op, tuple([arg.type for arg in args]))
    node = Apply(known, args, types)
    made = []
    for port, kind in enumerate(
        types
    ):  # as Output.whole, of which a plan has a quarter of a million
        one = _new(Output)
        one.type, one._from, one._first, one._last = kind, node, port, kind.nbytes
        made.append(one)
    return tuple(made)


# A model has few shapes and many tensors: what an op makes of them is asked once.
@lru_cache(maxsize=4096)
def inferred(op: Op, args: tuple[TensorType, ...]) -> tuple[Op, tuple[TensorType, ...]]:
    """The op, or one equal to it, and the types of its results. Raises PlanError as `op.infer` does."""
    return op, (*op.infer(*args),)  # a tuple of its own, which no other op has


def nodes(outputs: Iterable[Output]) -> Iterator[Apply]:
    """Every node the outputs depend on, arguments before users, each once."""
    seen: set[int] = set()
    for output in outputs:
        alone = output.node
        if alone is not None and id(alone) in seen:
            continue
        alone = only_node(output)
        if alone is not None:
            if id(alone) not in seen:
                seen.add(id(alone))
                yield alone
            continue
        stack: list[tuple[Apply, bool]] = [
            (piece.origin.node, False)
            for piece in output.pieces
            if isinstance(piece.origin, Value) and id(piece.origin.node) not in seen
        ]
        while stack:
            node, ready = stack.pop()
            if ready:
                yield node
            elif id(node) not in seen:
                seen.add(id(node))
                stack.append((node, True))
                stack.extend(
                    (piece.origin.node, False)
                    for arg in node.args
                    for piece in arg.pieces
                    if isinstance(piece.origin, Value)
                )


def only_node(output: Output) -> Apply | None:
    """The node that an output depends on, if there is but one, which reads sources, and the output is
    in one piece."""
    node = output.node
    if node is None:
        if output.source is not None or len(output.pieces) != 1:
            return None
        origin = output.pieces[0].origin
        node = origin.node if isinstance(origin, Value) else None
    return node if node is not None and node.reads_sources else None


def ports(outputs: Iterable[Output], order: Iterable[Apply]) -> dict[int, frozenset[int]]:
    """By a node's identity, which of its results are used: by outputs, or by the other nodes."""
    args = (arg for node in order for arg in node.args)
    found: dict[int, set[int]] = {}
    for output in itertools.chain(outputs, args):
        for node, port, _, _ in output.results:
            found.setdefault(id(node), set()).add(port)
    return {node: frozenset(ports) for node, ports in found.items()}
