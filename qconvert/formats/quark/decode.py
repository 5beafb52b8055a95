"""Quark's INT4 -> BF16: bf16((code - zero) * scale), rounded once.

Format source: amd-quark 0.13, `torch/utils/pack.py` (`Pack_4_bits`): words as AutoAWQ's, I32 [K, N / 8],
zero points [groups, N / 8], scales [groups, N], where `int4` codes are in two's complement; with
pack_method `order` a word's first nibble is of its first output, the next of the next. vLLM
(`quark/utils.py`, `canonicalize_quark_packed_int4`) makes AutoAWQ's words of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.formats.int_packed.awq import MIDDLE, WORD, DequantAwq, awq_rows

if TYPE_CHECKING:
    from qconvert.core.arrays import UInt8s, UInt32s

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
