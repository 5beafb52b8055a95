"""MXFP4 to block FP8 without loss: E2M1 codes become E4M3 codes under one power of two a block.

A block's largest exponent e, of groups that are not all zero, gives the scale 2^(e - 127 - 6): the code
6 becomes 6 * 2^6 = 384 of E4M3's 448. A group whose exponent is d less holds its codes divided by 2^d.
E4M3 has normal numbers down to 2^-6 and multiples of 2^-9 below, so that 0.5 * 2^(6 - d) is exact up to
d = 14, and so are 1, 1.5, 2, 3, 4 and 6: all are multiples of 0.5. Beyond 14 each code is tried.

DeepSeek-V4's own converter (`inference/convert.py`, `cast_e2m1fn_to_e4m3fn`) takes the same scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import RowError
from qconvert.core.graph import Buffer
from qconvert.formats.mx.decode import BLOCK, DequantMxfp4
from qconvert.ops.base import Exact, array
from qconvert.ops.cast import NAN_SCALE
from qconvert.ops.fp4 import SIZES
from qconvert.ops.rowwise import EachRow

if TYPE_CHECKING:
    from qconvert.core.arrays import UInt16s


SHIFT = 6  # 6 * 2^6 = 384, the largest power for which the code 6 is below 448
_NAN = 255
_SIDE = 128
# Codes divided by 2^20 and more are no E4M3 numbers: nothing beyond is told apart.
_SPREAD = 20
_INEXACT = 0x7F  # E4M3's NaN: no code becomes it


@dataclass(frozen=True, slots=True)
class MxToBlockFp8(EachRow, Exact):
    """packed U8 or I8 [N, K/2] and exponents U8 or F8_E8M0 [N, K/32] -> F8_E4M3 [N, K] and scales F32
    [ceil(N/128), ceil(K/128)] that multiply. Exponents would be smaller, and vLLM takes those of
    DeepSeek-V4's FP8 experts for numbers (models/deepseek_v4/nvidia/model.py, load_weights).

    Raises PlanError where types do not fit, RowError for a NaN exponent, for exponents in a block that
    spread too far, and for a scale that is no normal number.
    """

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (decoded,) = DequantMxfp4().infer(*args)
        rows, columns = decoded.shape
        grid = ceil_div(rows, _SIDE), ceil_div(columns, _SIDE)
        return TensorType("F8_E4M3", decoded.shape), TensorType("F32", grid)

    def row_step(self, *args: TensorType) -> int:
        return _SIDE

    def scratch(self, *args: TensorType) -> int:
        return 0

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        rows, groups = ins[1].type.shape
        source = array(ins[0].data, np.uint8, (rows, groups, BLOCK // 2))
        exponents = array(ins[1].data, np.uint8, (rows, groups))
        if exponents.size and int(exponents.max()) == _NAN:
            row = int(np.argwhere(exponents == _NAN)[0][0])
            raise RowError(row, NAN_SCALE)
        target = array(outs[0].data, np.uint16, (rows, groups, BLOCK // 2))
        lines, wide = outs[1].type.shape
        per = _SIDE // BLOCK
        table = _table()
        for line in range(lines):
            top, bottom = line * _SIDE, min((line + 1) * _SIDE, rows)
            for block in range(wide):
                part = slice(top, bottom), slice(block * per, (block + 1) * per)
                used = (source[part] & 0x77).any(axis=-1)
                largest = int(exponents[part].max(initial=0, where=used)) if used.any() else 127 + 6
                spread = np.where(used, np.int32(largest) - exponents[part], 0)
                at = np.minimum(spread, _SPREAD)[..., None] << 8 | source[part]
                made = table[at]
                wrong = ((made & 0x7F) == _INEXACT) | ((made >> 8 & 0x7F) == _INEXACT)
                if wrong.any():
                    row = top + int(np.argwhere(wrong)[0][0])
                    raise RowError(
                        row,
                        f"has MXFP4 exponents {int(spread.max())} below the largest of its block of "
                        f"{_SIDE}x{_SIDE}, and codes that FP8 does not hold there: it cannot be "
                        "relabelled without loss; quantize to FP8 instead (qconvert fp8)",
                    )
                target[part] = made
                self._put(outs[1], line * wide + block, largest - SHIFT, top)
        return {}

    def _put(self, out: Buffer, at: int, exponent: int, row: int) -> None:
        """Write the scale 2^(exponent - 127)."""
        import numpy as np

        if not 1 <= exponent <= 254:
            raise RowError(row, f"needs a scale of 2^{exponent - 127}, which is no normal float32")
        array(out.data, np.float32, (out.type.numel,))[at] = 2.0 ** (exponent - 127)


@cache
def _table() -> UInt16s:
    """Two E4M3 codes, the even column's in the lower half, for each spread and byte: [21 * 256]."""
    import numpy as np

    codes = np.array(
        [
            [_code(size * 2.0 ** (SHIFT - spread)) for size in SIZES]
            for spread in range(_SPREAD + 1)
        ],
        np.uint16,
    )
    signed = np.concatenate([codes, codes | np.where(codes == _INEXACT, 0, 0x80)], axis=1)
    byte = np.arange(256)
    found: UInt16s = (signed[:, byte & 15] | signed[:, byte >> 4] << np.uint16(8)).astype(np.uint16)
    return found.reshape(-1)


def _code(value: float) -> int:
    """The E4M3 code of a number from 0 on, NaN's where there is none."""
    if value == 0:
        return 0
    for code in range(1, _INEXACT):
        exponent, mantissa = divmod(code, 8)
        meant = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        if meant == value:
            return code
    return _INEXACT
