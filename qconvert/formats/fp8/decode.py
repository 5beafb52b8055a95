"""FP8 with scales -> BF16, exactly: bf16(fp32(w) * fp32(s)), one rounding to bf16.

Format sources: DeepSeek-V3's `inference/kernel.py` (`weight_dequant_kernel`: block scales are
multipliers although called `weight_scale_inv`), Qwen FP8 releases (same layout), compressed-tensors
`float-quantized` (`weight_scale` per channel or tensor). A block grid has ceil(rows / b0) x
ceil(columns / b1) entries; the ragged last blocks are ordinary (DeepSeek-V3's `kv_a_proj_with_mqa`
has 576 rows under 128-row blocks).

F8_E4M3FNUZ and F8_E5M2FNUZ are those of AMD's MI300 (ml_dtypes `float8_e4m3fnuz`: biases 8 and 16, NaN
is 0x80 alone, no infinity, no negative zero).

Per-channel scales are the block (1, K) and per-tensor scales the block (N, K): one op serves all.

The arithmetic is numpy's, on bits. torch's operators are only a little faster (1.75 against 0.95
to 1.65 GB of FP8 per second and core, measured on one machine), and importing torch costs each process
two seconds and 145 MB: more than many conversions take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd, prod
from typing import TYPE_CHECKING

from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import PlanError, ScaleError
from qconvert.core.graph import Buffer, Output, Part, concat
from qconvert.ops.base import array
from qconvert.ops.cast import BF16_OVERFLOW, check_finite, round_to_bf16
from qconvert.ops.compiled import done, may_be_done

if TYPE_CHECKING:
    from qconvert.core.arrays import Bools, Float32s, Int8s, Int32s, UInt16s


FNUZ = ("F8_E4M3FNUZ", "F8_E5M2FNUZ")
WEIGHT_DTYPES = ("F8_E4M3", "F8_E5M2", *FNUZ)
# U8 and F8_E8M0 both hold power-of-two exponents: 2^(e - 127), 255 being NaN (OCP MX v1.0, 5.4.1).
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")

# Elements decoded at a time: their float32 copy and the rounded result fit in a core's own
# cache (1 MiB on the machine measured). Of 8 Ki to 1 Mi elements this was fastest for three shapes.
TILE_ELEMENTS = 1 << 16

# An e4m3 code shifted left by 20 puts exponent and mantissa where float32 keeps them, with the
# exponent bias off by 127 - 7 = 120: the float32 is the code's value times 2^-120, subnormals
# included. The int8 -> int32 copy extends the sign, so the mask keeps bit 31 and bits 20 to 26.
_SHIFT = 20
_MASK = 0x87F00000 - (1 << 32)
_BIAS = 2.0**120
_SAFE_SCALE = 2.0**7  # s * 2^120 must stay finite
_SCALES_AT_ONCE = 4096
_PLAIN_SCALE = 2.0**-117  # times the smallest code, 2^-9, it is still a normal float32

# The largest code, without its sign, that is a number (or, in e5m2, an infinity), and the largest
# number.
_LARGEST_CODE = {"F8_E4M3": 0x7E, "F8_E5M2": 0x7C}
_LARGEST_NUMBER = {
    "F8_E4M3": 448.0, "F8_E5M2": 57344.0, "F8_E4M3FNUZ": 240.0, "F8_E5M2FNUZ": 57344.0,
}  # fmt: skip
_FNUZ_NAN = -128  # as an int8
_MANTISSA_AND_BIAS = {"F8_E4M3FNUZ": (3, 8), "F8_E5M2FNUZ": (2, 16)}
_E5M2_INFINITY = 0x7C
# The bits of BF16_OVERFLOW.
_OVERFLOW_BITS = 0x7F7F8000
_BF16_NAN = 0x7FC0


@dataclass(frozen=True, slots=True)
class DequantFp8:
    """weight [..., N, K] F8 and scale [..., ceil(N/b0), ceil(K/b1)] -> BF16 [..., N, K].

    Scales multiply. They may be F32, BF16, F16 or E8M0 (stored as F8_E8M0 or U8). Leading dimensions
    (experts) of weight and scale must be equal. Raises PlanError if dtypes or the grid do not
    fit, ScaleError for a scale that is NaN or infinite, and for a result that would be infinite: its
    product is beyond bf16, or (e5m2) its code is an infinity. With `overflow` those are written, and
    counted. NaN codes become NaN and are counted.
    """

    block: tuple[int, int]
    overflow: bool = False

    def __repr__(self) -> str:
        """Unchanged from before `overflow` existed, if overflow is refused: fingerprints hold it."""
        return f"DequantFp8(block={self.block}{', overflow=True' if self.overflow else ''})"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        weight, scale = args
        if weight.dtype not in WEIGHT_DTYPES:
            raise PlanError(f"expected an FP8 weight ({', '.join(WEIGHT_DTYPES)}), found {weight}")
        if scale.dtype not in SCALE_DTYPES:
            raise PlanError(f"expected a scale in {', '.join(SCALE_DTYPES)}, found {scale}")
        if len(weight.shape) < 2:
            raise PlanError(f"expected a weight of two or more dimensions, found {weight}")
        *lead, rows, columns = weight.shape
        grid = (*lead, ceil_div(rows, self.block[0]), ceil_div(columns, self.block[1]))
        if scale.shape != grid:
            raise PlanError(
                f"expected a scale grid {list(grid)} for {weight} in blocks of "
                f"{self.block[0]}x{self.block[1]}, found {list(scale.shape)}"
            )
        return (TensorType("BF16", weight.shape),)

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        """Whole block rows of one matrix at a time."""
        *lead, rows, columns = args[0].shape
        if not columns:
            return
        step = self.row_step(*args)
        row_cost = columns * 3  # one FP8 byte read and one BF16 written for each element
        height = max(1, limit // (row_cost * step)) * step
        for matrix in range(prod(lead)):
            for start in range(0, rows, height):
                yield self._part(matrix, start, min(start + height, rows), *args)

    def row_step(self, *args: TensorType) -> int:
        """A block; with a per-tensor scale any row can start a part."""
        return 1 if self.block[0] >= args[0].shape[-2] else self.block[0]

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        """Rows [start, stop) of a weight that is one matrix."""
        return self._part(0, start, stop, *args)

    def cut(
        self, args: tuple[Output, ...], start: int, stop: int, rows: int
    ) -> tuple[DequantFp8, tuple[Output, ...]]:
        block, scale = _regrid(self.block, args[1], start, stop, rows)
        op = self if block == self.block else replace(self, block=block)
        return op, (args[0].rows(start, stop), scale)

    def _part(self, matrix: int, start: int, stop: int, *args: TensorType) -> Part:
        weight, scale = args
        rows, columns = weight.shape[-2:]
        grid_rows, grid_columns = scale.shape[-2:]
        one_block = self.block[0] >= rows
        first = 0 if one_block else start // self.block[0]
        count = 1 if one_block else ceil_div(stop, self.block[0]) - first
        scale_row = TensorType(scale.dtype, (1, grid_columns)).nbytes
        at = (matrix * rows + start) * columns
        return Part(
            args=(
                (at, TensorType(weight.dtype, (stop - start, columns))),
                (
                    (matrix * grid_rows + first) * scale_row,
                    TensorType(scale.dtype, (count, grid_columns)),
                ),
            ),
            outs=((2 * at, TensorType("BF16", (stop - start, columns))),),
        )

    def scratch(self, *args: TensorType) -> int:
        """One tile as float32 and its rounded copy, one row of scales spread over the columns,
        and the scales of the part, as float32."""
        weight, scale = args
        rows, columns = weight.shape[-2:]
        return 8 * _tile_rows(rows, columns) * columns + 4 * columns + 4 * scale.numel

    def loss(self, *args: TensorType) -> str | None:
        beyond = "what is beyond bf16 becomes infinite" if self.overflow else None
        if args[1].dtype in ("F8_E8M0", "U8"):
            return beyond  # a power of two times 4 significant bits fits bf16's 8
        rounds = "rounds fp8 x scale to bf16 (relative error at most 2^-8)"
        return rounds if beyond is None else f"{rounds}; {beyond}"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        weight, scale = ins
        rows, columns = weight.type.shape
        source = array(weight.data, np.int8, (rows, columns))
        target = array(outs[0].data, np.uint16, (rows, columns))
        if weight.type.dtype == "F8_E4M3" and self._in_loops(source, scale, target, scratch):
            return {}
        height = _tile_rows(rows, columns)
        tile = 4 * height * columns
        bits = array(scratch[:tile], np.int32, (height, columns))
        spare = array(scratch[tile : 2 * tile], np.int32, (height, columns))
        spread = array(scratch[2 * tile : 2 * tile + 4 * columns], np.float32, (columns,))
        factors = array(scratch[2 * tile + 4 * columns :], np.float32, scale.type.shape)
        dtype = weight.type.dtype

        with np.errstate(all="ignore"):  # overflow to infinity is what fp32 arithmetic does
            _decode_scale(scale, factors)
            # NaN propagates through all three.
            largest = float(np.maximum(factors.max(), -factors.min()))
            if not largest < float("inf"):
                index = int(np.argmin(np.isfinite(factors)))
                raise ScaleError(index, "is NaN or infinite; the checkpoint is broken")
            # Whether any product can overflow is told from the scales: hardly any checkpoint has such
            # scales.
            infinite = 0
            risky = largest * _LARGEST_NUMBER[dtype] >= BF16_OVERFLOW
            biased = dtype == "F8_E4M3" and largest < _SAFE_SCALE
            ties = not biased or _may_tie(factors)
            if biased:
                np.multiply(factors, np.float32(_BIAS), out=factors)
            nan_codes = 0
            shown = -1
            for start, stop in _row_spans(rows, self.block[0], height):
                first = start // self.block[0]
                span, tile_bits = source[start:stop], bits[: stop - start]
                codes = spare.reshape(-1).view(np.int8)[: span.size].reshape(span.shape)
                np.bitwise_and(span, 0x7F, out=codes)
                top = int(codes.max())
                broken = (
                    bool(_are_nan(span, dtype).any())
                    if dtype in FNUZ
                    else top > _LARGEST_CODE[dtype]
                )
                values = _decode(span, dtype, tile_bits, exact=not biased)
                if self.block[0] == 1:
                    _scale_rows(values, factors[first : first + stop - start], self.block[1])
                else:
                    if first != shown:
                        _spread(factors[first], self.block[1], spread)
                        shown = first
                    np.multiply(values, spread, out=values)
                if risky or (dtype == "F8_E5M2" and top >= _E5M2_INFINITY):
                    beyond = _beyond(span, dtype, tile_bits)
                    if beyond.any() and not self.overflow:
                        row, column = divmod(int(np.argmax(beyond)), columns)
                        raise self._overflow_error(start + row, column, source, factors, dtype)
                    infinite += int(np.count_nonzero(beyond))
                if ties:
                    round_to_bf16(tile_bits, spare[: stop - start])
                else:
                    np.add(tile_bits, 0x8000, out=tile_bits)
                    np.right_shift(tile_bits, 16, out=tile_bits)
                np.copyto(target[start:stop], tile_bits, casting="unsafe")
                if broken:
                    nan_codes += _mark_nan(span, dtype, target[start:stop])
        counts = {"NaN codes": nan_codes, "values beyond bf16, written as infinite": infinite}
        return {what: count for what, count in counts.items() if count}

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
        import numpy as np

        weight, scale = ins
        rows, columns = weight.type.shape
        source, dtype = array(weight.data, np.int8, weight.type.shape), weight.type.dtype
        factors = np.empty(scale.type.shape, np.float32)
        spread = np.empty(columns, np.float32)
        bits = np.empty((_tile_rows(rows, columns), columns), np.int32)
        with np.errstate(all="ignore"):
            _decode_scale(scale, factors)
        check_finite(factors, 0)
        for start, stop in _row_spans(rows, self.block[0], bits.shape[0]):
            span, first = source[start:stop], start // self.block[0]
            values = _decode(span, dtype, bits[: stop - start], exact=True)
            if self.block[0] == 1:
                _scale_rows(values, factors[first : first + stop - start], self.block[1])
            else:
                _spread(factors[first], self.block[1], spread)
                np.multiply(values, spread, out=values)
            values[_are_nan(span, dtype)] = np.nan
            yield start, values

    def _in_loops(self, source: Int8s, scale: Buffer, target: UInt16s, scratch: memoryview) -> bool:
        """Return whether the compiled loop made the result: it looks at the scales itself."""
        import numpy as np

        if not may_be_done():
            return False
        if scale.type.dtype == "F32":
            factors = array(scale.data, np.float32, scale.type.shape)
        else:
            factors = array(scratch[: 4 * scale.type.numel], np.float32, scale.type.shape)
            _decode_scale(scale, factors)
        return done("fp8_decode", source, factors, *self.block, target)

    def _overflow_error(
        self, row: int, column: int, source: Int8s, factors: Float32s, dtype: str
    ) -> ScaleError:
        """The error for the block that holds the value at `row` and `column` of a part."""
        import numpy as np

        (height, width), (rows, columns) = self.block, source.shape
        line, place = row // height, column // width
        span = source[
            line * height : min((line + 1) * height, rows),
            place * width : min((place + 1) * width, columns),
        ]
        bits = np.empty(span.shape, np.int32)
        values = _decode(span, dtype, bits, exact=True)
        np.multiply(values, factors[line, place], out=values)
        count = int(np.count_nonzero(_beyond(span, dtype, bits)))
        return ScaleError(
            line * factors.shape[1] + place,
            f"is {factors[line, place]:g}, and of the {span.size} values decoded with it {count} are "
            "infinite or beyond bf16 (3.39e38 at most); check whether the scale is meant to multiply, "
            "or write infinities with `dequant --allow-overflow`",
        )


def _regrid(
    block: tuple[int, int], scale: Output, start: int, stop: int, rows: int
) -> tuple[tuple[int, int], Output]:
    """Block and scales of rows [start, stop). A cut inside a block makes blocks of fewer rows, whose
    scales stand there as often as needed."""
    if block[0] >= rows:
        return block, scale
    height = gcd(block[0], start)
    if height == block[0]:
        return block, scale.rows(start // height, -(-stop // height))
    lines = [scale.rows(row // block[0], row // block[0] + 1) for row in range(start, stop, height)]
    return (height, block[1]), concat(lines)


def _beyond(span: Int8s, dtype: str, bits: Int32s) -> Bools:
    """Return which products, as float32 bits, become infinite in bf16; NaN codes are not among them."""
    found: Bools = ((bits & 0x7FFFFFFF) >= _OVERFLOW_BITS) & ~_are_nan(span, dtype)
    return found


def _are_nan(span: Int8s, dtype: str) -> Bools:
    import numpy as np

    if dtype in FNUZ:
        found: Bools = span == _FNUZ_NAN
    else:
        found = (span.view(np.uint8) & 0x7F) > _LARGEST_CODE[dtype]
    return found


@cache
def _fnuz_table(dtype: str) -> Float32s:
    """The number of each of 256 codes, 0 for NaN."""
    import numpy as np

    width, bias = _MANTISSA_AND_BIAS[dtype]
    codes = np.arange(256)
    exponents, mantissa = (codes & 0x7F) >> width, codes & ((1 << width) - 1)
    whole = mantissa + ((exponents > 0) << width)  # with the leading one of a normal number
    sizes = np.ldexp(whole.astype(np.float32), np.maximum(exponents, 1) - bias - width)
    sizes[0x80] = 0
    found: Float32s = np.where(codes > 0x80, -sizes, sizes).astype(np.float32)
    return found


def _tile_rows(rows: int, columns: int) -> int:
    return min(rows, max(1, TILE_ELEMENTS // max(1, columns)))


def _row_spans(rows: int, block_rows: int, tile_rows: int) -> Iterator[tuple[int, int]]:
    """Cut rows into tiles that do not cross a block row; per-channel blocks do not limit a tile."""
    start = 0
    while start < rows:
        stop = min(start + tile_rows, rows)
        if block_rows > 1:
            stop = min(stop, (start // block_rows + 1) * block_rows)
        yield start, stop
        start = stop


def _decode(span: Int8s, dtype: str, bits: Int32s, *, exact: bool) -> Float32s:
    """Codes as float32, in `bits`. E4M3 comes out times 2^-120 unless `exact`."""
    import numpy as np

    values: Float32s = bits.view(np.float32)
    if dtype in FNUZ:
        np.copyto(values, _fnuz_table(dtype)[span.view(np.uint8)])
        return values
    if dtype == "F8_E5M2":  # the upper half of a float16
        halves = span.view(np.uint8).astype(np.uint16) << np.uint16(8)
        np.copyto(values, halves.view(np.float16))
        return values
    np.copyto(bits, span)
    np.multiply(bits, 1 << _SHIFT, out=bits)  # faster than numpy's shift
    np.bitwise_and(bits, _MASK, out=bits)
    if exact:
        np.multiply(values, np.float32(_BIAS), out=values)
    return values


def _spread(scale: Float32s, block_columns: int, out: Float32s) -> None:
    """One row of scales, each repeated over the columns of its block."""
    import numpy as np

    whole = out.size // block_columns
    np.copyto(out[: whole * block_columns].reshape(whole, block_columns), scale[:whole, None])
    out[whole * block_columns :] = scale[whole:]


def _scale_rows(values: Float32s, scale: Float32s, block_columns: int) -> None:
    """Multiply [r, K] by scales [r, ceil(K / b1)], a row of them for each row."""
    import numpy as np

    columns = values.shape[1]
    for number in range(scale.shape[1]):
        block = values[:, number * block_columns : min((number + 1) * block_columns, columns)]
        np.multiply(block, scale[:, number : number + 1], out=block)


def _may_tie(scale: Float32s) -> bool:
    """Return whether a product with one of these scales may lie halfway between two bf16 values. An e4m3
    code is 8 to 15 times a power of two (or zero), and a power of two leaves a product's mantissa
    unchanged unless the product is subnormal: eight products per scale decide it. Of float32 scales
    (DeepSeek's) one in eight thousand can tie; of bfloat16 scales (Qwen's) most can."""
    import numpy as np

    multiples = np.arange(8, 16, dtype=np.float32)
    for start in range(0, scale.size, _SCALES_AT_ONCE):
        sizes = np.abs(scale.reshape(-1)[start : start + _SCALES_AT_ONCE])
        if np.any((sizes > 0) & (sizes < _PLAIN_SCALE)):
            return True
        products = np.multiply.outer(multiples, sizes)
        if np.any((products.view(np.uint32) & 0xFFFF) == 0x8000):
            return True
    return False


def _mark_nan(span: Int8s, dtype: str, out: UInt16s) -> int:
    """Write bf16's NaN, sign kept (FNUZ's has none), wherever a code means NaN. Returns how many there
    are."""
    import numpy as np

    codes, found = span.view(np.uint8), _are_nan(span, dtype)
    signs = 0 if dtype in FNUZ else (codes[found] & 0x80).astype(np.uint16) << 8
    out[found] = _BF16_NAN | signs
    return int(np.count_nonzero(found))


def _decode_scale(scale: Buffer, out: Float32s) -> None:
    """Scales as float32. BF16 is a float32's upper half. E8M0 e is 2^(e-127): a float32 with exponent
    field e, except that 0 is the subnormal 2^-127 and 255 is NaN."""
    import numpy as np

    dtype, shape = scale.type.dtype, scale.type.shape
    bits = out.view(np.uint32)
    if dtype == "F32":
        np.copyto(out, array(scale.data, np.float32, shape))
    elif dtype == "F16":
        np.copyto(out, array(scale.data, np.float16, shape))
    elif dtype == "BF16":
        np.copyto(bits, array(scale.data, np.uint16, shape))
        np.left_shift(bits, 16, out=bits)
    else:
        exponents = array(scale.data, np.uint8, shape)
        np.copyto(bits, exponents)
        np.left_shift(bits, 23, out=bits)
        bits[exponents == 0] = 0x00400000
        bits[exponents == 255] = 0x7FC00000
