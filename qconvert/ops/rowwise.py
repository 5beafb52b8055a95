"""Ops that work row by row, and a chain of them in one read.

Quantizing a matrix looks at a row at a time, and so does decoding one from the form it is stored
in. Chained part by part, a source in any form becomes any format without a bf16 copy of the matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, Op, Output, Part, aligned, whole
from qconvert.core.int_scheme import CodePacker
from qconvert.ops.base import Exact, array
from qconvert.ops.transpose import Columns

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


class RowOp(Op, Protocol):
    """An op whose results' rows each depend on the same row of its arguments' matrix alone."""

    def row_step(self, *args: TensorType) -> int:
        """Rows that must be worked on together: every part but the last starts and ends at a
        multiple of it."""

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        """The part of the work that makes rows [start, stop)."""


class Decoder(RowOp, Protocol):
    """An op that reads a stored matrix as BF16; its first argument has the rows of the matrix, or its
    columns."""

    def cut(
        self, args: tuple[Output, ...], start: int, stop: int, rows: int
    ) -> tuple[Decoder, tuple[Output, ...]]:
        """The op and arguments of rows [start, stop) of a matrix of `rows`. Raises PlanError where rows
        that belong together would part."""


@runtime_checkable
class FloatDecoder(Decoder, Protocol):
    """A decoder that also gives its numbers before they are rounded, for F16 and F32."""

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Floats]]:
        """The first row and the values of tiles of rows [n, K], float32; the next overwrites a tile.
        Raises RowError for a scale of NaN or infinity."""


def with_overflow(decoder: Decoder) -> Decoder:
    """The decoder, which writes what is beyond the dtype as infinite and counts it, where it can."""
    one: Any = decoder  # a dataclass
    return replace(one, overflow=True) if hasattr(one, "overflow") else decoder


class EachRow:
    """An op whose first argument and results, and other arguments that are matrices, have a row for each
    row of the matrix, or `step_rows` for each `row_step` of them; of other arguments it needs all."""

    __slots__ = ()

    def row_step(self, *args: TensorType) -> int:
        return 1

    @property
    def step_rows(self) -> int:
        return 1

    def rows(self: RowOp, start: int, stop: int, *args: TensorType) -> Part:
        count, step = args[0].shape[0], self.row_step(*args)
        if (start, stop) == (0, count):  # whatever rows the results have
            return whole(self, args)
        each = step, self.step_rows if isinstance(self, EachRow) else 1
        taken = [
            _cut(kind, start, stop, count, each) if n == 0 or len(kind.shape) > 1 else (0, kind)
            for n, kind in enumerate(args)
        ]
        made = [_cut(kind, start, stop, count, each) for kind in self.infer(*args)]
        return Part(tuple(taken), tuple(made))

    def parts(self: RowOp, limit: int, *args: TensorType) -> Iterator[Part]:
        kinds = (args[0], *(arg for arg in args[1:] if len(arg.shape) > 1), *self.infer(*args))
        row_bytes = sum(kind.row_nbytes for kind in kinds)
        return row_parts(self, args[0].shape[0], row_bytes, limit, *args)

    def cut(
        self, args: tuple[Output, ...], start: int, stop: int, rows: int
    ) -> tuple[Self, tuple[Output, ...]]:
        step, taken = self.row_step(*[arg.type for arg in args]), [args[0].rows(start, stop)]
        for arg in args[1:]:
            if len(arg.type.shape) > 1:
                one, few = (step, self.step_rows) if arg.type.shape[0] != rows else (1, 1)
                taken.append(arg.rows(start * few // one, ceil_div(stop * few, one)))
            else:
                taken.append(arg)
        return self, tuple(taken)


@dataclass(frozen=True, slots=True)
class Share(EachRow, Exact):
    """Matrix [N, K] of any type -> the columns of share `share` of `of` equal ones, [N, K / of]. Raises
    PlanError for columns that cannot be shared in whole bytes."""

    share: int
    of: int

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (matrix,) = args
        if len(matrix.shape) != 2 or matrix.shape[1] % self.of or matrix.row_nbytes % self.of:
            raise PlanError(
                f"expected a matrix with columns in {self.of} equal shares, found {matrix}"
            )
        return (TensorType(matrix.dtype, (matrix.shape[0], matrix.shape[1] // self.of)),)

    def scratch(self, *args: TensorType) -> int:
        return 0

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        rows, width = ins[0].type.shape[0], outs[0].type.row_nbytes
        lines = array(ins[0].data, np.uint8, (rows, self.of, width))
        array(outs[0].data, np.uint8, (rows, width))[:] = lines[:, self.share]
        return {}


def _cut(
    kind: TensorType, start: int, stop: int, count: int, each: tuple[int, int]
) -> tuple[int, TensorType]:
    """The first byte and the type of rows [start, stop) of `count`, of a tensor that has a row for each,
    or so many for each step: `each` has the rows of a step, and how many it has for them."""
    if kind.shape[0] != count:
        start, stop = start * each[1] // each[0], ceil_div(stop * each[1], each[0])
    return start * kind.row_nbytes, kind.with_rows(stop - start)


def search_loops(op: Op) -> list[str]:
    """The loops that an op, or a chain of them, searches for scales with."""
    chain = (op, *op.encoders) if isinstance(op, Recode) else (op,)
    return [loop for one in chain if (loop := getattr(one, "search_loop", None)) is not None]


def encoded(op: Op, args: Sequence[TensorType]) -> TensorType:
    """The matrix that an op encodes, decoded before by a chain of ops."""
    return op.decoded(*args) if isinstance(op, Recode | Scaled) else args[0]


def row_parts(
    op: RowOp, count: int, row_bytes: int, limit: int, *args: TensorType
) -> Iterator[Part]:
    """Cut `count` rows, each of about `row_bytes` bytes of arguments and results, into parts of about
    `limit` bytes."""
    step = op.row_step(*args)
    height = max(1, limit // max(1, row_bytes * step)) * step
    for start in range(0, count, height):
        yield op.rows(start, min(start + height, count), *args)


@dataclass(frozen=True, slots=True)
class Scaled:
    """Base of ops that decode a matrix [N, K] row by row and encode it with scales of all of it: the
    decoder's arguments (the matrix where there is none) and the scale -> results with a row for each."""

    decoder: RowOp | None

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        raise NotImplementedError

    def own_scratch(self, weight: TensorType) -> int:
        """Working memory of `encode`."""
        raise NotImplementedError

    def encode(
        self, weight: Buffer, scale: Buffer, outs: Sequence[Buffer], scratch: memoryview
    ) -> None:
        """Decoded rows to results."""
        raise NotImplementedError

    def decoded(self, *args: TensorType) -> TensorType:
        return args[0] if self.decoder is None else self.decoder.infer(*args[:-1])[0]

    def row_step(self, *args: TensorType) -> int:
        return 1 if self.decoder is None else self.decoder.row_step(*args[:-1])

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        cut = [
            (start * kind.row_nbytes, kind.with_rows(stop - start)) for kind in self.infer(*args)
        ]
        taken: tuple[tuple[int, TensorType], ...]
        if self.decoder is None:
            taken = ((start * args[0].row_nbytes, args[0].with_rows(stop - start)),)
        else:
            taken = tuple(self.decoder.rows(start, stop, *args[:-1]).args)
        return Part((*taken, (0, args[-1])), tuple(cut))

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        weight = self.decoded(*args)
        return row_parts(self, weight.shape[0], weight.row_nbytes, limit, *args)

    def scratch(self, *args: TensorType) -> int:
        """The decoded rows, where there is a decoder, and what that needs."""
        weight = self.decoded(*args)
        own = self.own_scratch(weight)
        if self.decoder is None:
            return own
        return aligned(weight.nbytes) + max(own, self.decoder.scratch(*args[:-1]))

    def loss(self, *args: TensorType) -> str | None:
        raise NotImplementedError

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        counts: Mapping[str, int] = {}
        weight = ins[0]
        if self.decoder is not None:
            args = [b.type for b in ins[:-1]]
            (kind,) = self.decoder.infer(*args)
            weight = Buffer(kind, scratch[: kind.nbytes])
            scratch = scratch[aligned(kind.nbytes) :]
            counts = self.decoder.run(ins[:-1], [weight], scratch[: self.decoder.scratch(*args)])
        self.encode(weight, ins[-1], outs, scratch)
        return counts


