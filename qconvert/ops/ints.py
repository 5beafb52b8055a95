"""Integer codes in compressed-tensors' packed form -> BF16: bf16((code - zero) * scale), rounded once.

Format source: compressed-tensors 0.19, `compressors/pack_quantized/` and
`quantization/lifecycle/forward_helpers.py` `_dequantize`. A 32-bit word holds 8 or 4 codes, the first in
its lowest bits, each stored plus 8 or 128. With BF16 scales this is what that project's decompression
gives: a difference of two codes is a whole number of 8 bits, which bf16 holds. With F16 and F32 scales
it decompresses to the scale's dtype instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, Output, Part, aligned
from qconvert.ops.base import array
from qconvert.ops.cast import (
    BF16_OVERFLOW,
    FLOAT_DTYPES,
    TILE_ELEMENTS,
    check_beyond,
    decode,
    round_to_bf16,
)
from qconvert.ops.compiled import done
from qconvert.ops.rowwise import row_parts

if TYPE_CHECKING:
    import numpy as np

    UInt8s = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    UInt16s = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]
    Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
    UInt32s = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]
    Float32s = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

_WORD_BITS = 32
_BEYOND = "look whether its scales are meant to multiply, or take `dequant --dtype f32`"


@dataclass(frozen=True, slots=True)
class DequantInts:
    """packed I32 [N, K / word], scale [N, groups] in BF16, F16 or F32, and where not `symmetric` zero
    points I32 [ceil(N / word), groups] -> BF16 [N, K]. With `g_idx` one argument more, I32 [K], says
    which group each column is of. `bits` is 4 or 8; `group` None: a scale a row.

    Raises PlanError where dtypes or shapes do not fit, RowError where a scale is NaN or infinite or a
    column is of no group.
    """

    bits: int
    group: int | None
    symmetric: bool = True
    g_idx: bool = False

    def __repr__(self) -> str:
        """Symmetric 4-bit codes in groups have the name of an op that they once had: fingerprints and
        journals hold it."""
        if (self.bits, self.symmetric, self.g_idx) == (4, True, False) and self.group is not None:
            return f"DequantInt4(group={self.group})"
        return (
            f"DequantInts(bits={self.bits}, group={self.group}, symmetric={self.symmetric}, "
            f"g_idx={self.g_idx})"
        )

    @property
    def word(self) -> int:
        """Codes in a 32-bit word."""
        return _WORD_BITS // self.bits

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        packed, scale, *more = args
        if packed.dtype != "I32" or len(packed.shape) != 2:
            raise PlanError(f"expected packed codes in an I32 matrix, found {packed}")
        if scale.dtype not in FLOAT_DTYPES:
            raise PlanError(f"expected a scale in {', '.join(FLOAT_DTYPES)}, found {scale}")
        rows, columns = packed.shape[0], self.word * packed.shape[1]
        group = columns if self.group is None else self.group
        if group < 1 or columns % group:
            raise PlanError(f"expected columns in groups of {group}, found {columns} in {packed}")
        groups = columns // group
        if scale.shape != (rows, groups):
            raise PlanError(
                f"expected scales [{rows}, {groups}] for {packed} in groups of {group}, found "
                f"{list(scale.shape)}"
            )
        wanted = [] if self.symmetric else [TensorType("I32", (ceil_div(rows, self.word), groups))]
        wanted += [TensorType("I32", (columns,))] if self.g_idx else []
        if more != wanted:
            raise PlanError(
                f"expected {', '.join(map(str, wanted)) or 'nothing'} beside {packed} and its "
                f"scales, found {', '.join(map(str, more)) or 'nothing'}"
            )
        return (TensorType("BF16", (rows, columns)),)

    def row_step(self, *args: TensorType) -> int:
        return 1 if self.symmetric else self.word

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        (result,) = self.infer(*args)
        packed, scale, *more = args
        taken = [
            (start * kind.row_nbytes, kind.with_rows(stop - start)) for kind in (packed, scale)
        ]
        if not self.symmetric:
            first, last = start // self.word, ceil_div(stop, self.word)
            taken.append((first * more[0].row_nbytes, more[0].with_rows(last - first)))
        if self.g_idx:
            taken.append((0, more[-1]))
        return Part(
            args=tuple(taken), outs=((start * result.row_nbytes, result.with_rows(stop - start)),)
        )

    def cut(
        self, args: tuple[Output, ...], start: int, stop: int, rows: int
    ) -> tuple[DequantInts, tuple[Output, ...]]:
        """Zero points are packed along the rows; which group a column is of, all rows share."""
        taken = [arg.rows(start, stop) for arg in args[:2]]
        if not self.symmetric:
            if start % self.word:
                raise PlanError(
                    f"rows from {start} on are wanted, and zero points are packed in words of "
                    f"{self.word} rows"
                )
            taken.append(args[2].rows(start // self.word, -(-stop // self.word)))
        if self.g_idx:
            taken.append(args[-1])
        return self, tuple(taken)

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        row_bytes = sum(kind.row_nbytes for kind in (*args[:2], *self.infer(*args)))
        return row_parts(self, args[0].shape[0], row_bytes, limit, *args)

    def scratch(self, *args: TensorType) -> int:
        (result,) = self.infer(*args)
        return scale_scratch(args[1]) + product_scratch(result.shape[0], result.shape[1])

    def loss(self, *args: TensorType) -> str | None:
        return f"rounds int{self.bits} x scale to bf16 (relative error at most 2^-8)"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        packed, scale, *more = ins
        rows, columns = outs[0].type.shape
        groups = scale.type.shape[1]
        source = array(packed.data, np.uint8, (rows, packed.type.row_nbytes))
        target = array(outs[0].data, np.uint16, (rows, columns))
        zero = None
        if not self.symmetric:
            words = array(more[0].data, np.uint32, more[0].type.shape)
            zero = unpacked(words.T, self.bits).T[:rows]
        column_group = group_of_columns(more[-1], groups) if self.g_idx else None
        used = scale_scratch(scale.type)
        factors = scales(scale, scratch[:used])
        work = Products(scratch[used:], rows, columns, self.bits, factors)
        for start, stop in work.tiles():
            work.multiply(source[start:stop], start, zero, column_group, target[start:stop])
        return {}


class Products:
    """(code - zero) * scale, a tile of rows at a time, in given working memory."""

    def __init__(
        self, scratch: memoryview, rows: int, columns: int, bits: int, scale: Float32s
    ) -> None:
        """`scale` [rows, groups]. Raises RowError where one is not finite."""
        import numpy as np

        self._rows, self._columns, self._bits, self._scale = rows, columns, bits, scale
        self._height = _tile_rows(rows, columns)
        size = 4 * self._height * columns
        shape = self._height, columns
        self._values = array(scratch[:size], np.float32, shape)
        at = aligned(size)
        self._spare = array(scratch[at : at + size], np.int32, shape)
        at += aligned(size)
        self._codes = array(scratch[at : at + size // 4], np.uint8, shape)
        finite = np.isfinite(scale)
        if not finite.all():
            row = int(np.argwhere(~finite)[0][0])
            raise RowError(row, "has a scale of NaN or infinity; the checkpoint is broken")
        # Hardly any checkpoint has such scales.
        largest = float(np.maximum(scale.max(initial=0), -scale.min(initial=0)))
        self._risky = largest * (1 << bits) >= BF16_OVERFLOW

    def tiles(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self._rows, max(1, self._height)):
            yield start, min(start + self._height, self._rows)

    def multiply(
        self,
        packed: UInt8s,
        start: int,
        zero: UInt16s | None,
        column_group: Int32s | None,
        target: UInt16s,
    ) -> None:
        """Codes [n, K] of the rows from `start` on, packed in bytes, times their scales, as bf16 bits.
        `zero` has all rows' [rows, groups] as stored codes; None: all are the middle one. Where there is
        no `column_group` groups are columns side by side. Raises RowError for a product that bf16 has no
        room for."""
        import numpy as np

        count = packed.shape[0]
        codes, values, spare = self._codes[:count], self._values[:count], self._spare[:count]
        scale = self._scale[start : start + count]
        zeros = None if zero is None else zero[start : start + count].astype(np.float32)
        if column_group is None and not self._risky:
            middle = np.float32(1 << (self._bits - 1))
            given = np.full(scale.shape, middle)
            if zeros is not None:
                given = np.ascontiguousarray(zeros)
            into = target.view(np.uint32) if self._bits == 4 else target
            if done(f"int{self._bits}_decode", packed, given, scale, into):
                return
        if self._bits == 8:
            np.copyto(codes, packed)
        else:
            pairs = spare.reshape(-1).view(np.uint16)[: packed.size]
            spread_nibbles(packed.reshape(-1), codes.reshape(-1).view(np.uint16), pairs)
        if zeros is None:
            # What is less than 0 wraps, and is read as a signed byte.
            np.subtract(codes, np.uint8(1 << (self._bits - 1)), out=codes)
            np.copyto(values, codes.view(np.int8))
        else:
            np.copyto(values, codes)
        with np.errstate(all="ignore"):  # overflow to infinity is what fp32 arithmetic does
            if column_group is None:
                grouped = values.reshape(scale.size, self._columns // max(1, scale.shape[1]))
                if zeros is not None:
                    np.subtract(grouped, zeros.reshape(-1, 1), out=grouped)
                np.multiply(grouped, scale.reshape(-1, 1), out=grouped)
            else:
                each = spare.view(np.float32)
                if zeros is not None:
                    np.take(zeros, column_group, axis=1, out=each)
                    np.subtract(values, each, out=values)
                np.take(scale, column_group, axis=1, out=each)
                np.multiply(values, each, out=values)
        if self._risky:
            first = start * self._columns
            check_beyond(values, first, self._columns, _BEYOND, infinite=True)
        bits = values.view(np.int32)
        round_to_bf16(bits, spare)
        np.copyto(target, bits, casting="unsafe")


def _tile_rows(rows: int, columns: int) -> int:
    return min(rows, max(1, TILE_ELEMENTS // max(1, columns)))


def product_scratch(rows: int, columns: int) -> int:
    """Bytes that `Products` works in: a tile twice as float32, and its codes."""
    tile = _tile_rows(rows, columns) * columns
    return 2 * aligned(4 * tile) + aligned(tile)


def scale_scratch(scale: TensorType) -> int:
    """Bytes that `scales` works in: them twice, as float32."""
    return 2 * aligned(4 * scale.numel)


def scales(scale: Buffer, scratch: memoryview) -> Float32s:
    """Scales as float32, in `scratch`."""
    import numpy as np

    size, shape = 4 * scale.type.numel, scale.type.shape
    found = array(scratch[:size], np.float32, shape)
    beside = array(scratch[aligned(size) : aligned(size) + size], np.int32, shape)
    with np.errstate(all="ignore"):  # NaN is no event here
        decode(scale.data, scale.type.dtype, found, beside)
    return found


def spread_nibbles(source: UInt8s, out: UInt16s, spare: UInt16s) -> None:
    """Each byte's low and high nibble -> the low and high byte of a 16-bit entry of `out`."""
    import numpy as np

    np.copyto(out, source)
    np.left_shift(out, 4, out=spare)
    np.bitwise_or(out, spare, out=out)
    np.bitwise_and(out, 0x0F0F, out=out)


def unpacked(words: UInt32s, bits: int) -> UInt16s:
    """Words [n, W] -> the codes in them as they are stored, 0 and up, [n, W * 32 / bits]."""
    import numpy as np

    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed.astype(np.uint16)
    pairs = np.empty(packed.shape, np.uint16)
    spread_nibbles(packed, pairs, np.empty_like(pairs))
    return pairs.view(np.uint8).astype(np.uint16)


def group_of_columns(g_idx: Buffer, groups: int) -> Int32s:
    """g_idx as an array. Raises RowError for a column of a group that is not there."""
    import numpy as np

    found = array(g_idx.data, np.int32, g_idx.type.shape)
    wrong = (found < 0) | (found >= groups)
    if wrong.any():
        column = int(np.flatnonzero(wrong)[0])
        raise RowError(
            0, f"has g_idx {int(found[column])} for column {column}, and there are {groups} groups"
        )
    return found
