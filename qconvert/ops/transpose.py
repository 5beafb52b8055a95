"""Columns of a matrix, as rows.

Some checkpoints store a projection as [inputs, outputs] (gpt-oss, Llama 4 experts), and fused ones
hold two projections as adjacent columns: taking columns and transposing them is one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer
from qconvert.ops.base import Columnwise, Exact, array

# Transposing single bf16 values is slow: a strided copy takes nanoseconds per element, however small.
# So four source rows are interleaved into 64-bit words first (whole rows at a time, which is fast),
# and the words are transposed. A block of each kind fits a core's own cache.
_WOVEN = 4
_BLOCK_ROWS = 256
_BLOCK_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class Columns(Columnwise, Exact):
    """BF16 [K, M] -> BF16 [count, K]: result row i is source column `first` + i.

    It cannot be cut: each result row needs every source row. Raises PlanError if the source is
    not a BF16 matrix or has too few columns.
    """

    first: int
    count: int

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (source,) = args
        if source.dtype != "BF16" or len(source.shape) != 2:
            raise PlanError(f"expected a BF16 matrix to take columns of, found {source}")
        self.check_columns(source)
        return (TensorType("BF16", (self.count, source.shape[0])),)

    def scratch(self, *args: TensorType) -> int:
        """Interleaved words of a block, working memory for them, and the block transposed."""
        words = min(args[0].shape[0], _BLOCK_ROWS) // _WOVEN * min(self.count, _BLOCK_COLUMNS)
        return 3 * 8 * words

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        source = array(ins[0].data, np.uint16, ins[0].type.shape)
        source = source[:, self.first : self.first + self.count]
        target = array(outs[0].data, np.uint16, outs[0].type.shape)
        rows = source.shape[0]
        even = rows // _WOVEN * _WOVEN
        words = array(scratch, np.uint64, (3, len(scratch) // 24))
        for top in range(0, even, _BLOCK_ROWS):
            bottom = min(top + _BLOCK_ROWS, even)
            height = (bottom - top) // _WOVEN
            for left in range(0, self.count, _BLOCK_COLUMNS):
                right = min(left + _BLOCK_COLUMNS, self.count)
                width = right - left
                woven, spare, turned = (part[: height * width] for part in words)
                woven, spare = woven.reshape(height, width), spare.reshape(height, width)
                turned = turned.reshape(width, height)
                block = source[top:bottom, left:right]
                np.copyto(woven, block[::_WOVEN])
                for i in range(1, _WOVEN):
                    np.copyto(spare, block[i::_WOVEN])
                    np.left_shift(spare, 16 * i, out=spare)
                    np.bitwise_or(woven, spare, out=woven)
                np.copyto(turned, woven.T)
                np.copyto(target[left:right, top:bottom], turned.view(np.uint16))
        np.copyto(target[:, even:], source[even:].T)  # three rows at most
        return {}
