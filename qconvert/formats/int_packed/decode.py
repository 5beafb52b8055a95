"""Integer codes of compressed-tensors, packed or one a byte -> BF16: bf16((code - zero) * scale),
rounded once.

Format source: compressed-tensors, `compressors/pack_quantized/` and
`quantization/lifecycle/forward_helpers.py` `_dequantize`. A row is a string of codes of 2 to 8 bits in
32-bit words, the first in the lowest bits, each stored plus half its range; codes of 3, 5, 6 and 7 bits
lie across words, and the last word may have room left. With BF16 scales this is what that project's
decompression gives: a difference of two codes is a whole number of 8 bits, which bf16 holds. With F16
and F32 scales it decompresses to the scale's dtype instead.
`int-quantized` (`compressors/naive_quantized/`) has signed
numbers, one a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, Output, aligned
from qconvert.core.int_scheme import WORD_BITS, IntScheme, groups_in_row, whole_words, words
from qconvert.ops.base import Columnwise, array
from qconvert.ops.cast import (
    BF16_OVERFLOW,
    FLOAT_DTYPES,
    TILE_ELEMENTS,
    check_beyond,
    check_finite,
    decode,
    float_tiles,
    round_to_bf16,
)
from qconvert.ops.compiled import done
from qconvert.ops.ints import bit_fields, spread_nibbles, unpacked
from qconvert.ops.rowwise import EachRow, FloatDecoder

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s, Int8s, Int32s, UInt8s, UInt16s


_MIDDLE = 0x80  # a signed byte plus 128 is the same bits with the first one turned
_BEYOND = "look whether its scales are meant to multiply, or take `dequant --dtype f32`"


class FromProducts:
    """A decoder whose numbers are `Products`."""

    __slots__ = ()

    def _products(self, ins: Sequence[Buffer], scratch: memoryview) -> Products:
        raise NotImplementedError

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        self._products(ins, scratch).as_bf16(outs[0])
        return {}

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
        return self._products(ins, scratch).floats()


def _check_words(packed: TensorType, scale: TensorType) -> None:
    if packed.dtype != "I32" or len(packed.shape) != 2:
        raise PlanError(f"expected packed codes in an I32 matrix, found {packed}")
    if scale.dtype not in FLOAT_DTYPES:
        raise PlanError(f"expected scales in {', '.join(FLOAT_DTYPES)}, found {scale}")


class FromColumns(FromProducts, Columnwise):
    """A decoder of I32 words [.., N] whose columns are rows of the weight, so that it cannot be cut:
    GPTQ's form and AutoAWQ's. It makes rows [first, first + count) of the weight [N, K]."""

    __slots__ = ()
    scale_at: ClassVar[int]

    @property
    def scheme(self) -> tuple[int, int | None]:
        """Bits of a code, and columns of a group (None: all)."""
        raise NotImplementedError

    def _weight(self, words: TensorType) -> tuple[int, int]:
        """Rows and columns of the weight."""
        raise NotImplementedError

    def _beside(
        self, weight: tuple[int, int], groups: int, args: Sequence[TensorType]
    ) -> list[TensorType]:
        """Types that the arguments after the codes must have."""
        raise NotImplementedError

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        _check_words(args[0], args[self.scale_at])
        rows, columns = self._weight(args[0])
        group = columns if self.scheme[1] is None else self.scheme[1]
        wanted = self._beside((rows, columns), groups_in_row(columns, group), args)
        if list(args[1:]) != wanted:
            raise PlanError(
                f"expected {', '.join(map(str, wanted))} beside {args[0]} in groups of {group}, found "
                f"{', '.join(map(str, args[1:]))}"
            )
        self.check_columns(TensorType("I32", (columns, rows)))
        return (TensorType("BF16", (self.count, columns)),)

    def scratch(self, *args: TensorType) -> int:
        columns = self._weight(args[0])[1]
        return scale_scratch(args[self.scale_at]) + product_scratch(self.count, columns)

    def loss(self, *args: TensorType) -> str | None:
        return f"rounds int{self.scheme[0]} x scale to bf16 (relative error at most 2^-8)"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        with self.by_column():
            return FromProducts.run(self, ins, outs, scratch)

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
        with self.by_column():
            yield from FromProducts.floats(self, ins, scratch)


@dataclass(frozen=True, slots=True)
class DequantInts(FromProducts, EachRow):
    """packed I32 [N, ceil(K * bits / 32)], scale [N, groups] in BF16, F16 or F32, and where not
    `symmetric` zero points I32 [ceil(N * bits / 32), groups] -> BF16 [N, K]. With `g_idx` one argument
    more, I32 [K], says which group each column is of. `bits` is 2 to 8; `group` None: a scale a row, and
    `columns` is K then (None: all that the words hold).

    Raises PlanError where dtypes or shapes do not fit, RowError where a scale is NaN or infinite or a
    column is of no group.
    """

    bits: int
    group: int | None
    symmetric: bool = True
    g_idx: bool = False
    columns: int | None = None

    format: ClassVar[str] = "int-packed"
    packing: ClassVar[str] = "compressed-tensors"
    scale_at: ClassVar[int] = 1

    def __repr__(self) -> str:
        """Symmetric 4-bit codes in groups have the name of an op that they once had: fingerprints and
        journals hold it."""
        plain = (self.bits, self.symmetric, self.g_idx, self.columns) == (4, True, False, None)
        if plain and self.group is not None:
            return f"DequantInt4(group={self.group})"
        columns = "" if self.columns is None else f", columns={self.columns}"
        return (
            f"DequantInts(bits={self.bits}, group={self.group}, symmetric={self.symmetric}, "
            f"g_idx={self.g_idx}{columns})"
        )

    def _columns(self, packed: TensorType, scale: TensorType) -> int:
        """Columns of the weight: whole groups, as many as there are scales, where the words are
        those of so many; else all that the words hold."""
        wide = 0 if self.group is None or len(scale.shape) != 2 else self.group * scale.shape[1]
        if self.columns is not None or words(wide, self.bits) == packed.shape[1]:
            return self.columns or wide
        return packed.shape[1] * WORD_BITS // self.bits

    @property
    def scheme(self) -> tuple[int, int | None]:
        return self.bits, self.group

    @property
    def stated(self) -> IntScheme:
        order: Literal["group"] | None = "group" if self.g_idx else None
        return IntScheme(self.bits, self.group, self.symmetric, order)

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        packed, scale, *more = args
        _check_words(packed, scale)
        rows, columns = packed.shape[0], self._columns(packed, scale)
        if packed.shape[1] != words(columns, self.bits):
            raise PlanError(
                f"expected {words(columns, self.bits)} words a row for {columns} columns of "
                f"{self.bits} bits, found {packed}"
            )
        group = columns if self.group is None else self.group
        groups = groups_in_row(columns, group)
        if scale.shape != (rows, groups):
            raise PlanError(
                f"expected scales [{rows}, {groups}] for {packed} in groups of {group}, found "
                f"{list(scale.shape)}"
            )
        zeros = TensorType("I32", (words(rows, self.bits), groups))
        wanted = [] if self.symmetric else [zeros]
        wanted += [TensorType("I32", (columns,))] if self.g_idx else []
        if more != wanted:
            raise PlanError(
                f"expected {', '.join(map(str, wanted)) or 'nothing'} beside {packed} and its "
                f"scales, found {', '.join(map(str, more)) or 'nothing'}"
            )
        return (TensorType("BF16", (rows, columns)),)

    def row_step(self, *args: TensorType) -> int:
        return 1 if self.symmetric else whole_words(self.bits)

    @property
    def step_rows(self) -> int:
        """Rows of zero points: words."""
        return words(whole_words(self.bits), self.bits)

    def cut(
        self, args: tuple[Output, ...], start: int, stop: int, rows: int
    ) -> tuple[Self, tuple[Output, ...]]:
        """Zero points are packed along the rows."""
        step = self.row_step()
        if start % step:
            raise PlanError(
                f"rows from {start} on are wanted, and zero points are packed in words of {step} rows"
            )
        return EachRow.cut(self, args, start, stop, rows)

    def scratch(self, *args: TensorType) -> int:
        (result,) = self.infer(*args)
        return scale_scratch(args[1]) + product_scratch(result.shape[0], result.shape[1])

    def loss(self, *args: TensorType) -> str | None:
        return f"rounds int{self.bits} x scale to bf16 (relative error at most 2^-8)"

    def integers(
        self, ins: Sequence[Buffer], codes: Int8s, zero: Int8s
    ) -> tuple[Float32s, Int32s | None]:
        import numpy as np

        middle = np.uint16(1 << (self.bits - 1))
        packed = array(ins[0].data, np.uint32, ins[0].type.shape)
        for start, stop in float_tiles(*codes.shape):
            fields = unpacked(packed[start:stop], self.bits, codes.shape[1])
            codes[start:stop] = (fields - middle).astype(np.int8)
        if not self.symmetric:
            at = array(ins[2].data, np.uint32, ins[2].type.shape)
            fields = unpacked(np.ascontiguousarray(at.T), self.bits, codes.shape[0]).T
            zero[:] = (fields - middle).astype(np.int8)
        order = group_of_columns(ins[-1], zero.shape[1]) if self.g_idx else None
        return exact_scales(ins[1]), order

    def _products(self, ins: Sequence[Buffer], scratch: memoryview) -> Products:
        import numpy as np

        packed, scale, *more = ins
        rows, columns = packed.type.shape[0], self._columns(packed.type, scale.type)
        source = array(packed.data, np.uint8, (rows, packed.type.row_nbytes))
        zero = None
        if not self.symmetric:
            at = array(more[0].data, np.uint32, more[0].type.shape)
            zero = unpacked(at.T, self.bits, rows).T
        order = group_of_columns(more[-1], scale.type.shape[1]) if self.g_idx else None
        used = scale_scratch(scale.type)
        return Products.of_words(
            scratch[used:], (rows, columns), self.bits, lambda start, stop: source[start:stop],
            scales(scale, scratch[:used]), zero, order,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DequantInt8(FromProducts, EachRow):
    """weight I8 [N, K], scale [N, groups] in BF16, F16 or F32, and where not `symmetric` zero points I8
    [N, groups] -> BF16 [N, K]. Groups are neighbouring columns.

    Raises PlanError where dtypes or shapes do not fit, RowError where a scale is NaN or infinite.
    """

    symmetric: bool = True

    format: ClassVar[str] = "int8"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        weight, scale, *zero = args
        if weight.dtype != "I8" or len(weight.shape) != 2:
            raise PlanError(f"expected codes in an I8 matrix, found {weight}")
        rows, columns = weight.shape
        fits = len(scale.shape) == 2 and scale.shape[0] == rows and scale.shape[1] > 0
        if scale.dtype not in FLOAT_DTYPES or not fits or columns % scale.shape[1]:
            raise PlanError(
                f"expected scales [{rows}, groups] in {', '.join(FLOAT_DTYPES)} for {weight}, found "
                f"{scale}"
            )
        wanted = [] if self.symmetric else [TensorType("I8", scale.shape)]
        if zero != wanted:
            raise PlanError(
                f"expected {wanted[0] if wanted else 'no zero points'} beside {weight} and its "
                f"scales, found {', '.join(map(str, zero)) or 'nothing'}"
            )
        return (TensorType("BF16", weight.shape),)

    def scratch(self, *args: TensorType) -> int:
        return scale_scratch(args[1]) + product_scratch(*args[0].shape)

    def loss(self, *args: TensorType) -> str | None:
        return "rounds int8 x scale to bf16 (relative error at most 2^-8)"

    def _products(self, ins: Sequence[Buffer], scratch: memoryview) -> Products:
        import numpy as np

        weight, scale, *zeros = ins
        source = array(weight.data, np.uint8, weight.type.shape)
        zero = None
        if zeros:
            stored = array(zeros[0].data, np.uint8, zeros[0].type.shape)
            zero = (stored ^ np.uint8(_MIDDLE)).astype(np.uint16)
        used = scale_scratch(scale.type)
        return Products(
            scratch[used:], (source.shape[0], source.shape[1]), 8,
            lambda start, stop: source[start:stop] ^ np.uint8(_MIDDLE),
            scales(scale, scratch[:used]), zero, None,
        )  # fmt: skip


class IntDecoder(FloatDecoder, Protocol):
    """A decoder of integers that other forms hold too."""

    @property
    def packing(self) -> str | None:
        """The form, as packers call it; None: no packer makes it."""

    @property
    def scheme(self) -> tuple[int, int | None]:
        """Bits of a code, and columns of a group."""

    @property
    def stated(self) -> IntScheme | None:
        """Scheme of the matrix, but for the dtype of scales; None: only the config says it."""

    @property
    def scale_at(self) -> int:
        """Number of the argument that holds scales."""

    def integers(
        self, ins: Sequence[Buffer], codes: Int8s, zero: Int8s
    ) -> tuple[Float32s, Int32s | None]:
        """Fill codes [N, K] and zero points [N, groups], counted from the middle, which are 0 before.
        Returns scales [N, groups] and g_idx. Raises RowError for a zero point that readers of GPTQ
        version 1 differ on."""


class Products:
    """(code - zero) * scale, a tile of rows at a time, in given working memory."""

    def __init__(
        self,
        scratch: memoryview,
        shape: tuple[int, int],
        bits: int,
        packed: Callable[[int, int], UInt8s],
        scale: Float32s,
        zero: UInt16s | None,
        column_group: Int32s | None,
    ) -> None:
        """`packed` gives the codes of rows [start, stop) packed in bytes; `scale` and `zero` are [rows,
        groups], `zero` as stored codes; None: all are the middle one. Where there is no `column_group`
        groups are columns side by side. Raises RowError where a scale is not finite."""
        import numpy as np

        rows, columns = shape
        self._rows, self._columns, self._bits, self._scale = rows, columns, bits, scale
        self._packed, self._zero, self._column_group = packed, zero, column_group
        self._height = _tile_rows(rows, columns)
        size = 4 * self._height * columns
        shape = self._height, columns
        self._values = array(scratch[:size], np.float32, shape)
        at = aligned(size)
        self._spare = array(scratch[at : at + size], np.int32, shape)
        at += aligned(size)
        self._codes = array(scratch[at : at + size // 4], np.uint8, shape)
        check_finite(scale, 0)
        # Hardly any checkpoint has such scales.
        largest = float(np.maximum(scale.max(initial=0), -scale.min(initial=0)))
        self._risky = largest * (1 << bits) >= BF16_OVERFLOW

    @classmethod
    def of_words(
        cls,
        scratch: memoryview,
        shape: tuple[int, int],
        bits: int,
        packed: Callable[[int, int], UInt8s],
        scale: Float32s,
        zero: UInt16s | None,
        column_group: Int32s | None,
    ) -> Products:
        """Those of codes of 2 to 8 bits in rows of words, which `packed` gives as bytes. Rows of other
        codes than whole words of 4 or 8 bits are taken apart first, one code a byte."""
        import numpy as np

        columns = shape[1]
        if bits in (4, 8) and columns * bits % WORD_BITS == 0:
            return cls(scratch, shape, bits, packed, scale, zero, column_group)
        if zero is None:
            zero = np.full(scale.shape, 1 << (bits - 1), np.uint16)
        return cls(
            scratch, shape, 8, lambda start, stop: bit_fields(packed(start, stop), bits, columns),
            scale, zero, column_group,
        )  # fmt: skip

    def floats(self) -> Iterator[tuple[int, Float32s]]:
        """First rows and values of tiles, as float32."""
        for start, stop in self._tiles():
            yield start, self._multiply(self._packed(start, stop), start)

    def as_bf16(self, out: Buffer) -> None:
        """All products, rounded to bf16. Raises RowError for one that bf16 has no room for."""
        import numpy as np

        target = array(out.data, np.uint16, (self._rows, self._columns))
        for start, stop in self._tiles():
            packed = self._packed(start, stop)
            if self._in_loops(packed, start, target[start:stop]):
                continue
            values = self._multiply(packed, start)
            if self._risky:
                first = start * self._columns
                check_beyond(values, first, self._columns, _BEYOND, infinite=True)
            bits = values.view(np.int32)
            round_to_bf16(bits, self._spare[: stop - start])
            np.copyto(target[start:stop], bits, casting="unsafe")

    def _tiles(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self._rows, max(1, self._height)):
            yield start, min(start + self._height, self._rows)

    def _zeros(self, start: int, count: int) -> Float32s | None:
        import numpy as np

        return None if self._zero is None else self._zero[start : start + count].astype(np.float32)

    def _in_loops(self, packed: UInt8s, start: int, target: UInt16s) -> bool:
        """Return whether a compiled loop made the rows from `start` on."""
        import numpy as np

        if self._column_group is not None or self._risky:
            return False
        count = packed.shape[0]
        scale, zeros = self._scale[start : start + count], self._zeros(start, count)
        given = np.full(scale.shape, np.float32(1 << (self._bits - 1)))
        if zeros is not None:
            given = np.ascontiguousarray(zeros)
        into = target.view(np.uint32) if self._bits == 4 else target
        return done(f"int{self._bits}_decode", packed, given, scale, into)

    def _multiply(self, packed: UInt8s, start: int) -> Float32s:
        """Codes of the rows from `start` on, packed in bytes, times their scales, [n, K]."""
        import numpy as np

        count = packed.shape[0]
        codes, values, spare = self._codes[:count], self._values[:count], self._spare[:count]
        scale, zeros = self._scale[start : start + count], self._zeros(start, count)
        column_group = self._column_group
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
        return values


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


def exact_scales(scale: Buffer) -> Float32s:
    import numpy as np

    if scale.type.dtype == "BF16":
        bits = array(scale.data, np.uint16, scale.type.shape).astype(np.uint32)
        return (bits << 16).view(np.float32)
    kind = np.float16 if scale.type.dtype == "F16" else np.float32
    return array(scale.data, kind, scale.type.shape).astype(np.float32)
