"""The largest weights of matrices, and the global scale that NVFP4 makes of them: one for a matrix, or
for several that are served as one. See `formats/nvfp4/encode.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer
from qconvert.core.parameter_names import Dialect
from qconvert.formats.nvfp4.format import RANGE
from qconvert.ops.base import Exact, Uncut, array
from qconvert.ops.cast import (
    BEYOND,
    FLOAT_DTYPES,
    NOT_FINITE,
    TILE_ELEMENTS,
    check_beyond,
    matrix_to_quantize,
    round_to_bf16,
)
from qconvert.ops.compiled import done
from qconvert.ops.rowwise import EachRow, Recode

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.arrays import Float32s

    Bits = np.ndarray[tuple[int, ...], np.dtype[np.int16 | np.int32]]

# Without their sign, numbers are in the order of their bits; from here on they are none.
_INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}


@dataclass(frozen=True, slots=True)
class RowMaxima(EachRow, Exact):
    """A matrix [N, K] in BF16, F16 or F32 -> the largest size in each row [N], in the same dtype.

    Raises PlanError for anything else, RowError where a row holds NaN, infinity, or a number that bf16
    has no room for.
    """

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (weight,) = args
        matrix_to_quantize(weight, "NVFP4", FLOAT_DTYPES)
        return (TensorType(weight.dtype, weight.shape[:1]),)

    def scratch(self, *args: TensorType) -> int:
        """The sizes of a tile."""
        (weight,) = args
        return _tile_rows(weight) * weight.row_nbytes

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        weight = ins[0].type
        dtype = bits_type(weight.dtype)
        rows, columns = weight.shape
        if weight.dtype == "BF16":
            bits = array(ins[0].data, np.uint16, (rows, columns))
            if done("row_maxima", bits, array(outs[0].data, np.uint16, (rows,))):
                return {}
        height = _tile_rows(weight)
        source = array(ins[0].data, dtype, (rows, columns))
        target = array(outs[0].data, dtype, (rows,))
        sizes = array(scratch, dtype, (height, columns))
        for start in range(0, rows, max(1, height)):
            stop = min(start + height, rows)
            part = sizes[: stop - start]
            np.bitwise_and(source[start:stop], np.iinfo(dtype).max, out=part)
            np.maximum.reduce(part, axis=1, out=target[start:stop])
        broken = np.flatnonzero(target >= _INFINITY[weight.dtype])
        if broken.size:
            raise RowError(int(broken[0]), NOT_FINITE)
        if weight.dtype == "F32":
            check_beyond(target.view(np.float32), 0, 1, BEYOND)
        return {}


@dataclass(frozen=True, slots=True)
class DecodedMaxima(Exact, Recode):
    """A stored matrix -> the largest size in each of its rows once decoded. What decoding rounds counts
    as lost where it is decoded to be quantized."""


@dataclass(frozen=True, slots=True)
class OwnScale(Uncut, Exact):
    """Row maxima of one matrix, or of several that share a scale -> that scale, F32 [1].

    Where nothing but zeros, or numbers next to zero, would make it infinite (or 0, in modelopt's
    dialect) it is 1. Raises PlanError where dtypes differ.
    """

    dialect: Dialect

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        dtypes = sorted({kind.dtype for kind in args})
        if len(dtypes) != 1 or dtypes[0] not in FLOAT_DTYPES:
            raise PlanError(
                "matrices that share a scale must have one dtype, found "
                f"{' and '.join(dtypes) or 'none'}: cast them to one first"
            )
        return (TensorType("F32", (1,)),)

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        dtype = ins[0].type.dtype
        kind = bits_type(dtype)
        largest = max(
            (int(array(b.data, kind, b.type.shape).max(initial=0)) for b in ins), default=0
        )
        amax = as_float32(np.array([largest], kind), dtype)
        own = array(outs[0].data, np.float32, (1,))
        with np.errstate(all="ignore"):
            if self.dialect == "modelopt":
                np.divide(amax, np.float32(RANGE), out=own)
                own[own == 0] = 1
                return {}
            # torch divides a number by a tensor this way: it multiplies by the tensor's reciprocal.
            np.divide(np.float32(1), amax, out=own)
            if dtype == "BF16":
                to_bf16_values(own)
            np.multiply(own, np.float32(RANGE), out=own)
            if dtype == "BF16":
                to_bf16_values(own)
            own[np.isinf(own)] = 1
        return {}


def _tile_rows(weight: TensorType) -> int:
    rows, columns = weight.shape
    return min(rows, max(1, TILE_ELEMENTS // max(1, columns)))


def bits_type(dtype: str) -> type[np.int16] | type[np.int32]:
    import numpy as np

    return np.int32 if dtype == "F32" else np.int16


def as_float32(
    bits: np.ndarray[tuple[int, ...], np.dtype[np.int16 | np.int32]], dtype: str
) -> Float32s:
    """Bits of numbers above 0 as float32."""
    import numpy as np

    found: Float32s
    if dtype == "F16":
        found = bits.view(np.float16).astype(np.float32)
    elif dtype == "BF16":
        found = (bits.astype(np.int32) << 16).view(np.float32)
    else:
        found = bits.view(np.float32)
    return found


def to_bf16_values(values: Float32s) -> None:
    """Rounded in place to numbers of bf16. (A few: this takes memory of its own.)"""
    import numpy as np

    bits = values.view(np.int32)
    round_to_bf16(bits, np.empty_like(bits))
    np.left_shift(bits, 16, out=bits)
