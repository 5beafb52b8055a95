"""Tiles of AMXINT4 and AMXINT8 for another number of NUMA nodes, made of tiles alone.

Gate and up are cut into NUMA shards by rows, a whole number of the blocks that rows are stored in, so
their bytes only move (passes/recut.py). Down is cut by columns, and each of its shards has a scale of
its own for each row. A new shard that lies within one old shard keeps its codes and its scales; one that
spans several has one scale a row in their place, the largest of theirs: where it spans them whole, the
one that kt-kernel's converter would give it, since a scale rises with the largest weight that it stands
for. Codes under that scale stay, others are rounded to it:

    d = max of the shards' scales      code' = round to even of fp32(code * fp32(scale / d))

So cutting finer, and back, gives the bytes that there were; cutting coarser moves a weight by at most
half a new step from what it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, Part
from qconvert.formats.amx.format import BITS, RUNTIME_NAME, STEP, Method
from qconvert.formats.amx.tiles import CELL_BYTES, K_BLOCK, TILE_ROWS
from qconvert.ops.base import array
from qconvert.ops.rowwise import row_parts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Cells = NDArray[np.uint8]  # [blocks of rows, tiles of 32 rows, K steps, CELL_BYTES]
    Floats = NDArray[np.float32]

_NO_SCALE = "has a scale that is not finite, or below 0"


class _Run(NamedTuple):
    """K steps that lie side by side in an old and in a new shard: the old shard, the first step there
    and in the new one, and how many."""

    shard: int
    old: int
    new: int
    steps: int


@dataclass(frozen=True, slots=True)
class Recut:
    """Packed I8 [N * K/before * bits/8] and scale F32 [N] of each of `before` shards of a matrix [N, K]
    that is cut by columns -> the same of each of `after`.

    Raises PlanError for shards that are not alike, and for widths the kernels cannot hold; RowError for
    a scale that is NaN, infinite or below 0.
    """

    method: Method
    before: int
    after: int

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        weight, scale = args[:2]
        if args != (weight, scale) * self.before or scale.dtype != "F32" or len(scale.shape) != 1:
            found = ", ".join(map(str, args))
            raise PlanError(
                f"expected codes and scales of {self.before} NUMA shards alike, found {found}"
            )
        rows, step = scale.shape[0], STEP[self.method]
        bits = BITS[self.method] * self.after * step
        columns = weight.nbytes * self.before * 8 // (BITS[self.method] * max(1, rows))
        if weight.dtype != "I8" or rows % step or columns * rows * bits == 0:
            raise PlanError(f"expected AMX tiles of rows in multiples of {step}, found {weight}")
        if columns % (self.after * step) or columns % (self.before * step):
            raise PlanError(
                f"expected columns in multiples of {step} ({RUNTIME_NAME[self.method]}) for "
                f"{self.before} and for {self.after} NUMA shards, found {columns}"
            )
        nbytes = rows * (columns // self.after) * BITS[self.method] // 8
        return (TensorType("I8", (nbytes,)), scale) * self.after

    def row_step(self, *args: TensorType) -> int:
        """Rows that are stored together."""
        return STEP[self.method]

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        count = args[1].shape[0]

        def part(kind: TensorType) -> tuple[int, TensorType]:
            size = (stop - start) * kind.shape[0] // count
            return start * kind.nbytes // count, TensorType(kind.dtype, (size,))

        return Part(tuple(map(part, args)), tuple(map(part, self.infer(*args))))

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        rows = args[1].shape[0]
        size = sum(kind.nbytes for kind in (*args, *self.infer(*args))) // rows
        yield from row_parts(self, rows, size, limit, *args)

    def scratch(self, *args: TensorType) -> int:
        """Codes of a tile of rows as float32, where some are rounded, and as bytes."""
        if not self.rounds:
            return 0
        steps = min(K_BLOCK // STEP[self.method], self._steps(args)[0])
        return 6 * CELL_BYTES * steps

    @property
    def rounds(self) -> bool:
        """Return whether a new shard spans several old ones."""
        return self.after % self.before != 0

    def loss(self, *args: TensorType) -> str | None:
        if not self.rounds:
            return None
        return (
            f"rounds down_proj of experts again, to scales of {self.after} NUMA shards in place of "
            f"{self.before} ({RUNTIME_NAME[self.method]})"
        )

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        types = [one.type for one in ins]
        old, new = self._steps(types)
        rows = types[1].shape[0]
        scales = [array(one.data, np.float32, (rows,)) for one in ins[1::2]]
        for scale in scales:
            wrong = ~((scale >= 0) & (scale < np.inf))
            if wrong.any():
                raise RowError(int(np.argmax(wrong)), _NO_SCALE)
        for number in range(self.after):
            runs = list(_runs(number * new, new, old, K_BLOCK // STEP[self.method]))
            spanned = sorted({run.shard for run in runs})
            step = np.maximum.reduce([scales[shard] for shard in spanned])
            array(outs[2 * number + 1].data, np.float32, (rows,))[:] = step
            for run in runs:
                source = self._cells(ins[2 * run.shard].data, old, run.old, run.steps)
                target = self._cells(outs[2 * number].data, new, run.new, run.steps)
                if len(spanned) == 1:
                    np.copyto(target, source)
                    continue
                own = scales[run.shard]
                ratio = np.divide(own, step, out=np.zeros_like(own), where=step > 0)
                self._round(source, target, ratio, scratch)
        return {}

    def _steps(self, args: Sequence[TensorType]) -> tuple[int, int]:
        """K steps of an old and of a new shard."""
        whole = args[0].nbytes * self.before // (args[1].shape[0] * _LINE)
        return whole // self.before, whole // self.after

    def _cells(self, data: memoryview, steps: int, first: int, count: int) -> Cells:
        """K steps [first, first + count) of a shard that has `steps`, all of one K block."""
        import numpy as np

        step = STEP[self.method]
        tiles, most = step // TILE_ROWS, K_BLOCK // step
        begin = first // most * most
        wide = min(most, steps - begin)
        blocks = array(data, np.uint8, (len(data) // (tiles * steps * CELL_BYTES), -1, CELL_BYTES))
        block = blocks[:, tiles * begin : tiles * (begin + wide)]
        cells = block.reshape(-1, tiles, wide, CELL_BYTES)
        return cells[:, :, first - begin : first - begin + count]

    def _round(self, source: Cells, target: Cells, ratio: Floats, scratch: memoryview) -> None:
        """Codes times the ratio of their row, rounded, a tile of rows at a time."""
        import numpy as np

        blocks, tiles, count, _ = source.shape
        shape = count, 2, 16, 16, 4  # half of the rows, word, row, byte
        size = count * CELL_BYTES
        values = array(scratch[: 4 * size], np.float32, shape)
        codes = array(scratch[4 * size : 5 * size], np.int8, shape)
        spare = array(scratch[5 * size : 6 * size], np.int8, shape)
        of_rows = ratio.reshape(blocks, tiles, 2, 1, 16, 1)
        for block, tile in np.ndindex(blocks, tiles):
            found = np.ascontiguousarray(source[block, tile]).view(np.int8).reshape(shape)
            factor = of_rows[block, tile]

            def rounded(part: NDArray[np.int8], factor: Floats = factor) -> NDArray[np.int8]:
                np.multiply(part, factor, out=values)
                np.rint(values, out=values)
                np.copyto(codes, values, casting="unsafe")
                return codes

            if self.method == "int8":
                made = rounded(found)
            else:  # two codes a byte, the first in the low half
                np.left_shift(found, 4, out=spare)
                np.right_shift(spare, 4, out=spare)
                np.bitwise_and(rounded(spare), 15, out=spare)
                high = rounded(np.right_shift(found, 4))
                np.left_shift(high, 4, out=high)
                made = np.bitwise_or(high, spare, out=codes)
            target[block, tile] = made.view(np.uint8).reshape(count, CELL_BYTES)


_LINE = CELL_BYTES // TILE_ROWS  # bytes of a row in a K step


def _runs(first: int, count: int, old: int, most: int) -> Iterator[_Run]:
    """Places of K steps [first, first + count) of a row, which become a new shard of `count`: in runs
    that no border of an old shard of `old` steps parts, nor one of K blocks of `most`, there or here."""
    at = 0
    while at < count:
        shard, inside = divmod(first + at, old)
        ends = old - inside, most - inside % most, most - at % most, count - at
        yield _Run(shard, inside, at, min(ends))
        at += min(ends)