def lost_at(
    ports: Set[int],
    decoder: Op | None,
    encoders: Sequence[Op | CodePacker],
    args: Sequence[TensorType],
    how: str = "",
) -> str | None:
    """Return what a decoder loses, and those encoders after it that make results at `ports`. `how` ends
    what is said of each encoder."""
    decoded = args[0] if decoder is None else decoder.infer(*args)[0]
    found = [] if decoder is None else [decoder.loss(*args)]
    first = 0
    for encoder in encoders:
        stop = first + len(encoder.infer(decoded))
        if not ports.isdisjoint(range(first, stop)) and (lost := encoder.loss(decoded)):
            found.append(lost + how)
        first = stop
    return "; ".join(filter(None, found)) or None


@dataclass(frozen=True, slots=True)
class Recode:
    """Decode a matrix [N, K] to BF16 and encode it again: the decoder's arguments -> the encoders'
    results, one encoder's after another's. Without a decoder the argument is BF16 already.

    Raises PlanError and RunError as its ops do.
    """

    decoder: RowOp | None
    encoders: tuple[RowOp, ...]

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        decoded = self.decoded(*args)
        return tuple(kind for encoder in self.encoders for kind in encoder.infer(decoded))

    def decoded(self, *args: TensorType) -> TensorType:
        return args[0] if self.decoder is None else self.decoder.infer(*args)[0]

    def row_step(self, *args: TensorType) -> int:
        decoded = self.decoded(*args)
        first = 1 if self.decoder is None else self.decoder.row_step(*args)
        return lcm(first, *(encoder.row_step(decoded) for encoder in self.encoders))

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        decoded = self.decoded(*args)
        outs = [out for e in self.encoders for out in e.rows(start, stop, decoded).outs]
        if self.decoder is None:
            return Part(self.encoders[0].rows(start, stop, decoded).args, tuple(outs))
        return Part(self.decoder.rows(start, stop, *args).args, tuple(outs))

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        """Rows of BF16 count, whether they are an argument or lie between the ops."""
        decoded = self.decoded(*args)
        row_bytes = 2 * decoded.numel // max(1, decoded.shape[0])
        return row_parts(self, decoded.shape[0], row_bytes, limit, *args)

    def scratch(self, *args: TensorType) -> int:
        """The decoded rows, where there is a decoder, and what the hungriest op needs."""
        decoded = self.decoded(*args)
        most = max(encoder.scratch(decoded) for encoder in self.encoders)
        if self.decoder is None:
            return most
        return aligned(decoded.nbytes) + max(most, self.decoder.scratch(*args))

    @property
    def several(self) -> bool:
        return len(self.encoders) > 1

    def loss(self, *args: TensorType) -> str | None:
        return self.loss_of(frozenset(range(len(self.infer(*args)))), *args)

    def loss_of(self, ports: Set[int], *args: TensorType) -> str | None:
        return lost_at(ports, self.decoder, self.encoders, args)

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        if self.decoder is None and not self.several:
            return self.encoders[0].run(ins, outs, scratch)
        needs = _needs_of(self, tuple([one.type for one in ins]))
        counts: Counter[str] = Counter()
        matrix = ins[0]
        if self.decoder is not None:
            matrix = Buffer(needs.decoded, scratch[: needs.decoded.nbytes])
            scratch = scratch[aligned(needs.decoded.nbytes) :]
            counts.update(self.decoder.run(ins, [matrix], scratch[: needs.decoding]))
        at = 0
        for encoder, (results, need) in zip(self.encoders, needs.encoding, strict=True):
            try:
                counts.update(encoder.run([matrix], outs[at : at + results], scratch[:need]))
            except RowError as error:
                if isinstance(self.decoder, Columns):
                    column = self.decoder.first + error.row
                    raise RowError(column, error.what, by_column=True) from error
                raise
            at += results
        return counts


class _Needs(NamedTuple):
    """Types within a chain: what it decodes to, the working memory of decoding, and of each encoder how
    many results it has and its working memory."""

    decoded: TensorType
    decoding: int
    encoding: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def _needs_of(op: Recode, args: tuple[TensorType, ...]) -> _Needs:
    """Remembered: it is asked for with each part of a matrix, and a model has few shapes."""
    decoded = op.decoded(*args)
    return _Needs(
        decoded,
        0 if op.decoder is None else op.decoder.scratch(*args),
        tuple([(len(one.infer(decoded)), one.scratch(decoded)) for one in op.encoders]),
    )
