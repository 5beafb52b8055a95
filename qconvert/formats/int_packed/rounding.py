"""Round to nearest, for every integer form: symmetric and asymmetric, 4 and 8 bits.

With BF16 scales the arithmetic is llm-compressor 0.14's on bf16 weights, every step rounded to bf16
(compressed-tensors 0.19, `quantization/utils/helpers.py` `calculate_qparams` and
`quantization/lifecycle/forward_helpers.py` `_quantize`), so its results are that project's. With other
scales, which no such reference exists for, only the scale is rounded and the rest is float32.
`formats/w4a16.py` has the quick way for the symmetric compressed-tensors form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, Part, aligned, whole
from qconvert.core.int_scheme import Codes, IntScheme, Packer
from qconvert.formats.int_packed.packers import PackQuantized
from qconvert.formats.int_packed.w4a16 import PackInt4, PackInt8
from qconvert.ops.buffers import array
from qconvert.ops.cast import TILE_ELEMENTS, decode, round_to_bf16
from qconvert.ops.rowwise import RowOp, row_parts

if TYPE_CHECKING:
    from qconvert.core.int_scheme import Float32s, Int8s, Int32s

# What a scale of zero becomes: the epsilon of its dtype.
_EPS = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23}


def encoder(scheme: IntScheme, packer: Packer) -> RowOp:
    """The op that rounds a BF16 matrix to nearest and packs it. Raises PlanError for an actorder, which
    only calibration knows."""
    if scheme.actorder is not None:
        raise PlanError(
            f"actorder {scheme.actorder!r} orders columns by calibration data; rounding to nearest "
            "has none: leave it out, or calibrate"
        )
    if isinstance(packer, PackQuantized) and scheme.symmetric and scheme.scale_dtype == "BF16":
        return PackInt4(scheme.group) if scheme.bits == 4 else PackInt8(scheme.group)
    return RoundToNearest(scheme, packer)


@dataclass(frozen=True, slots=True)
class RoundToNearest:
    """BF16 [N, K] -> what the packer makes of it.

    Symmetric: scale = amax / half the range, code = w / scale. Asymmetric: scale = (max - min) / the
    range, both taken with 0 in it; zero = lowest code - min / scale; code = w / scale + zero. Rounded
    to nearest, ties to even, and held to the range. Raises PlanError where the argument is no BF16
    matrix or the packer cannot hold it, RowError for NaN, infinity, and scales beyond their dtype.
    """

    scheme: IntScheme
    packer: Packer

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (weight,) = args
        if weight.dtype != "BF16" or len(weight.shape) != 2:
            raise PlanError(
                f"expected a BF16 matrix to quantize to INT{self.scheme.bits}, found {weight}"
            )
        return self.packer.infer(weight)

    def row_step(self, *args: TensorType) -> int:
        return self.packer.row_step or max(1, args[0].shape[0])

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        (weight,) = args
        if (start, stop) == (0, weight.shape[0]):
            return whole(self, args)
        part = weight.with_rows(stop - start)
        outs = []
        for kind, inner in zip(self.infer(weight), self.infer(part), strict=True):
            # A result has a row for each of the matrix, or for a step of them.
            height = 1 if kind.shape[0] == weight.shape[0] else self.packer.row_step
            outs.append((start // height * kind.row_nbytes, inner))
        return Part(((start * weight.row_nbytes, part),), tuple(outs))

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        row_bytes = 2 * args[0].row_nbytes
        return row_parts(self, args[0].shape[0], row_bytes, limit, *args)

    def scratch(self, *args: TensorType) -> int:
        """Codes, scales and zero points of the whole part, and a tile twice as float32."""
        rows, columns = args[0].shape
        groups = self.scheme.groups(columns)
        tile = _tile_rows(rows, columns) * columns
        return (
            aligned(rows * columns)
            + aligned(4 * rows * groups)
            + aligned(rows * groups)
            + 2 * aligned(4 * tile)
        )

    def loss(self, *args: TensorType) -> str | None:
        return f"{self.packer.loss(args[0])} (error about half a step at most)"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        scheme, weight = self.scheme, ins[0].type
        rows, columns = weight.shape
        groups = scheme.groups(columns)
        height = _tile_rows(rows, columns)
        at = 0

        def cut(nbytes: int) -> memoryview:
            nonlocal at
            found = scratch[at : at + nbytes]
            at += aligned(nbytes)
            return found

        codes = array(cut(rows * columns), np.int8, (rows, columns))
        scale = array(cut(4 * rows * groups), np.float32, (rows, groups))
        zero = array(cut(rows * groups), np.int8, (rows, groups))
        values = array(cut(4 * height * columns), np.float32, (height, columns))
        spare = array(cut(4 * height * columns), np.int32, (height, columns))
        with np.errstate(all="ignore"):  # a scale of 0, or beyond its dtype, is looked after below
            for start in range(0, rows, max(1, height)):
                stop = min(start + height, rows)
                part, beside = values[: stop - start], spare[: stop - start]
                size = weight.row_nbytes
                decode(ins[0].data[start * size : stop * size], "BF16", part, beside)
                shape = (stop - start, groups, columns // groups)
                try:
                    _round(
                        part.reshape(shape), beside.reshape(shape), scheme,
                        codes[start:stop].reshape(shape), scale[start:stop], zero[start:stop],
                    )  # fmt: skip
                except RowError as error:
                    raise RowError(start + error.row, error.what) from error
        self.packer.pack(Codes(codes, scale, None if scheme.symmetric else zero), outs)
        return {}


def _tile_rows(rows: int, columns: int) -> int:
    return min(rows, max(1, TILE_ELEMENTS // max(1, columns)))


def _round(
    values: Float32s,
    spare: Int32s,
    scheme: IntScheme,
    codes: Int8s,
    scale: Float32s,
    zero: Int8s,
) -> None:
    """Groups [n, groups, G] of weights -> codes alike, scale and zero [n, groups]."""
    import numpy as np

    low, high = scheme.low, scheme.high
    bf16 = scheme.scale_dtype == "BF16"
    most, least = values.max(axis=2), values.min(axis=2)  # NaN goes through both
    finite = np.isfinite(most) & np.isfinite(least)
    if not finite.all():
        row = int(np.argwhere(~finite)[0][0])
        raise RowError(row, "holds NaN or infinity; the checkpoint is broken")
    np.maximum(most, 0, out=most)
    np.minimum(least, 0, out=least)
    if scheme.symmetric:
        np.copyto(scale, np.maximum(most, -least) / np.float32((high - low) / 2))
    else:
        spread = most - least
        if bf16:
            _to_bf16(spread)
        np.copyto(scale, spread / np.float32(high - low))
    _to_scale_dtype(scale, scheme)
    if not np.isfinite(scale).all():
        row = int(np.argwhere(~np.isfinite(scale))[0][0])
        raise RowError(row, f"needs a scale beyond {scheme.scale_dtype}; its weights are too large")
    if not scheme.symmetric:
        below = least / scale
        if bf16:
            _to_bf16(below)
        np.subtract(np.float32(low), below, out=below)
        if bf16:
            _to_bf16(below)
        np.clip(below, low, high, out=below)
        below[np.isnan(below)] = 0  # a group of zeros
        np.copyto(zero, np.rint(below), casting="unsafe")
    scale[scale == 0] = _EPS[scheme.scale_dtype]
    np.divide(values, scale[:, :, None], out=values)
    if bf16:
        _to_bf16(values, spare)
    if not scheme.symmetric:
        np.add(values, zero[:, :, None], out=values, casting="unsafe")
        if bf16:
            _to_bf16(values, spare)
    np.clip(values, low, high, out=values)
    np.rint(values, out=values)
    np.copyto(codes, values, casting="unsafe")


def _to_bf16(values: Float32s, spare: Int32s | None = None) -> None:
    """Rounded in place to numbers of bf16."""
    import numpy as np

    bits = values.view(np.int32)
    round_to_bf16(bits, np.empty_like(bits) if spare is None else spare)
    np.left_shift(bits, 16, out=bits)


def _to_scale_dtype(scale: Float32s, scheme: IntScheme) -> None:
    import numpy as np

    if scheme.scale_dtype == "BF16":
        _to_bf16(scale)
    elif scheme.scale_dtype == "F16":
        np.copyto(scale, scale.astype(np.float16))
