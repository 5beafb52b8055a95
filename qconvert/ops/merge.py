"""Additions of adapters to a matrix, in float32, as a part of how the matrix is read.

    LoRA   W + L R         L [N, r] = scale * B, R [r, K] = A
    DoRA   m * (W + L R) / |W + L R|, the norm of each row
    delta  W + scale * D

A sum over ranks is taken in their order, product by product, whatever part of the matrix is worked on:
its bits depend on no machine's matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer, Output, Part, aligned
from qconvert.ops.base import Exact, Uncut, array
from qconvert.ops.cast import FLOAT_DTYPES, TILE_ELEMENTS, RoundedTiles, decode, float_tiles
from qconvert.ops.rowwise import FloatDecoder, row_parts

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s

How = Literal["lora", "dora", "delta"]
_ARGS: Mapping[How, int] = {"lora": 2, "dora": 3, "delta": 1}


@dataclass(frozen=True, slots=True)
class Block:
    """Place of an argument in a `Factor`: its rows, in order, are rows `runs` of the result, and its
    columns begin at column `at` there. First every `step`-th of its columns is taken, from `first` on,
    and multiplied by `scale`, and then it is transposed, where it is stored so."""

    runs: tuple[tuple[int, int], ...]
    at: int = 0
    scale: float = 1.0
    first: int = 0
    step: int = 1
    transposed: bool = False

    def taken(self, kind: TensorType) -> tuple[int, int]:
        """Rows and columns of what is placed."""
        rows, columns = kind.shape[0], len(range(self.first, kind.shape[1], self.step))
        return (columns, rows) if self.transposed else (rows, columns)


@dataclass(frozen=True, slots=True)
class Factor(Uncut, Exact):
    """Matrices in floats -> F32 [rows, columns] that holds each in its `Block`, elsewhere 0, or NaN
    where `unset`. Raises PlanError for an argument that does not fit its block."""

    rows: int
    columns: int
    blocks: tuple[Block, ...]
    unset: bool = False

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        for kind, block in zip(args, self.blocks, strict=True):
            if kind.dtype not in FLOAT_DTYPES or len(kind.shape) != 2:
                raise PlanError(f"expected a matrix of numbers from an adapter, found {kind}")
            rows, columns = block.taken(kind)
            height = sum(stop - start for start, stop in block.runs)
            within = all(0 <= start <= stop <= self.rows for start, stop in block.runs)
            if rows != height or not within or block.at + columns > self.columns:
                raise PlanError(
                    f"expected {height} rows for [{self.rows}, {self.columns}], found {rows} of {kind}"
                )
        return (TensorType("F32", (self.rows, self.columns)),)

    def scratch(self, *args: TensorType) -> int:
        """The largest argument twice as float32."""
        return 2 * max(aligned(4 * kind.numel) for kind in args)

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        target = array(outs[0].data, np.float32, (self.rows, self.columns))
        target.fill(nan if self.unset else 0)
        for one, block in zip(ins, self.blocks, strict=True):
            values = _numbers(one, scratch)
            values = values[:, block.first :: block.step]
            values = values.T if block.transposed else values
            at = 0
            for start, stop in block.runs:
                part = values[at : at + stop - start]
                np.multiply(
                    part, np.float32(block.scale),
                    out=target[start:stop, block.at : block.at + part.shape[1]],
                )  # fmt: skip
                at += stop - start
        return {}


def _numbers(one: Buffer, scratch: memoryview) -> Float32s:
    """A matrix as float32, in the first half of the scratch."""
    import numpy as np

    size = 4 * one.type.numel
    values = array(scratch[:size], np.float32, one.type.shape)
    half = len(scratch) // 2
    decode(
        one.data,
        one.type.dtype,
        values,
        array(scratch[half : half + size], np.int32, one.type.shape),
    )
    return values


@dataclass(frozen=True, slots=True)
class Merge(RoundedTiles):
    """Arguments of a decoder of [N, K] (None: the matrix itself, in floats), then of what is added:
    `lora` L F32 [N, r] and R F32 [r, K], `dora` these and magnitudes F32 [N, 1] (NaN: of no DoRA),
    `delta` D [N, K] in floats -> BF16 [N, K], rounded once.

    Raises PlanError where they do not fit, RowError as the decoder does and for a sum beyond bf16.
    """

    # About a sum that the model's own dtype has no room for.
    cure: ClassVar[str] = (
        "it is the sum with an adapter: give a smaller --scale, or leave that one out"
    )

    decoder: FloatDecoder | None
    how: How
    scale: float = 1.0

    @property
    def _own(self) -> int:
        return _ARGS[self.how]

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        kind = self._weight(args)
        rows, columns = kind.shape
        added = args[-self._own :]
        if self.how == "delta":
            fits = added[0].shape == kind.shape and added[0].dtype in FLOAT_DTYPES
        else:
            rank = added[0].shape[-1]
            wanted = [(rows, rank), (rank, columns), (rows, 1)]
            fits = all(
                one == TensorType("F32", shape) for one, shape in zip(added, wanted, strict=False)
            )
        if not fits:
            found = ", ".join(map(str, added))
            raise PlanError(f"expected what is added to [{rows}, {columns}], found {found}")
        return (TensorType("BF16", kind.shape),)

    def _weight(self, args: Sequence[TensorType]) -> TensorType:
        if self.decoder is not None:
            return self.decoder.infer(*args[: -self._own])[0]
        if (
            len(args) != self._own + 1
            or args[0].dtype not in FLOAT_DTYPES
            or len(args[0].shape) != 2
        ):
            raise PlanError(f"expected a matrix of numbers to add to, found {args[0]}")
        return args[0]

    def row_step(self, *args: TensorType) -> int:
        return 1 if self.decoder is None else self.decoder.row_step(*args[: -self._own])

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        inner, added = args[: -self._own], args[-self._own :]
        (kind,) = self.infer(*args)
        if self.decoder is not None:
            taken = self.decoder.rows(start, stop, *inner).args
        else:
            taken = (_cut(inner[0], start, stop),)
        beside = [(0, one) if n == 1 else _cut(one, start, stop) for n, one in enumerate(added)]
        return Part((*taken, *beside), (_cut(kind, start, stop),))

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        rows, columns = self._weight(args).shape
        return row_parts(self, rows, 6 * columns, limit, *args)

    def cut(
        self, args: tuple[Output, ...], start: int, stop: int, rows: int
    ) -> tuple[Merge, tuple[Output, ...]]:
        inner, added = args[: -self._own], args[-self._own :]
        decoder: Any = None
        if self.decoder is not None:
            decoder, inner = self.decoder.cut(inner, start, stop, rows)
        else:
            inner = (inner[0].rows(start, stop),)
        beside = [one if n == 1 else one.rows(start, stop) for n, one in enumerate(added)]
        return Merge(decoder, self.how, self.scale), (*inner, *beside)

    def scratch(self, *args: TensorType) -> int:
        """Working memory of the decoder and a tile's copy; some tiles are allocated."""
        columns = self._weight(args).shape[1]
        own = aligned(8 * max(TILE_ELEMENTS, columns))
        return own + (self.decoder.scratch(*args[: -self._own]) if self.decoder is not None else 0)

    def loss(self, *args: TensorType) -> str | None:
        """Return that of the decoder's format, and the rounding of the sum."""
        return "adds an adapter in fp32 and rounds once to bf16 (relative error at most 2^-9)"

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
        import numpy as np

        inner, added = ins[: -self._own], ins[-self._own :]
        own = aligned(8 * max(TILE_ELEMENTS, self._weight([one.type for one in ins]).shape[1]))
        if self.decoder is not None:
            tiles = self.decoder.floats(inner, scratch[own:])
        else:
            tiles = _tiles(inner[0], scratch[: own // 2])
        if self.how == "delta":
            for start, values in tiles:
                part = _rows_of(added[0], start, start + values.shape[0])
                values = np.array(values)  # a decoder's may be its own
                values += np.float32(self.scale) * _decoded(part)
                yield start, values
            return
        left, right = (array(one.data, np.float32, one.type.shape) for one in added[:2])
        for start, values in tiles:
            stop = start + values.shape[0]
            values = values + product(left[start:stop], right)
            if self.how == "dora":
                wanted = array(added[2].data, np.float32, added[2].type.shape)[start:stop]
                norm = np.sqrt(np.square(values, dtype=np.float64).sum(axis=1, keepdims=True))
                with np.errstate(all="ignore"):
                    factor = (wanted / norm).astype(np.float32)
                values = np.where(np.isnan(wanted), values, values * factor)
            yield start, values


def product(left: Float32s, right: Float32s) -> Float32s:
    """[n, r] times [r, K], a rank after another."""
    import numpy as np

    total = np.zeros((left.shape[0], right.shape[1]), np.float32)
    spare = np.empty_like(total)
    for rank in range(left.shape[1]):
        np.multiply(left[:, rank : rank + 1], right[rank], out=spare)
        np.add(total, spare, out=total)
    return total


def _cut(kind: TensorType, start: int, stop: int) -> tuple[int, TensorType]:
    return start * kind.row_nbytes, kind.with_rows(stop - start)


def _rows_of(one: Buffer, start: int, stop: int) -> Buffer:
    at, kind = _cut(one.type, start, stop)
    return Buffer(kind, one.data[at : at + kind.nbytes])


def _decoded(one: Buffer) -> Float32s:
    import numpy as np

    values = np.empty(one.type.shape, np.float32)
    decode(one.data, one.type.dtype, values, np.empty(one.type.shape, np.int32))
    return values


def _tiles(one: Buffer, scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
    """A matrix of numbers as float32, some rows at a time."""
    import numpy as np

    for start, stop in float_tiles(*one.type.shape):
        part = _rows_of(one, start, stop)
        spare = array(scratch[: 4 * part.type.numel], np.int32, part.type.shape)
        values = np.empty(part.type.shape, np.float32)
        decode(part.data, part.type.dtype, values, spare)
        yield start, values
