"""Tiles of rows in another order: several matrices in one, or one in several.

An order says, for a tile of result rows, which element of the same rows of the arguments goes where.
Every tile has the same order, so its index is built once for a shape, is small enough for a core's
cache, and any run of tiles can be processed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer, Part
from qconvert.ops.base import Exact, array

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Tiles = NDArray[np.uint8]  # [tiles, rows, bytes of a row]


class Order(Protocol):
    """Order of a tile. A frozen dataclass: its repr is part of the op's identity."""

    def __hash__(self) -> int: ...

    @property
    def tile(self) -> int:
        """Rows of the whole that form a tile."""

    @property
    def halves(self) -> int:
        """Matrices that the rows of a tile come from, the same number of rows from each."""

    def width(self, columns: int) -> int:
        """Bytes of an element, for rows of that many bytes: a whole row, or a word of 4. Raises
        PlanError for rows that do not hold whole elements."""

    def index(self, columns: int) -> NDArray[np.intp]:
        """For each element of a tile, its position in the tile's arguments: their rows one
        matrix after another. A permutation."""

    def gather(self, halves: Sequence[Tiles], result: Tiles, spare: Tiles) -> None:
        """Fill tiles of the result, as `index` says, from the same tiles of the matrices. `spare` is
        working memory for one."""


@lru_cache(maxsize=64)
def _inverse(order: Order, columns: int) -> NDArray[np.intp]:
    import numpy as np

    return np.argsort(order.index(columns))


def _columns(kind: TensorType, order: Order, rows: int) -> int:
    """Bytes of a row. Raises PlanError if the matrix does not hold whole tiles."""
    if len(kind.shape) != 2:
        raise PlanError(f"expected a matrix to reorder, found {kind}")
    columns = kind.row_nbytes
    if rows % order.tile:
        raise PlanError(f"expected whole tiles of {order.tile} rows, found {rows} rows ({kind})")
    order.width(columns)
    return columns


def _tiles(data: memoryview, rows: int, columns: int) -> Tiles:
    import numpy as np

    return array(data, np.uint8, (len(data) // (rows * columns), rows, columns))


@dataclass(frozen=True, slots=True)
class Gather(Exact):
    """`order.halves` matrices [R, C] of one type -> one [halves * R, C], tile by tile."""

    order: Order

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        halves, first = self.order.halves, args[0]
        if len(args) != halves or any(arg != first for arg in args):
            found = ", ".join(map(str, args))
            raise PlanError(f"expected {halves} matrices of one type to reorder, found {found}")
        rows = halves * first.shape[0] if first.shape else 0
        _columns(first, self.order, rows)
        return (first.with_rows(rows),)

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        (whole,) = self.infer(*args)
        for start, stop in _runs(whole, self.order, limit):
            pieces = [_rows(arg, start, stop, self.order.halves) for arg in args]
            yield Part(tuple(pieces), (_rows(whole, start, stop),))

    def scratch(self, *args: TensorType) -> int:
        """A tile of rows, where they come from several matrices."""
        return 0 if self.order.halves == 1 else self.order.tile * args[0].row_nbytes

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        order, columns = self.order, ins[0].type.row_nbytes
        halves = [_tiles(b.data, order.tile // order.halves, columns) for b in ins]
        spare = _tiles(scratch, order.tile, columns)
        order.gather(halves, _tiles(outs[0].data, order.tile, columns), spare)
        return {}


@dataclass(frozen=True, slots=True)
class Scatter(Exact):
    """One matrix [M, C] -> `order.halves` matrices [M / halves, C]: the inverse of `Gather`."""

    order: Order

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (whole,) = args
        rows = whole.shape[0] if whole.shape else 0
        _columns(whole, self.order, rows)
        return (whole.with_rows(rows // self.order.halves),) * self.order.halves

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        (whole,) = args
        halves = self.infer(whole)
        for start, stop in _runs(whole, self.order, limit):
            pieces = [_rows(half, start, stop, self.order.halves) for half in halves]
            yield Part((_rows(whole, start, stop),), tuple(pieces))

    def scratch(self, *args: TensorType) -> int:
        """A tile of rows, where they go to several matrices."""
        return 0 if self.order.halves == 1 else self.order.tile * args[0].row_nbytes

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        order, columns = self.order, ins[0].type.row_nbytes
        index = _inverse(order, columns)
        source = _tiles(ins[0].data, order.tile, columns)
        halves = [_tiles(b.data, order.tile // order.halves, columns) for b in outs]
        for number, tile in enumerate(source):
            if len(halves) == 1:
                _take(order, tile, index, halves[0][number])
                continue
            (room,) = _tiles(scratch, order.tile, columns)
            _take(order, tile, index, room)
            parts = room.reshape(len(halves), -1, columns)
            for half, part in zip(halves, parts, strict=True):
                np.copyto(half[number], part)
        return {}


def take_tiles(order: Order, halves: Sequence[Tiles], result: Tiles, spare: Tiles) -> None:
    """`Order.gather` by its index."""
    import numpy as np

    index = order.index(result.shape[-1])
    for number, tile in enumerate(result):
        if len(halves) == 1:
            _take(order, halves[0][number], index, tile)
            continue
        (room,) = spare
        parts = room.reshape(len(halves), -1, room.shape[-1])
        for half, part in zip(halves, parts, strict=True):
            np.copyto(part, half[number])
        _take(order, room, index, tile)


def _take(order: Order, source: Tiles, index: NDArray[np.intp], out: Tiles) -> None:
    """One tile. numpy fills a temporary first if an invalid index may raise; ours are permutations."""
    import numpy as np

    columns = source.shape[-1]
    if order.width(columns) == columns:
        source.take(index, axis=0, out=out, mode="clip")
    else:
        words, room = (tile.reshape(-1).view(np.uint32) for tile in (source, out))
        words.take(index, out=room, mode="clip")


def _runs(whole: TensorType, order: Order, limit: int) -> Iterator[tuple[int, int]]:
    """Rows of the whole in runs of tiles, of about `limit` bytes of arguments and results each."""
    rows = whole.shape[0]
    step = max(1, limit // (2 * order.tile * max(1, whole.row_nbytes))) * order.tile
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _rows(kind: TensorType, start: int, stop: int, divisor: int = 1) -> tuple[int, TensorType]:
    start, stop = start // divisor, stop // divisor
    return start * kind.row_nbytes, kind.with_rows(stop - start)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Order of `halves` matrices side by side: the rows of each in turn, so that [halves * R, C] is
    [R, halves * C] of them."""

    halves: int

    @property
    def tile(self) -> int:
        return self.halves

    def width(self, columns: int) -> int:
        return columns

    def index(self, columns: int) -> NDArray[np.intp]:
        import numpy as np

        return np.arange(self.halves)

    def gather(self, halves: Sequence[Tiles], result: Tiles, spare: Tiles) -> None:
        for number, half in enumerate(halves):
            result[:, number] = half[:, 0]
