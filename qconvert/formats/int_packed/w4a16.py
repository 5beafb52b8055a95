"""W4A16 and W8A16: symmetric INT4 or INT8 weights in groups or rows of one scale, packed; activations
stay bf16.

Format source: compressed-tensors 0.19, `compressors/pack_quantized/base.py` and `helpers.py` (words),
`quantization/utils/helpers.py` `calculate_qparams` (scales) and
`quantization/lifecycle/forward_helpers.py` `_quantize` (codes), as llm-compressor 0.14 calls them with
its `memoryless_minmax` observer. That arithmetic is bf16's: the quotient weight / scale is rounded to
bf16 before it is rounded to a code. (On an accelerator its Triton kernel skips the first rounding,
and some codes differ by one.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, Part
from qconvert.ops.buffers import array
from qconvert.ops.cast import round_to_bf16
from qconvert.ops.int4 import CODES_PER_WORD, spread_nibbles, tile_groups
from qconvert.ops.rowwise import row_parts

if TYPE_CHECKING:
    import numpy as np

    Int16s = np.ndarray[tuple[int, ...], np.dtype[np.int16]]
    Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
    Float32s = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

_WORD_BITS = 32
_BF16_INFINITY = 0x7F80
_EPS_BITS = 0x3C000000  # 2^-7, bf16's epsilon: the scale of a group of zeros

# Below 2^-120 a scale may be a denormal, whose rounding is so coarse that a quotient exceeds 8. From
# there on a scale is off by 2^-9 of itself at most, and a quotient rounds to -8 to 8, or -128 to 128.
_COARSE = (127 - 120) << 7

# A float32 from 2^23 to 2^24 counts ones, so adding this rounds to whole numbers, ties to even, and
# leaves the number in the lowest bits; with 8 or 128 more, what a code is stored as.
_ROUNDER = 1.5 * 2.0**23

_BIT_4 = 0x0101010101010101

# Of the two ways to find a group's largest value, the one by shifts is quicker for groups below this.
_SHORT_GROUP = 128


@dataclass(frozen=True, slots=True)
class _PackSymmetric:
    """BF16 [N, K] -> packed I32 [N, K / word] and scale BF16 [N, K / group]; group None: [N, 1].

    A group's scale is bf16(largest size / half the range), or 2^-7 where that is zero; a code is
    bf16(w / scale) rounded to a whole number, ties to even, and held to the range. Raises PlanError
    where the argument is no BF16 matrix of whole groups and words, RowError where it holds NaN or
    infinity.
    """

    group: int | None
    bits: ClassVar[int]

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (weight,) = args
        if weight.dtype != "BF16" or len(weight.shape) != 2:
            raise PlanError(f"expected a BF16 matrix to quantize to INT{self.bits}, found {weight}")
        rows, columns = weight.shape
        group, word = self._width(weight), _WORD_BITS // self.bits
        if group < 1 or columns % group or columns % word:
            raise PlanError(
                f"expected columns in whole groups of {group} and whole words of {word}, found "
                f"{columns} in {weight}"
            )
        return (
            TensorType("I32", (rows, columns // word)),
            TensorType("BF16", (rows, columns // group)),
        )

    def _width(self, weight: TensorType) -> int:
        return weight.shape[1] if self.group is None else self.group

    def row_step(self, *args: TensorType) -> int:
        return 1

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        (weight,) = args
        return Part(
            args=((start * weight.row_nbytes, weight.with_rows(stop - start)),),
            outs=tuple(
                (start * kind.row_nbytes, kind.with_rows(stop - start))
                for kind in self.infer(weight)
            ),
        )

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        row_bytes = sum(kind.row_nbytes for kind in (*args, *self.infer(*args)))
        return row_parts(self, args[0].shape[0], row_bytes, limit, *args)

    def scratch(self, *args: TensorType) -> int:
        """A tile as float32, its codes and one more byte an element, and for each group its scale,
        the rounding of it, and its largest value."""
        group = self._width(args[0])
        groups = min(args[0].numel // group, tile_groups(group))
        return 6 * groups * group + 12 * groups

    def loss(self, *args: TensorType) -> str | None:
        where = "with a scale a row" if self.group is None else f"in groups of {self.group}"
        return f"rounds bf16 to int{self.bits} {where} (error about half a step at most)"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        columns, group, bits_a_code = ins[0].type.shape[1], self._width(ins[0].type), self.bits
        half = 1 << (bits_a_code - 1)
        rounder = np.float32(_ROUNDER + half)
        total = ins[0].type.numel // group
        step = min(total, tile_groups(group))
        tile = step * group
        bits = array(scratch[: 4 * tile], np.int32, (step, group))
        codes = array(scratch[4 * tile : 5 * tile], np.uint8, (step, group))
        spare = array(scratch[5 * tile : 6 * tile], np.uint8, (step, group))
        small = array(scratch[6 * tile :], np.int32, (3, step, 1))
        source = array(ins[0].data, np.uint16, (total, group))
        packed = array(outs[0].data, np.uint8, (total * group * bits_a_code // 8,))
        scale = array(outs[1].data, np.uint16, (total, 1))
        for start in range(0, total, max(1, step)):
            stop = min(start + step, total)
            count = stop - start
            factors, beside, largest = (row[:count] for row in small)
            part, weight = bits[:count], source[start:stop]
            _largest(weight.view(np.int16), part, largest)
            if int(largest.max()) >= _BF16_INFINITY:
                first = start + int(np.flatnonzero(largest >= _BF16_INFINITY)[0])
                row = first // (columns // group)
                raise RowError(row, "holds NaN or infinity; the checkpoint is broken")
            coarse = bool(np.any((largest > 0) & (largest < _COARSE)))
            _scales(largest, half - 0.5, factors, beside)
            np.right_shift(factors, 16, out=beside)
            np.copyto(scale[start:stop], beside, casting="unsafe")

            np.copyto(part, weight)
            np.multiply(part, 1 << 16, out=part)  # quicker than numpy's shift
            values = part.view(np.float32)
            np.divide(values, factors.view(np.float32), out=values)
            # Rounded to bf16. A quotient of two numbers of 8 bits is never halfway between two of 8
            # bits: that would be an odd number of 9 bits, and times the divisor it would need 9.
            np.add(part, 0x8000, out=part)
            np.bitwise_and(part, -0x10000, out=part)
            if coarse:
                np.clip(values, -half, half, out=values)
            size = count * group
            if bits_a_code == 8:
                np.minimum(values, np.float32(half - 1), out=values)
                np.add(values, rounder, out=values)
                target = packed[start * group : stop * group]
                np.copyto(target.reshape(count, group), part, casting="unsafe")
                continue
            np.add(values, rounder, out=values)
            np.copyto(codes[:count], part, casting="unsafe")
            _pack(
                codes.reshape(-1)[:size],
                spare.reshape(-1)[:size],
                packed[start * group // 2 : stop * group // 2],
            )
        return {}


@dataclass(frozen=True, slots=True)
class PackInt4(_PackSymmetric):
    """Codes -8 to 7, eight a word, in compressed-tensors' form; see `_PackSymmetric`."""

    bits: ClassVar[int] = 4


