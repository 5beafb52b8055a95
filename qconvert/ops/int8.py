"""INT8 codes, one a byte -> BF16: bf16((code - zero) * scale), rounded once.

Format source: compressed-tensors 0.19, `int-quantized` (`compressors/naive_quantized/`): `weight` I8
[N, K] as signed numbers, `weight_scale` [N, groups], of asymmetric weights `weight_zero_point` I8
[N, groups]. A scale for the whole matrix is [1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer
from qconvert.ops.base import array
from qconvert.ops.cast import FLOAT_DTYPES
from qconvert.ops.ints import Products, product_scratch, scale_scratch, scales
from qconvert.ops.rowwise import EachRow

_MIDDLE = 0x80  # a signed byte plus 128 is the same bits with the first one turned


@dataclass(frozen=True, slots=True)
class DequantInt8(EachRow):
    """weight I8 [N, K], scale [N, groups] in BF16, F16 or F32, and where not `symmetric` zero points I8
    [N, groups] -> BF16 [N, K]. Groups are neighbouring columns.

    Raises PlanError where dtypes or shapes do not fit, RowError where a scale is NaN or infinite.
    """

    symmetric: bool = True

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        weight, scale, *zero = args
        if weight.dtype != "I8" or len(weight.shape) != 2:
            raise PlanError(f"expected codes in an I8 matrix, found {weight}")
        rows, columns = weight.shape
        fits = len(scale.shape) == 2 and scale.shape[0] == rows and scale.shape[1] > 0
        if scale.dtype not in FLOAT_DTYPES or not fits or columns % scale.shape[1]:
            raise PlanError(
                f"expected scales [{rows}, groups] in {', '.join(FLOAT_DTYPES)} for {weight}, found "
                f"{scale}"
            )
        wanted = [] if self.symmetric else [TensorType("I8", scale.shape)]
        if zero != wanted:
            raise PlanError(
                f"expected {wanted[0] if wanted else 'no zero points'} beside {weight} and its "
                f"scales, found {', '.join(map(str, zero)) or 'nothing'}"
            )
        return (TensorType("BF16", weight.shape),)

    def scratch(self, *args: TensorType) -> int:
        return scale_scratch(args[1]) + product_scratch(*args[0].shape)

    def loss(self, *args: TensorType) -> str | None:
        return "rounds int8 x scale to bf16 (relative error at most 2^-8)"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        weight, scale, *zeros = ins
        rows, columns = weight.type.shape
        source = array(weight.data, np.uint8, (rows, columns))
        target = array(outs[0].data, np.uint16, (rows, columns))
        zero = None
        if zeros:
            stored = array(zeros[0].data, np.uint8, zeros[0].type.shape)
            zero = (stored ^ np.uint8(_MIDDLE)).astype(np.uint16)
        used = scale_scratch(scale.type)
        factors = scales(scale, scratch[:used])
        work = Products(scratch[used:], rows, columns, 8, factors)
        for start, stop in work.tiles():
            codes = source[start:stop] ^ np.uint8(_MIDDLE)
            work.multiply(codes, start, zero, None, target[start:stop])
        return {}
