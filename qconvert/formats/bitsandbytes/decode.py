"""bitsandbytes' codes -> BF16.

Format source: bitsandbytes 0.50, `functional.py` (`QuantState`, `int8_vectorwise_dequant`) and
`backends/default/ops.py` (`_dequantize_4bit_compute`): numbers in a table of 16, two codes a byte, the
first in the upper half, times the largest of their block, in float32. Blocks are of the flattened matrix
and cross its rows. Those largest are stored as they are, or themselves as codes of a table of 256 times
the largest of a block of them, plus an offset. (Its kernel for CPUs takes rows that are no whole blocks
for blocks of their own, and gives other numbers than its own quantizer was given.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, ClassVar, Self

from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, Output, Part, whole
from qconvert.ops.base import array
from qconvert.ops.cast import RoundedTiles, check_finite, float_tiles
from qconvert.ops.rowwise import row_parts

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s

_PER_127 = 7.874015718698502e-3  # bitsandbytes' own 1 / 127


@dataclass(frozen=True, slots=True)
class Nested:
    """Largest numbers of blocks as codes: `block` of them share a scale; `offset` is added to each."""

    block: int
    offset: float


@dataclass(frozen=True, slots=True)
class DequantBnb4(RoundedTiles):
    """Codes U8 [rows * columns / 2], largest numbers F32 [blocks], the table F32 [16], and of
    `nested` ones, which are U8, their scales F32 and their table F32
    [256]; all flat -> BF16 [rows, columns].

    Raises PlanError where dtypes or sizes do not fit, or rows are cut within a block; RowError where a
    largest number is NaN or infinite.
    """

    columns: int
    block: int
    nested: Nested | None = None

    format: ClassVar[str] = "bitsandbytes-4bit"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        rows = 2 * args[0].numel // max(1, self.columns)
        blocks = ceil_div(rows * self.columns, self.block)
        wanted = [TensorType("U8", (ceil_div(rows * self.columns, 2),))]
        wanted += [TensorType("F32" if self.nested is None else "U8", (blocks,))]
        wanted += [TensorType("F32", (16,))]
        if self.nested is not None:
            scales = ceil_div(blocks, self.nested.block)
            wanted += [TensorType("F32", (scales,)), TensorType("F32", (256,))]
        if self.columns < 2 or list(args) != wanted:
            raise PlanError(
                f"expected {', '.join(map(str, wanted))} for {self.columns} columns in blocks of "
                f"{self.block}, found {', '.join(map(str, args))}"
            )
        return (TensorType("BF16", (rows, self.columns)),)

    def loss(self, *args: TensorType) -> str | None:
        return "rounds 4-bit x scale to bf16 (relative error at most 2^-8)"

    @property
    def _together(self) -> int:
        """Elements that one scale is of, or one scale of scales."""
        return self.block * (1 if self.nested is None else self.nested.block)

    def row_step(self, *args: TensorType) -> int:
        return self._together // gcd(self._together, self.columns)

    def _spans(self, start: int, stop: int, *args: TensorType) -> list[tuple[int, int]]:
        """First and last element of each argument for rows [start, stop)."""
        first, last = start * self.columns, stop * self.columns
        found = [(first // 2, ceil_div(last, 2)), (first // self.block, ceil_div(last, self.block))]
        found.append((0, 16))
        if self.nested is not None:
            low, high = found[1]
            size = self.nested.block
            found += [(low // size, ceil_div(high, size)), (0, 256)]
        return found

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        (made,) = self.infer(*args)
        if (start, stop) == (0, made.shape[0]):
            return whole(self, args)
        taken = tuple(
            (low * arg.row_nbytes, arg.with_rows(high - low))
            for arg, (low, high) in zip(args, self._spans(start, stop), strict=True)
        )
        return Part(taken, ((start * made.row_nbytes, made.with_rows(stop - start)),))

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        (made,) = self.infer(*args)
        return row_parts(self, made.shape[0], made.row_nbytes + self.columns, limit, *args)

    def cut(
        self, args: tuple[Output, ...], start: int, stop: int, rows: int
    ) -> tuple[Self, tuple[Output, ...]]:
        step = self.row_step()
        if start % step:
            raise PlanError(
                f"rows from {start} on are wanted, and blocks of {self.block} cross rows of "
                f"{self.columns}: only every {step}th begins with blocks of its own; dequantize the "
                "model first"
            )
        spans = self._spans(start, stop)
        return self, tuple(arg.rows(*span) for arg, span in zip(args, spans, strict=True))

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
        import numpy as np

        packed, _, table, *_ = ins
        data = array(packed.data, np.uint8, packed.type.shape)
        numbers = array(table.data, np.float32, (16,))
        rows = 2 * data.size // self.columns
        for start, stop in float_tiles(rows, self.columns):
            first, last = start * self.columns, stop * self.columns
            pairs = data[first // 2 : ceil_div(last, 2)]
            codes = np.stack([pairs >> 4, pairs & np.uint8(15)], axis=-1).reshape(-1)
            codes = codes[first % 2 : first % 2 + last - first]
            low = first // self.block
            scale = self._scales(ins, low, ceil_div(last, self.block))
            if not np.isfinite(scale).all():
                at = (low + int(np.argmin(np.isfinite(scale)))) * self.block // self.columns
                raise RowError(at, "has a scale of NaN or infinity; the checkpoint is broken")
            skip = first - low * self.block
            spread = np.repeat(scale, self.block)[skip : skip + last - first]
            yield start, (numbers[codes] * spread).reshape(stop - start, self.columns)

    def _scales(self, ins: Sequence[Buffer], first: int, last: int) -> Float32s:
        """The largest numbers of blocks [first, last)."""
        import numpy as np

        stored = ins[1]
        if self.nested is None:
            return array(stored.data, np.float32, stored.type.shape)[first:last]
        codes = array(stored.data, np.uint8, stored.type.shape)[first:last]
        scales, table = (array(one.data, np.float32, one.type.shape) for one in ins[3:])
        each = scales[np.arange(first, last) // self.nested.block]
        with np.errstate(all="ignore"):
            found: Float32s = table[codes] * each + np.float32(self.nested.offset)
        return found


@dataclass(frozen=True, slots=True)
class DequantBnb8(RoundedTiles):
    """weight I8 [N, K] and SCB F32 [N, 1], the largest of each row -> BF16 [N, K]: (code * SCB) / 127,
    each step in float32.

    Raises PlanError where dtypes or shapes do not fit, RowError where a scale is NaN or infinite.
    """

    format: ClassVar[str] = "bitsandbytes-int8"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        weight, scale = args
        if weight.dtype != "I8" or len(weight.shape) != 2:
            raise PlanError(f"expected codes in an I8 matrix, found {weight}")
        if scale != TensorType("F32", (weight.shape[0], 1)):
            raise PlanError(f"expected SCB F32 [{weight.shape[0]}] for {weight}, found {scale}")
        return (TensorType("BF16", weight.shape),)

    def loss(self, *args: TensorType) -> str | None:
        return "rounds int8 x scale to bf16 (relative error at most 2^-8)"

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
        import numpy as np

        codes = array(ins[0].data, np.int8, ins[0].type.shape)
        scale = array(ins[1].data, np.float32, ins[1].type.shape)
        check_finite(scale, 0)
        for start, stop in float_tiles(*codes.shape):
            with np.errstate(all="ignore"):
                products = codes[start:stop].astype(np.float32) * scale[start:stop]
                yield start, products * np.float32(_PER_127)