@dataclass(frozen=True, slots=True)
class PackInt8(_PackSymmetric):
    """Codes -128 to 127, four a word, in compressed-tensors' form; see `_PackSymmetric`."""

    bits: ClassVar[int] = 8


def _largest(weight: Int16s, work: Int32s, out: Int32s) -> None:
    """The bits of the largest size in each group [n, G] -> [n, 1]. Without their sign, bf16 numbers
    are in the order of their bits, NaN last. `work` has room for two copies of `weight`."""
    import numpy as np

    count, group = weight.shape
    halves = work.reshape(-1).view(np.int16)
    size = weight.size
    sizes, other = halves[:size], halves[size:]
    np.bitwise_and(weight, 0x7FFF, out=sizes.reshape(count, group))
    if group >= _SHORT_GROUP or group & (group - 1):
        maxima = other[:count].reshape(count, 1)
        np.maximum.reduce(sizes.reshape(count, group), axis=1, keepdims=True, out=maxima)
        np.copyto(out, maxima)
        return
    # numpy starts a reduction anew for each group, which costs more than a short group does. Here
    # entry i becomes the largest of i and its next 1, 3, 7, ... neighbours, all groups at once.
    width = 1
    while width < group:
        left = size - 2 * width + 1
        np.maximum(sizes[:left], sizes[width : width + left], out=other[:left])
        sizes, other = other, sizes
        width *= 2
    np.copyto(out, sizes[::group].reshape(count, 1))


def _scales(largest: Int32s, half_range: float, factors: Int32s, spare: Int32s) -> None:
    """bf16 bits of each group's largest size -> float32 bits of its scale, which is a bf16 number."""
    import numpy as np

    np.left_shift(largest, 16, out=factors)
    values = factors.view(np.float32)
    np.divide(values, np.float32(half_range), out=values)
    round_to_bf16(factors, spare)
    np.left_shift(factors, 16, out=factors)
    factors[factors == 0] = _EPS_BITS


def _pack(
    codes: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    spare: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
    out: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
) -> None:
    """Bytes 0 to 16 -> nibbles, 16 as 15, the first of a pair in the lower one."""
    import numpy as np

    words, beside = codes.view(np.uint64), spare.view(np.uint64)
    np.right_shift(words, 4, out=beside)
    np.bitwise_and(beside, _BIT_4, out=beside)
    np.subtract(words, beside, out=words)
    np.right_shift(words, 4, out=beside)
    np.bitwise_or(words, beside, out=words)
    np.copyto(out, codes.view(np.uint16), casting="unsafe")


def inverse(packed: Int32s, scale: Float32s, group: int) -> Float32s:
    """What the words mean: packed int32 [N, K/8] and scale float32 [N, K/group] -> float32 [N, K],
    code * scale in float32, not rounded to bf16 (kernels multiply before they round)."""
    import numpy as np

    rows = packed.shape[0]
    nibbles = np.empty(packed.size * (CODES_PER_WORD // 2), np.uint16)
    spread_nibbles(
        np.ascontiguousarray(packed).view(np.uint8).reshape(-1), nibbles, np.empty_like(nibbles)
    )
    codes = nibbles.view(np.int8).reshape(rows, scale.shape[1], group) - np.int8(8)
    with np.errstate(over="ignore"):  # -8 times the very largest scales is infinite
        values: Float32s = codes.astype(np.float32) * scale[:, :, None]
    return values.reshape(rows, scale.shape[1] * group)
