"""Round to nearest, for every integer form: symmetric and asymmetric, 4 and 8 bits.

With BF16 scales the arithmetic is that of llm-compressor on bf16 weights, with its
`memoryless_minmax` observer: every result is rounded to bf16, the quotient weight / scale too, before it
is rounded to a code (compressed-tensors, `quantization/utils/helpers.py` `calculate_qparams` and
`quantization/lifecycle/forward_helpers.py` `_quantize`). So its results are the same. (On an accelerator
its Triton kernel skips the rounding of the quotient, and some codes differ by one.) With other scales,
for which no such reference exists, only the scale is rounded and the rest is float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, Part, aligned
from qconvert.core.int_scheme import Codes, IntScheme, Packer, Signs
from qconvert.formats.int_packed.packers import PackQuantized
from qconvert.formats.int_packed.search import EPS, held, round_any, search_rows, searched
from qconvert.ops.base import array
from qconvert.ops.cast import NOT_FINITE, decode, matrix_to_quantize
from qconvert.ops.compiled import done
from qconvert.ops.rowwise import EachRow, RowOp, row_parts

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s, Int8s, Int16s, Int32s, UInt16s


_BF16_INFINITY = 0x7F80
# Below 2^-120 a scale may be a denormal, whose rounding is so coarse that a quotient exceeds 8. From
# there on a scale is off by 2^-9 of itself at most, and a quotient rounds to -8 to 8, or -128 to 128.
_COARSE = (127 - 120) << 7
# A float32 from 2^23 to 2^24 counts ones, so adding this rounds to whole numbers, ties to even, and
# leaves the number in the lowest byte.
_ROUNDER = 1.5 * 2.0**23
# Elements worked on at a time. Of 2^16 to 2^18 this measured best, by a quarter: in smaller tiles the
# cost of numpy's calls shows more than what larger ones lose to the caches.
_TILE_ELEMENTS = 1 << 18
# A search takes more at once: a GPU that several processes share turns from one to the next slowly.
_SEARCH_ELEMENTS = 1 << 22
# Of the two ways to find a group's largest value, the one by shifts is quicker for groups below this.
_SHORT_GROUP = 128


# Of a group of weights, in what is told of a run.
LOST = "groups of weights written as 0, each too small for a scale in"
# 2^-11 in BF16, half the scale of a group of zeros in F16.
_HALF_OF_EPS = (127 - 11) << 7
Scales = Literal["amax", "search"]


def encoder(
    scheme: IntScheme, packer: Packer, scales: Scales = "amax", signs: Signs = "positive"
) -> RowOp:
    """The op that rounds a BF16 matrix to nearest and packs it; `signs` are those that scales which are
    searched for may have, where that gains anything. Raises PlanError for an actorder, which
    only calibration knows."""
    if scheme.actorder is not None:
        raise PlanError(
            f"actorder {scheme.actorder!r} orders columns by calibration data; rounding to nearest "
            "has none: leave it out, or calibrate"
        )
    signed = scales == "search" and signs == "both" and scheme.gains_by_signs
    return RoundToNearest(scheme, packer, scales, signed)


@dataclass(frozen=True, slots=True)
class RoundToNearest(EachRow):
    """BF16 [N, K] -> what the packer makes of it.

    Symmetric: scale = amax / half the range, code = w / scale. Asymmetric: scale = (max - min) / the
    range, both taken with 0 in it; zero = lowest code - min / scale; code = w / scale + zero. Rounded
    to nearest, ties to even, and held to the range; a scale of 0 becomes its dtype's epsilon. With
    `scales: search` each group's is the best of a ladder, see formats/int_packed/search.py, `signed`: or
    of the same below 0. Raises
    PlanError where the argument is no BF16 matrix or the packer cannot hold it, RowError for NaN,
    infinity, and scales beyond their dtype.
    """

    scheme: IntScheme
    packer: Packer
    scales: Scales = "amax"
    signed: bool = False

    @property
    def search_loop(self) -> str | None:
        """The loop that its scales are searched for with."""
        return "ints_search" if self.scales == "search" else None

    def __repr__(self) -> str:
        """compressed-tensors' symmetric form has the name of an op that it once had: fingerprints and
        journals hold it."""
        scheme = self.scheme
        if self.scales != "amax":
            signed = ", signed=True" if self.signed else ""
            return (
                f"RoundToNearest(scheme={scheme!r}, packer={self.packer!r}, scales={self.scales!r}"
                f"{signed})"
            )
        if self.packer == PackQuantized(scheme) and _is_plain(scheme) and scheme.actorder is None:
            return f"PackInt{scheme.bits}(group={scheme.group})"
        return f"RoundToNearest(scheme={scheme!r}, packer={self.packer!r})"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (weight,) = args
        matrix_to_quantize(weight, f"INT{self.scheme.bits}")
        return self.packer.infer(weight)

    def row_step(self, *args: TensorType) -> int:
        return self.packer.row_step or max(1, args[0].shape[0])

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        row_bytes = 2 * args[0].row_nbytes
        return row_parts(self, args[0].shape[0], row_bytes, limit, *args)

    def scratch(self, *args: TensorType) -> int:
        """Codes, scales and zero points of what is packed at once, and a tile twice as float32; thrice
        to search."""
        rows, columns = args[0].shape
        groups = self.scheme.groups(columns)
        height = self._height(rows, columns)
        tall = self._tall(rows, columns)
        return (
            aligned(tall * columns)
            + aligned(4 * tall * groups)
            + aligned(tall * groups)
            + (2 if self.scales == "amax" else 3) * aligned(4 * height * columns)
        )

    def _height(self, rows: int, columns: int) -> int:
        """Rows rounded at a time: as many as fill a tile."""
        return min(rows, max(1, _TILE_ELEMENTS // max(1, columns)))

    def _tall(self, rows: int, columns: int) -> int:
        """Rows packed at a time: as many as fill a tile, in whole steps of the packer."""
        step = self.packer.row_step
        tile = _TILE_ELEMENTS if self.scales == "amax" else _SEARCH_ELEMENTS
        return min(rows, max(1, tile // (step * columns)) * step) if step else rows

    def loss(self, *args: TensorType) -> str | None:
        how = "error about half a step at most" if self.scales == "amax" else "scales searched for"
        return f"{self.packer.loss(args[0])} ({how})"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        scheme, weight = self.scheme, ins[0].type
        rows, columns = weight.shape
        groups, height = scheme.groups(columns), self._height(rows, columns)
        tall = self._tall(rows, columns)
        at = lost = 0

        def cut(nbytes: int) -> memoryview:
            nonlocal at
            found = scratch[at : at + nbytes]
            at += aligned(nbytes)
            return found

        codes = array(cut(tall * columns), np.int8, (tall, columns))
        scale = array(cut(4 * tall * groups), np.float32, (tall, groups))
        zero = array(cut(tall * groups), np.int8, (tall, groups))
        values = array(cut(4 * height * columns), np.float32, (height, columns))
        spare = array(cut(4 * height * columns), np.int32, (height, columns))
        third = array(
            cut(0 if self.scales == "amax" else 4 * height * columns), np.float32, (-1, columns)
        )
        source = array(ins[0].data, np.uint16, (rows, columns))
        if self._packed_at_once(source, outs):
            return {}
        for top in range(0, rows, max(1, tall)):
            bottom = min(top + tall, rows)
            some = slice(bottom - top)
            made = Codes(codes[some], scale[some], zero[some])
            if self.scales == "amax" or not searched(
                source[top:bottom], scheme, made, signed=self.signed
            ):
                self._in_tiles(source[top:bottom], top, made, (values, spare, third))
            if scheme.scale_dtype == "F16":
                lost += _lost(source[top:bottom], made.scale)
            self.packer.pack(
                replace(made, zero=None if scheme.symmetric else made.zero),
                self._cut(outs, top, bottom, rows),
            )
        return {f"{LOST} {scheme.scale_dtype}": lost} if lost else {}

    def _packed_at_once(self, source: UInt16s, outs: Sequence[Buffer]) -> bool:
        """Return whether one compiled loop rounded and packed: INT4 in compressed-tensors' form."""
        import numpy as np

        plain = self.scales == "amax" and _is_plain(self.scheme) and self.scheme.bits == 4
        if not plain or not isinstance(self.packer, PackQuantized) or self.scheme.actorder:
            return False
        groups = outs[1].type.numel
        if not groups or source.size % (groups * self.scheme.word):  # no whole words
            return False
        packed = array(outs[0].data, np.uint8, (groups, outs[0].type.nbytes // groups))
        scale = array(outs[1].data, np.uint16, (groups,))
        return done("ints_round_pack", source.reshape(groups, -1), packed, scale)

    def _in_tiles(
        self, source: UInt16s, first: int, made: Codes, work: tuple[Float32s, Int32s, Float32s]
    ) -> None:
        """Rows [n, K], of which the first is `first` of its matrix, in tiles that `work` holds."""
        values, spare, third = work
        assert made.zero is not None
        for start in range(0, source.shape[0], max(1, values.shape[0])):
            stop = min(start + values.shape[0], source.shape[0])
            here, count = slice(start, stop), stop - start
            tile = made.codes[here], made.scale[here], made.zero[here]
            try:
                if self.scales == "amax":
                    _round(source[here], values[:count], spare[:count], self.scheme, *tile)
                else:
                    search_rows(
                        source[here],
                        values[:count],
                        spare[:count],
                        third[:count],
                        self.scheme,
                        *tile,
                        signed=self.signed,
                    )
            except RowError as error:
                raise RowError(first + start + error.row, error.what) from error

    def _cut(self, outs: Sequence[Buffer], start: int, stop: int, rows: int) -> list[Buffer]:
        """The results of rows [start, stop) of all."""
        if stop - start == rows:
            return [*outs]
        found = []
        for out in outs:
            # A result has a row for each of the matrix, or for a step of them.
            step = 1 if out.type.shape[0] == rows else self.packer.row_step
            kind = out.type.with_rows(ceil_div(stop, step) - start // step)
            at = start // step * kind.row_nbytes
            found.append(Buffer(kind, out.data[at : at + kind.nbytes]))
        return found


def _lost(weight: UInt16s, scale: Float32s) -> int:
    """Count groups of rows [n, K] of BF16 bits, of scales [n, groups] in F16, whose weights are too
    small for any scale, so that theirs is the epsilon that a group of zeros has."""
    import numpy as np

    at = np.argwhere(scale == EPS["F16"])
    if not at.size:
        return 0
    grouped = weight.reshape(*scale.shape, -1)[at[:, 0], at[:, 1]]
    largest = (grouped & 0x7FFF).max(axis=1)  # in the order of the numbers' sizes
    # Half of the epsilon's bits: a group whose largest weight is near it has a scale of its own.
    return int(np.count_nonzero((largest > 0) & (largest < _HALF_OF_EPS)))


def _is_plain(scheme: IntScheme) -> bool:
    """Return whether codes are rounded as `_round_plain` does: symmetric, to the whole range, BF16
    scales."""
    return scheme.symmetric and scheme.scale_dtype == "BF16" and not scheme.narrow


def _round(
    weight: UInt16s,
    values: Float32s,
    spare: Int32s,
    scheme: IntScheme,
    codes: Int8s,
    scale: Float32s,
    zero: Int8s,
) -> None:
    """Rows [n, K] of BF16 bits -> codes alike, scale and zero [n, groups]. `values` and `spare` are
    working memory."""
    import numpy as np

    groups = scale.shape[1]
    if _is_plain(scheme):
        shape = scale.size, -1
        _round_plain(
            weight.reshape(shape), values.view(np.int32).reshape(shape),
            spare.view(np.float32).reshape(shape), scheme, codes.reshape(shape),
            scale.reshape(shape), groups,
        )  # fmt: skip
        return
    if scheme.scale_dtype in ("BF16", "F16") and done(
        "ints_round_any", weight.reshape(scale.size, -1), scheme.low, scheme.high, scheme.symmetric,
        scheme.scale_dtype == "BF16", codes.reshape(scale.size, -1), scale.reshape(-1),
        zero.reshape(-1),
    ):  # fmt: skip
        return
    decode(weight.data, "BF16", values, spare)
    grouped = *scale.shape, -1
    with np.errstate(all="ignore"):  # a scale of 0, or beyond its dtype, is looked after
        round_any(
            values.reshape(grouped),
            spare.reshape(grouped),
            scheme,
            codes.reshape(grouped),
            scale,
            zero,
        )


def _round_plain(
    weight: UInt16s,
    bits: Int32s,
    spare: Float32s,
    scheme: IntScheme,
    codes: Int8s,
    scale: Float32s,
    groups: int,
) -> None:
    """Groups [n, G] of BF16 bits, `groups` of them a row -> codes alike and scale [n, 1], for a scheme
    as `_is_plain` says: what `_round_any` makes, in half the time. `bits` and `spare` are working
    memory."""
    import numpy as np

    if done("ints_round", weight, scheme.bits, codes, scale):
        return
    half = 1 << (scheme.bits - 1)
    largest = np.empty((weight.shape[0], 1), np.int32)
    largest_sizes(weight.view(np.int16), bits, largest)
    if int(largest.max()) >= _BF16_INFINITY:
        row = int(np.flatnonzero(largest >= _BF16_INFINITY)[0]) // groups
        raise RowError(row, NOT_FINITE)
    coarse = bool(np.any((largest > 0) & (largest < _COARSE)))
    np.left_shift(largest, 16, out=scale.view(np.int32))
    np.divide(scale, np.float32(half - 0.5), out=scale)
    held(scale, "BF16")
    scale[scale == 0] = EPS["BF16"]
    np.copyto(bits, weight)
    np.multiply(bits, 1 << 16, out=bits)  # quicker than numpy's shift
    values = bits.view(np.float32)
    np.divide(values, scale, out=values)
    # Rounded to bf16. A quotient of two numbers of 8 bits is never halfway between two of 8 bits: that
    # would be an odd number of 9 bits, and times the divisor it would need 9.
    np.add(bits, 0x8000, out=bits)
    np.bitwise_and(bits, -0x10000, out=bits)
    if coarse:
        np.clip(values, -half, half, out=values)
    # Against an array np.minimum is ten times as quick as against a scalar (numpy 2.4).
    if scheme.bits == 8:
        spare.fill(half - 1)
        np.minimum(values, spare, out=values)
    np.add(values, np.float32(_ROUNDER), out=values)
    np.copyto(codes, bits, casting="unsafe")
    if scheme.bits == 4:
        highest = spare.reshape(-1).view(np.int8)[: codes.size].reshape(codes.shape)
        highest.fill(half - 1)
        np.minimum(codes, highest, out=codes)


def largest_sizes(weight: Int16s, work: Int32s, out: Int32s) -> None:
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
