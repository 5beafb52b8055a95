"""AutoAWQ's own form -> BF16: bf16((code - zero) * scale), rounded once.

Format source: AutoAWQ 0.2, version `gemm`, as compressed-tensors (`entrypoints/convert/converters/
autoawq.py`), sglang and vLLM (`awq.py`) read it: qweight I32 [K, N / 8], packed along N;
qzeros I32 [groups, N / 8], counted from 0; scales [groups, N]. The first nibble of a word, its lowest,
is of its column 0, the next of 2, 4, 6, 1, 3, 5 and 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import IntScheme
from qconvert.formats.int_packed.decode import (
    FromColumns,
    Products,
    exact_scales,
    scale_scratch,
    scales,
)
from qconvert.formats.int_packed.packers import AWQ_PLACES
from qconvert.ops.base import array
from qconvert.ops.cast import float_tiles

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s, Int8s, UInt8s, UInt16s, UInt32s


BITS = 4
WORD = 32 // BITS
MIDDLE = 1 << (BITS - 1)


@dataclass(frozen=True, slots=True)
class DequantAwq(FromColumns):
    """qweight, scales in BF16, F16 or F32, and where there are `zeros` qzeros -> BF16 [count, K]: rows
    [first, first + count) of the weight [N, K], which are columns here, so it cannot be cut. Without
    qzeros the zero point is 8.

    Raises PlanError where dtypes or shapes do not fit, RowError where a scale is NaN or infinite.
    """

    group: int | None
    zeros: bool
    first: int
    count: int

    format: ClassVar[str] = "awq"
    packing: ClassVar[str] = "awq"
    scale_at: ClassVar[int] = 1

    @property
    def scheme(self) -> tuple[int, int | None]:
        return BITS, self.group

    @property
    def stated(self) -> IntScheme:
        return IntScheme(BITS, self.group, not self.zeros)

    def unpacked(self, words: UInt32s, start: int, stop: int) -> UInt8s:
        """Words [K, N / 8] -> codes of the rows [start, stop) of N from 0 on, [stop - start, K]."""
        return awq_rows(words, start, stop)

    def _weight(self, words: TensorType) -> tuple[int, int]:
        return WORD * words.shape[1], words.shape[0]

    def _beside(
        self, weight: tuple[int, int], groups: int, args: Sequence[TensorType]
    ) -> list[TensorType]:
        rows, _ = weight
        wanted = [TensorType(args[1].dtype, (groups, rows))]
        return wanted + ([TensorType("I32", (groups, rows // WORD))] if self.zeros else [])

    def integers(self, ins: Sequence[Buffer], codes: Int8s, zero: Int8s) -> tuple[Float32s, None]:
        import numpy as np

        words = array(ins[0].data, np.uint32, ins[0].type.shape)
        for start, stop in float_tiles(*codes.shape):
            codes[start:stop] = self.unpacked(words, start, stop).view(np.int8) - np.int8(MIDDLE)
        if self.zeros:
            at = array(ins[2].data, np.uint32, ins[2].type.shape)
            zero[:] = self.unpacked(at, 0, codes.shape[0]).view(np.int8) - np.int8(MIDDLE)
        return exact_scales(ins[1]).T, None

    def _products(self, ins: Sequence[Buffer], scratch: memoryview) -> Products:
        import numpy as np

        qweight, scale, *qzeros = ins
        rows, columns = self.count, qweight.type.shape[0]
        words = array(qweight.data, np.uint32, qweight.type.shape)
        zero: UInt16s = np.full((rows, scale.type.shape[0]), MIDDLE, np.uint16)
        if qzeros:
            stored = array(qzeros[0].data, np.uint32, qzeros[0].type.shape)
            zero = self.unpacked(stored, self.first, self.first + rows).astype(np.uint16)
        used = scale_scratch(scale.type)
        mine = slice(self.first, self.first + rows)
        return Products(
            scratch[used:], (rows, columns), 8,
            lambda start, stop: self.unpacked(words, self.first + start, self.first + stop),
            scales(scale, scratch[:used]).T[mine], zero, None,
        )  # fmt: skip


def awq_rows(words: UInt32s, start: int, stop: int, places: Sequence[int] | None = None) -> UInt8s:
    """Words [K, N / 8] -> codes of the rows [start, stop) of N, one a byte, [stop - start, K]. `places`:
    the nibble of each of a word's eight rows, by default AutoAWQ's."""
    import numpy as np

    first, last = start // WORD, -(-stop // WORD)
    part = np.ascontiguousarray(words[:, first:last].T)  # [words, K]
    codes = np.empty((last - first, WORD, words.shape[0]), np.uint8)
    for column, place in enumerate(places or AWQ_PLACES):
        np.bitwise_and(part >> np.uint32(BITS * place), 15, out=codes[:, column], casting="unsafe")
    return codes.reshape(-1, words.shape[0])[start - first * WORD : stop - first * WORD]


# --- Quark ----------------------------------------------------------------------------------------

# amd-quark 0.13, `torch/utils/pack.py` (`Pack_4_bits`): zero points [groups, N / 8]; with pack_method
# `order` a word's first nibble is of its first output, the next of the next. vLLM (`quark/utils.py`,
# `canonicalize_quark_packed_int4`) makes AutoAWQ's words of them.
_IN_ORDER = tuple(range(WORD))


@dataclass(frozen=True, slots=True)
class DequantQuark(DequantAwq):
    """weight, weight_scale in BF16, F16 or F32, and where there are `zeros` weight_zero_point -> BF16
    [count, K]: rows [first, first + count) of the weight [N, K]. `signed`: codes and zero points are in
    two's complement; `reorder`: they lie as AutoAWQ's.

    Raises PlanError where dtypes or shapes do not fit, RowError where a scale is NaN or infinite.
    """

    signed: bool
    reorder: bool

    def unpacked(self, words: UInt32s, start: int, stop: int) -> UInt8s:
        """Words [K, N / 8] -> codes of the rows [start, stop) of N, plus 8 where they are signed."""
        found = awq_rows(words, start, stop, None if self.reorder else _IN_ORDER)
        return found ^ found.dtype.type(MIDDLE) if self.signed else found
