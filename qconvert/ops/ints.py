"""Integer codes in compressed-tensors' packed form -> BF16: bf16((code - zero) * scale), rounded once.

Format source: compressed-tensors 0.19, `compressors/pack_quantized/` and
`quantization/lifecycle/forward_helpers.py` `_dequantize`. With BF16 scales this is what that
project's decompression gives: a difference of two codes is a whole number of 8 bits, which bf16 holds.
With F16 and F32 scales it decompresses to the scale's dtype instead. Symmetric 4-bit codes in groups
have an op of their own, which is quicker: `ops/int4.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, Part, aligned
from qconvert.ops.buffers import array
from qconvert.ops.cast import FLOAT_DTYPES, TILE_ELEMENTS, decode, round_to_bf16
from qconvert.ops.rowwise import row_parts

if TYPE_CHECKING:
    import numpy as np

    UInt8s = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    Int16s = np.ndarray[tuple[int, ...], np.dtype[np.int16]]
    Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
    Float32s = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

_WORD_BITS = 32


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

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        row_bytes = sum(kind.row_nbytes for kind in (*args[:2], *self.infer(*args)))
        return row_parts(self, args[0].shape[0], row_bytes, limit, *args)

    def scratch(self, *args: TensorType) -> int:
        (result,) = self.infer(*args)
        return scale_scratch(args[1]) + product_scratch(result.shape[0], result.shape[1])

    def loss(self, *args: TensorType) -> str | None:
        return f"rounds int{self.bits} x scale to bf16 (relative error at most 2^-9)"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        packed, scale, *more = ins
        rows, columns = outs[0].type.shape
        groups = scale.type.shape[1]
        width = packed.type.row_nbytes
        source = array(packed.data, np.uint8, (rows, width))
        zero = None
        if not self.symmetric:
            words = array(more[0].data, np.int32, more[0].type.shape)
            zero = _along_first(words, self.bits)[:rows]
        column_group = group_of_columns(more[-1], groups) if self.g_idx else None
        used = scale_scratch(scale.type)
        factors = scales(scale, scratch[:used])
        work = Products(scratch[used:], rows, columns, factors)
        for start, stop in work.tiles():
            codes = work.codes(stop - start)
            spread(source[start:stop], self.bits, codes)
            np.subtract(codes, 1 << (self.bits - 1), out=codes)
            target = array(outs[0].data, np.uint16, (rows, columns))[start:stop]
            work.multiply(start, stop, zero, column_group, target)
        return {}


class Products:
    """(code - zero) * scale, a tile of rows at a time, in given working memory."""

    def __init__(self, scratch: memoryview, rows: int, columns: int, scale: Float32s) -> None:
        """`scale` [rows, groups]. Raises RowError where one is not finite."""
        import numpy as np

        self._rows, self._columns, self._scale = rows, columns, scale
        self._height = _tile_rows(rows, columns)
        tile, at = self._height * columns, 0
        cuts = []
        for nbytes in (4 * tile, 4 * tile, 2 * tile):
            cuts.append(scratch[at : at + nbytes])
            at += aligned(nbytes)
        shape = (self._height, columns)
        self._bits = array(cuts[0], np.int32, shape)
        self._spare = array(cuts[1], np.int32, shape)
        self._codes = array(cuts[2], np.int16, shape)
        finite = np.isfinite(scale)
        if not finite.all():
            row = int(np.argwhere(~finite)[0][0])
            raise RowError(row, "has a scale of NaN or infinity; the checkpoint is broken")

    def tiles(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self._rows, max(1, self._height)):
            yield start, min(start + self._height, self._rows)

    def codes(self, count: int) -> Int16s:
        """Where the codes of so many rows are put before `multiply`."""
        return self._codes[:count]

    def multiply(
        self,
        start: int,
        stop: int,
        zero: Int16s | None,
        column_group: Int32s | None,
        target: np.ndarray[tuple[int, ...], np.dtype[np.uint16]],
    ) -> None:
        """The codes last put, of rows [start, stop), times their scales, as bf16 bits. `zero` has all
        rows' [rows, groups]."""
        import numpy as np

        count = stop - start
        codes, part, beside = self._codes[:count], self._bits[:count], self._spare[:count]
        values = part.view(np.float32)
        scale = self._scale[start:stop]
        zeros = None if zero is None else zero[start:stop]
        with np.errstate(all="ignore"):  # overflow to infinity is what fp32 arithmetic does
            if column_group is None:
                groups = scale.shape[1]
                shape = (count, groups, self._columns // groups)
                if zeros is not None:
                    apart = codes.reshape(shape)
                    np.subtract(apart, zeros[:, :, None], out=apart)
                np.copyto(values, codes)
                grouped = values.reshape(shape)
                np.multiply(grouped, scale[:, :, None], out=grouped)
            else:
                if zeros is not None:
                    np.subtract(codes, zeros[:, column_group], out=codes)
                np.copyto(values, codes)
                np.take(scale, column_group, axis=1, out=beside.view(np.float32))
                np.multiply(values, beside.view(np.float32), out=values)
        round_to_bf16(part, beside)
        np.copyto(target, part, casting="unsafe")


def _tile_rows(rows: int, columns: int) -> int:
    return min(rows, max(1, TILE_ELEMENTS // max(1, columns)))


def product_scratch(rows: int, columns: int) -> int:
    """Bytes that `Products` works in: a tile twice as float32, and its codes."""
    tile = _tile_rows(rows, columns) * columns
    return 2 * aligned(4 * tile) + aligned(2 * tile)


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


def spread(source: UInt8s, bits: int, out: Int16s) -> None:
    """Bytes [n, K * bits / 8] -> the codes as stored, 0 and up, [n, K]."""
    import numpy as np

    if bits == 8:
        np.copyto(out, source)
        return
    np.bitwise_and(source, 15, out=out[:, ::2], casting="unsafe")
    np.right_shift(source, 4, out=out[:, 1::2], casting="unsafe")


def _along_first(words: Int32s, bits: int) -> Int16s:
    """Words packed along the first dimension [ceil(N / word), groups] -> signed, [N or some more,
    groups]."""
    import numpy as np

    height, groups = words.shape
    turned = np.ascontiguousarray(words.T).view(np.uint8)
    found = np.empty((groups, height * _WORD_BITS // bits), np.int16)
    spread(turned, bits, found)
    return found.T - np.int16(1 << (bits - 1))


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
