"""GPTQ's own form -> BF16: bf16((code - zero) * scale), rounded once.

Format source: AutoGPTQ 0.7 and GPTQModel, as sglang and vLLM read it (`gptq`, of the
checkpoint_format `gptq` or `gptq_v2`): qweight I32 [K * bits / 32, N], packed along K; qzeros I32
[groups, N * bits / 32], packed along N, in the first version less one; scales [groups, N]; g_idx I32
[K], the group of each column. Codes of 3 bits lie across words: 32 of them in three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import RowError
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import WORD_BITS, words
from qconvert.formats.int_packed.decode import (
    FromColumns,
    Products,
    exact_scales,
    group_of_columns,
    scale_scratch,
    scales,
)
from qconvert.ops.base import array
from qconvert.ops.cast import float_tiles
from qconvert.ops.ints import unpacked

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s, Int8s, Int32s, UInt16s, UInt32s


@dataclass(frozen=True, slots=True)
class DequantGptq(FromColumns):
    """qweight, qzeros, scales in BF16, F16 or F32, g_idx -> BF16 [count, K]: rows [first, first + count)
    of the weight [N, K], which are columns here, so it cannot be cut. `group` None: one for all K.
    Without g_idx groups are neighbouring columns.

    Raises PlanError where dtypes or shapes do not fit, RowError where a scale is NaN or infinite, a
    column of K is of no group, or a zero point of version 1 is one that readers differ on (the
    largest number, which some take for 0 and some for one above it).
    """

    bits: int
    group: int | None
    version: Literal[1, 2]
    first: int
    count: int

    format: ClassVar[str] = "gptq"
    scale_at: ClassVar[int] = 2
    stated: ClassVar[None] = None

    @property
    def packing(self) -> str:
        return "gptq" if self.version == 1 else "gptq-v2"

    @property
    def scheme(self) -> tuple[int, int | None]:
        return self.bits, self.group

    def _weight(self, words: TensorType) -> tuple[int, int]:
        return words.shape[1], words.shape[0] * WORD_BITS // self.bits

    def _beside(
        self, weight: tuple[int, int], groups: int, args: Sequence[TensorType]
    ) -> list[TensorType]:
        rows, columns = weight
        wanted = [
            TensorType("I32", (groups, words(rows, self.bits))),
            TensorType(args[2].dtype, (groups, rows)),
        ]
        return wanted + ([TensorType("I32", (columns,))] if len(args) > 3 else [])

    def integers(
        self, ins: Sequence[Buffer], codes: Int8s, zero: Int8s
    ) -> tuple[Float32s, Int32s | None]:
        import numpy as np

        middle = np.uint16(1 << (self.bits - 1))
        packed, zeros = (array(one.data, np.uint32, one.type.shape) for one in ins[:2])
        for start, stop in float_tiles(*codes.shape):
            fields = unpacked(packed[:, start:stop].T, self.bits)
            codes[start:stop] = (fields - middle).astype(np.int8)
        zero[:] = (self._zeros(zeros) - middle).astype(np.int8)
        order = group_of_columns(ins[3], zero.shape[1]) if len(ins) > 3 else None
        return exact_scales(ins[2]).T, order

    def _products(self, ins: Sequence[Buffer], scratch: memoryview) -> Products:
        import numpy as np

        qweight, qzeros, scale, *g_idx = ins
        columns, groups = self._weight(qweight.type)[1], scale.type.shape[0]
        mine = slice(self.first, self.first + self.count)
        source = array(qweight.data, np.uint32, qweight.type.shape)[:, mine]
        zero = self._zeros(array(qzeros.data, np.uint32, qzeros.type.shape))
        used = scale_scratch(scale.type)
        column_group = group_of_columns(g_idx[0], groups) if g_idx else None
        side_by_side = column_group is None or np.array_equal(
            column_group, np.arange(columns) // (columns // groups)
        )
        return Products.of_words(
            scratch[used:], (self.count, columns), self.bits,
            lambda start, stop: np.ascontiguousarray(source[:, start:stop].T).view(np.uint8),
            scales(scale, scratch[:used]).T[mine], zero, None if side_by_side else column_group,
        )  # fmt: skip

    def _zeros(self, packed: UInt32s) -> UInt16s:
        """Zero points [count, groups], counted from 0 as the stored codes are."""
        import numpy as np

        mine = unpacked(packed, self.bits).T[self.first : self.first + self.count]
        if self.version == 2:
            return mine
        most = (1 << self.bits) - 1
        if mine.size and int(mine.max()) == most:
            row = int(np.argwhere(mine == most)[0][0])
            raise RowError(
                row,
                f"has a stored zero point of {most}, which readers of GPTQ's first version take for 0 "
                f"or for {most + 1}; have the model saved as gptq_v2",
            )
        return mine + np.uint16(1)
