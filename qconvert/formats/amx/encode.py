"""AMXINT4 and AMXINT8: routed experts as KTransformers' CPU kernels load them, in NUMA shards.

A matrix [N, K] becomes codes and one float32 scale a row, no zero point. Gate and up are cut into
NUMA shards by rows, down by columns, so each of down's shards has scales of its own. Format source:
kt-kernel (its converter's output, byte for byte, over all of tests/test_amx_peer.py's cases);
names and shapes as `kt_kernel/utils/loader.py` (SafeTensorLoader) asks for them.

Codes, with `rounding: reference`, as that converter makes them (its build flushes denormals to zero):

    amax = max |w|          w bf16, elements below 2^-126 taken for zero
    int8: d = fp32(amax * fp32(1/127))      int4: d = fp32(amax / 112)      d < 2^-126: d = 0
    x = round to even of fp32(w * fp32(1/d))
    int8 code = x           int4 code = x / 16 rounded half away from zero, -7 to 7

A weight is code * d (int8) or code * 16 * d (int4). The order of bytes serves the tile loads: words
of four codes (int8) or eight (int4), for 16 rows side by side; see `formats/amx/tiles.py`.

Codes that a calibration found become the same bytes, chosen otherwise. A scale is a float32, one for
each row and NUMA shard; int4 stores a sixteenth of it.

`rounding: search` takes steps that lose less: for each row, that whose codes come nearest to its
weights. Round-to-nearest with step = amax / qmax gives the largest weight of a row its own code and all
others coarse ones. What is minimised here is the sum over a row of (w - step * code)^2, with codes
round(w / step) clipped to -qmax..qmax. It has many local minima, so it is first taken from a histogram
of the row for a whole ladder of steps, then lowered by turns of least squares: codes for the step, the
best step for the codes. A row that gains nothing keeps the step amax / qmax.

Everything that decides is exact or summed in an order of its own, so that the same row gets the same
step on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError, RunError
from qconvert.core.graph import Buffer, Part
from qconvert.core.int_scheme import Bits, Codes, IntScheme
from qconvert.formats.amx.format import BITS, RUNTIME_NAME, STEP, Method
from qconvert.formats.amx.tiles import pair_up, place, place_codes, tile
from qconvert.ops.base import array
from qconvert.ops.cast import NOT_FINITE
from qconvert.ops.compiled import done
from qconvert.ops.rowwise import row_parts

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.arrays import Float64s

    Bf16s = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]
    Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    Halves = np.ndarray[tuple[int, ...], np.dtype[np.int16]]

# The histogram: the eight binades below twice the largest power of two in a row, 32 bins each, of
# four bf16 values. What is smaller than all of them hardly has a say.
_BINADES = 8
_BIN_SHIFT = 2
_BINS = _BINADES * 128 >> _BIN_SHIFT
# The ladder: each step is this part of the last one, the first the largest of any row.
_RUNG = 0.97
_RUNGS = {7: 100, 127: 64}
_TURNS = 2
_LANES = 64  # every shard's columns are a multiple
# Squared errors of a row this small may underflow: it keeps the plain step.
_TINY = 2.0**-50


def clip_scratch(rows: int, columns: int) -> int:
    """Bytes of working memory for `best_steps` on that many rows and columns."""
    return 8 * rows * columns


@lru_cache(maxsize=4)
def ladder(qmax: int) -> tuple[Float64s, Float64s]:
    """Steps relative to twice the largest power of two in a row (so that amax is 0.5 to 1), and the
    mean squared error of each bin's four values under each of them, [bins, steps], in whole units
    of 2^-40: counts times these add up exactly in float64, in whatever order."""
    import numpy as np

    # Multiplied step by step: powers are not the same on every machine.
    steps = np.multiply.accumulate(np.array([1 / qmax] + [_RUNG] * (_RUNGS[qmax] - 1)))
    bits = np.arange(_BINADES * 128)
    values = (1 + (bits % 128) / 128) * 2.0 ** (bits // 128 - _BINADES)
    codes = np.minimum(np.rint(values[:, None] / steps), qmax)
    squares = (values[:, None] - steps * codes) ** 2
    means = squares.reshape(_BINS, -1, steps.size).mean(axis=1)
    return steps, np.rint(means * 2.0**40)


def best_steps(
    values: Floats, sizes: Halves, amax: Floats, qmax: int, plain: Floats, scratch: memoryview
) -> Floats:
    """The step of each row and shard.

    values [r, s, K] are the weights, `sizes` the bf16 bits of their magnitudes, `amax` [r, s] the
    largest. `plain` is the format's own scale, which tiny rows keep; for int4 in sixteenths of a
    step. `scratch` as `clip_scratch` says.
    """
    import numpy as np

    whole = plain if qmax == 127 else plain * np.float32(16)
    safe = amax >= _TINY
    first = np.where(safe, _from_histogram(sizes, amax, qmax, scratch), whole)
    codes = array(scratch[: 4 * values.size], np.float32, values.shape)
    products = array(scratch[4 * values.size : 8 * values.size], np.float32, values.shape)
    _round(values, whole, qmax, codes)
    best, least = whole, _errors(values, whole, codes, products)
    step = first
    for turn in range(_TURNS + 1):
        _round(values, step, qmax, codes)
        error = _errors(values, step, codes, products)
        better = safe & (error < least)
        best, least = np.where(better, step, best), np.where(better, error, least)
        if turn < _TURNS:
            np.multiply(values, codes, out=products)
            along = _total(products)
            np.multiply(codes, codes, out=products)
            across = _total(products)
            ratio = np.divide(along, across, out=np.zeros_like(along), where=across > 0)
            step = np.where(across > 0, ratio, step).astype(np.float32)
    return best


def _from_histogram(sizes: Halves, amax: Floats, qmax: int, scratch: memoryview) -> Floats:
    import numpy as np

    rows, shards, _ = sizes.shape
    steps, errors = ladder(qmax)
    exponent = (amax.view(np.uint32) >> 23).astype(np.int64)
    # Bin 0 also takes all that is smaller.
    low = ((exponent + 1 - _BINADES) * 128)[:, :, None]
    bins = array(scratch[: 8 * sizes.size], np.int64, sizes.shape)
    np.subtract(sizes, low, out=bins)
    np.right_shift(bins, _BIN_SHIFT, out=bins)
    np.maximum(bins, 0, out=bins)
    bins += (np.arange(rows * shards) * _BINS).reshape(rows, shards, 1)
    counts = np.bincount(bins.reshape(-1), minlength=rows * shards * _BINS)
    histogram = counts.reshape(rows * shards, _BINS).astype(np.float64)
    histogram[:, 0] = 0
    unit = np.ldexp(1.0, exponent - 126).reshape(-1)
    relative = amax.reshape(-1) / unit
    total = histogram @ errors
    # A step above amax / qmax leaves codes unused.
    total[steps[None, :] > (relative / qmax)[:, None] * (1 + 1e-6)] = np.inf
    chosen = steps[np.argmin(total, axis=1)] * unit
    result: Floats = chosen.reshape(rows, shards).astype(np.float32)
    return result


def _round(values: Floats, step: Floats, qmax: int, codes: Floats) -> None:
    import numpy as np

    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    np.multiply(values, inverse[:, :, None], out=codes)
    np.clip(codes, np.float32(-qmax), np.float32(qmax), out=codes)
    np.add(codes, np.float32(_ROUNDER), out=codes)
    np.subtract(codes, np.float32(_ROUNDER), out=codes)


def _errors(values: Floats, step: Floats, codes: Floats, products: Floats) -> Float64s:
    """Sum of squared errors [r, s]."""
    import numpy as np

    np.multiply(codes, step[:, :, None], out=products)
    np.subtract(values, products, out=products)
    np.multiply(products, products, out=products)
    return _total(products)


def _total(products: Floats) -> Float64s:
    """Sums [r, s] over all columns, in float64: those a multiple of 64 apart first, one after another,
    then the upper half of the 64 sums to the lower half until one is left."""
    import numpy as np

    rows, shards, columns = products.shape
    found = np.zeros((rows, shards, _LANES))
    for start in range(0, columns, _LANES):
        found += products[:, :, start : start + _LANES]
    width = _LANES
    while width > 1:
        width //= 2
        found = found[:, :, :width] + found[:, :, width:]
    result: Float64s = found[:, :, 0]
    return result


Rounding = Literal["reference", "search"]

_LARGEST: dict[str, int] = {"int4": 7, "int8": 127}

# Added to a float32 of less than 2^22 it rounds it to an integer, ties to even, and leaves that
# integer in the low bits.
_ROUNDER = 12582912.0
_SMALLEST_NORMAL = 2.0**-126
# Of a row whose largest is this much, no denormal comes near half a step.
_FLUSH_BELOW = 2.0**-110
_ONE_127TH = 0x3C010204  # bits of fp32(1/127); dividing by 127 differs in the last bit
_BF16_INFINITY = 0x7F80


@dataclass(frozen=True, slots=True)
class Amx:
    """weight BF16 [N, K] -> for each of `shards` column shards: packed I8 [N * K/shards * bits/8] and
    scale F32 [N].

    `rounding` is `reference` (kt-kernel's own bytes) or `search` (same format, each row's step chosen
    for the least sum of squared weight errors, see formats/amx/encode.py). N must be a multiple of the
    step (128 int4, 64 int8), K of step * shards, else PlanError. NaN or infinity: RowError.
    """

    method: Method
    shards: int = 1
    rounding: Rounding = "reference"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (weight,) = args
        if weight.dtype != "BF16" or len(weight.shape) != 2:
            raise PlanError(f"expected a BF16 matrix, found {weight}")
        rows, columns = weight.shape
        step = STEP[self.method]
        if rows % step or columns % (step * self.shards):
            raise PlanError(
                f"expected rows in multiples of {step} and columns of {step * self.shards} "
                f"({RUNTIME_NAME[self.method]}, {self.shards} shards), found {list(weight.shape)}"
            )
        nbytes = rows * (columns // self.shards) * BITS[self.method] // 8
        pair = TensorType("I8", (nbytes,)), TensorType("F32", (rows,))
        return pair * self.shards

    def row_step(self, *args: TensorType) -> int:
        """Rows that one K block holds together."""
        return STEP[self.method]

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        columns = args[0].shape[1]
        part = TensorType("BF16", (stop - start, columns))
        width = columns // self.shards * BITS[self.method] // 8
        firsts = (start * width, start * 4) * self.shards
        return Part(
            ((start * columns * 2, part),), tuple(zip(firsts, self.infer(part), strict=True))
        )

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        rows, columns = args[0].shape
        yield from row_parts(self, rows, 2 * columns, limit, *args)

    def scratch(self, *args: TensorType) -> int:
        """Float32 of some rows twice; codes of whole tiles and their packed form."""
        rows, columns = args[0].shape
        tall, some = tile(rows, columns)
        searching = clip_scratch(some, columns) if self.rounding == "search" else 0
        return 8 * some * columns + 2 * tall * columns + searching

    @property
    def search_loop(self) -> str | None:
        """The loop that its steps are searched for with."""
        return "amx_search" if self.rounding == "search" else None

    def loss(self, *args: TensorType) -> str | None:
        return f"rounds experts to {RUNTIME_NAME[self.method]} ({self.rounding} rounding)"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        rows, columns = ins[0].type.shape
        bits = array(ins[0].data, np.uint16, (rows, columns))
        if self._compiled(bits, outs):
            return {}
        tall, some = tile(rows, columns)
        size, width = 4 * some * columns, columns // self.shards
        values = array(scratch[:size], np.float32, (some, columns))
        spare = scratch[size : 2 * size]
        codes = array(scratch[2 * size : 2 * size + tall * columns], np.uint8, (tall, columns))
        at = 2 * size + tall * columns
        packed = array(scratch[at : at + tall * columns], np.uint8, (tall, columns))
        searching = scratch[at + tall * columns :]
        weights = [array(out.data, np.uint8, (out.type.nbytes,)) for out in outs[::2]]
        scales = [array(out.data, np.float32, (rows,)) for out in outs[1::2]]
        with np.errstate(all="ignore"):
            for top in range(0, rows, tall):
                bottom = min(top + tall, rows)
                for first in range(top, bottom, some):
                    last = min(first + some, bottom)
                    scale = self._quantize(
                        bits[first:last], values[: last - first], spare, searching, first,
                        codes[first - top : last - top],
                    )  # fmt: skip
                    for shard, out in enumerate(scales):
                        out[first:last] = scale[:, shard]
                half = codes[: bottom - top]
                if self.method == "int4":
                    half = pair_up(half, packed[: bottom - top])
                lines = half.reshape(bottom - top, self.shards, -1)
                for shard, target in enumerate(weights):
                    place(self.method, lines[:, shard], target, top, rows, width)
        return {}

    def _compiled(self, bits: Bf16s, outs: Sequence[Buffer]) -> bool:
        """Shard by shard in a compiled loop; False if there is none for them."""
        import numpy as np

        width, largest = bits.shape[1] // self.shards, _LARGEST[self.method]
        for shard in range(self.shards):
            words = np.frombuffer(outs[2 * shard].data, np.uint32)
            scale = np.frombuffer(outs[2 * shard + 1].data, np.float32)
            first, last = shard * width, (shard + 1) * width
            if self.rounding == "reference":
                made = done(f"amx_{self.method}", bits, first, last, words, scale)
            else:
                steps, errors = ladder(largest)
                made = done("amx_search", bits, first, last, largest, steps, errors, words, scale)
            if not made:
                return False
        return True

    def _quantize(
        self,
        bits: Bf16s,
        values: Floats,
        spare: memoryview,
        searching: memoryview,
        first: int,
        codes: Bytes,
    ) -> Floats:
        """Codes of some rows as bytes: int8 as it is, int4 plus 8. Returns scales [rows, shards]."""
        import numpy as np

        rows, columns = bits.shape
        sizes = array(spare[: 2 * bits.size], np.uint16, bits.shape)
        np.bitwise_and(bits, 0x7FFF, out=sizes)
        by_shard = sizes.view(np.int16).reshape(rows, self.shards, columns // self.shards)
        largest = np.maximum.reduce(by_shard, axis=2)
        if largest.max() >= _BF16_INFINITY:
            row = int(np.argmax((largest >= _BF16_INFINITY).any(axis=1)))
            raise RowError(first + row, NOT_FINITE)
        amax = (largest.astype(np.uint32) << 16).view(np.float32)
        wide = values.view(np.int32)
        np.copyto(wide, bits)
        np.left_shift(wide, 16, out=wide)
        if bool(((amax < _FLUSH_BELOW) & (amax > 0)).any()):
            values[(sizes & 0x7F80) == 0] = 0.0
            amax[amax < _SMALLEST_NORMAL] = 0.0
        cut = values.reshape(by_shard.shape)
        step = _peer_step(self.method, amax)
        if self.rounding == "search":
            step = best_steps(cut, by_shard, amax, _LARGEST[self.method], step, searching)
            np.multiply(cut, _inverse(step)[:, :, None], out=cut)
            limit = np.float32(_LARGEST[self.method])
            np.clip(cut, -limit, limit, out=cut)
            np.add(values, np.float32(_ROUNDER + (8 if self.method == "int4" else 0)), out=values)
            np.copyto(codes, wide, casting="unsafe")
            return step if self.method == "int8" else step * np.float32(1 / 16)
        np.multiply(cut, _inverse(step)[:, :, None], out=cut)
        np.add(values, np.float32(_ROUNDER + (128 if self.method == "int4" else 0)), out=values)
        np.copyto(codes, wide, casting="unsafe")
        if self.method == "int4":
            _sixteenths(codes, array(spare[: codes.size], np.uint8, codes.shape))
        return step


def _peer_step(method: Method, amax: Floats) -> Floats:
    """The scale d of rows with these largest magnitudes."""
    import numpy as np

    if method == "int8":
        d = amax * np.array(_ONE_127TH, np.uint32).view(np.float32)
    else:
        d = (amax.astype(np.float64) * (1.0 / 112.0)).astype(np.float32)
    d[d < _SMALLEST_NORMAL] = 0.0
    return d


def _inverse(step: Floats) -> Floats:
    import numpy as np

    return np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)


def _sixteenths(codes: Bytes, spare: Bytes) -> None:
    """x + 128 -> round(x / 16) + 8 in place, halves away from zero: (x + 128 + 7 + (x >= 0)) >> 4.
    Eight bytes at a time; no byte reaches 256, so none carries into the next."""
    import numpy as np

    eight, more = codes.reshape(-1).view(np.uint64), spare.reshape(-1).view(np.uint64)
    np.right_shift(eight, np.uint64(7), out=more)
    np.bitwise_and(more, np.uint64(0x0101010101010101), out=more)
    np.add(more, np.uint64(0x0707070707070707), out=more)
    np.add(eight, more, out=eight)
    np.right_shift(eight, np.uint64(4), out=eight)
    np.bitwise_and(eight, np.uint64(0x0F0F0F0F0F0F0F0F), out=eight)


@dataclass(frozen=True, slots=True)
class AmxCodes:
    """Codes [N, K] -> for each of `numa` shards packed I8 and scale F32, shards cut by rows (gate, up)
    or by columns (`down`), which then have a scale each.

    Raises PlanError for sizes the kernels cannot hold, RunError for codes outside -7 to 7 (int4) or
    -127 to 127: the kernels' codes are symmetric.
    """

    method: Method
    numa: int
    down: bool
    row_step: ClassVar[int] = 0

    @property
    def suffixes(self) -> tuple[str, ...]:
        return tuple(
            f"numa.{shard}.{part}" for shard in range(self.numa) for part in ("weight", "scale")
        )

    def scheme_of(self, columns: int) -> IntScheme:
        group = columns // self.numa if self.down and self.numa > 1 else None
        bits: Bits = 4 if self.method == "int4" else 8
        return IntScheme(bits, group, True, None, "F32", narrow=True)

    def infer(self, weight: TensorType) -> tuple[TensorType, ...]:
        if self.down:
            return Amx(self.method, self.numa).infer(weight)
        if weight.shape[0] % self.numa:
            raise PlanError(
                f"expected rows for {self.numa} NUMA shards, found {list(weight.shape)}"
            )
        return Amx(self.method).infer(weight.with_rows(weight.shape[0] // self.numa)) * self.numa

    def loss(self, weight: TensorType) -> str | None:
        return f"rounds experts to {RUNTIME_NAME[self.method]}"

    def pack(self, codes: Codes, outs: Sequence[Buffer]) -> None:
        import numpy as np

        rows, columns = codes.codes.shape
        largest = _LARGEST[self.method]
        if codes.codes.min(initial=0) < -largest:
            raise RunError(
                f"a code is {codes.codes.min()}, and the kernels' are {-largest} to {largest}"
            )
        for shard in range(self.numa):
            if self.down:
                width = columns // self.numa
                part = codes.codes[:, shard * width : (shard + 1) * width]
                step = codes.scale[:, shard if codes.scale.shape[1] > 1 else 0]
            else:
                height = rows // self.numa
                part = codes.codes[shard * height : (shard + 1) * height]
                step = codes.scale[shard * height : (shard + 1) * height, 0]
            weight, scale = outs[2 * shard], outs[2 * shard + 1]
            place_codes(self.method, part, array(weight.data, np.uint8, (weight.type.nbytes,)))
            factor = np.float32(1 / 16 if self.method == "int4" else 1)
            np.multiply(step, factor, out=array(scale.data, np.float32, scale.type.shape))
