"""MXFP4 and MXFP8: E2M1 or E4M3 codes, and an exponent (E8M0) for each 32 columns.

              MXFP4                     MXFP8
    scale     power(amax) / 4           power(amax) / 256
    code      e2m1(w / scale)           e4m3(w / scale)

That is compressed-tensors (`quantization/utils/mxfp_utils.py` `round_to_power_2` and
`generate_mx_scales`): `power` is the power of two below, and from 1.75 times that on the next one, so
that the largest weight of a group is 3.5 to 7 scales (MXFP4), or 224 to 448 (MXFP8). OCP's own rule
(Microscaling v1.0, 6.3) is the power below always, so that weights are held to the largest code. A group
of zeros has the least scale, 2^-127.

One exception: from 1.75 * 2^127 on that library's exponent is infinite and all codes of the group become
zero. Such weights are refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import RowError
from qconvert.core.graph import Buffer, aligned
from qconvert.core.int_scheme import groups_in_row
from qconvert.formats.fp8.encode import to_e4m3
from qconvert.formats.int_packed.encode import largest_sizes
from qconvert.formats.mx.decode import BLOCK
from qconvert.formats.mx.format import Form
from qconvert.ops.base import array
from qconvert.ops.cast import NOT_FINITE, TILE_ELEMENTS, matrix_to_quantize
from qconvert.ops.compiled import done
from qconvert.ops.fp4 import pack, to_codes
from qconvert.ops.rowwise import EachRow

if TYPE_CHECKING:
    from qconvert.core.arrays import Int32s, UInt8s, UInt16s


# The power of two of the largest code: 6 and 448.
_LARGEST_POWER: Mapping[Form, int] = {"mxfp4": 2, "mxfp8": 8}
_BF16_INFINITY = 0x7F80
_NEGATIVE_ZERO = 8  # an E2M1 code
# A quarter of a power of two, in a bf16's last bits: what lifts 1.75 to 2.
_QUARTER = 1 << 5
# Numbers of bf16 up to here, divided by a scale above 1, may round to zero in bf16.
_HALF_LEAST = 2.0**-134


@dataclass(frozen=True, slots=True)
class EncodeMx(EachRow):
    """BF16 [N, K] -> codes (`mxfp4`: U8 [N, K/2], two a byte, the even column in the low half; `mxfp8`:
    F8_E4M3 [N, K]) and exponents U8 [N, K/32], 2^(e - 127).

    Raises PlanError where the argument is no BF16 matrix of whole groups of 32 columns, RowError for
    NaN, infinity, and what is beyond the largest scale.
    """

    format: Form

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (weight,) = args
        rows, columns = matrix_to_quantize(weight, "MX")
        groups = groups_in_row(columns, BLOCK)
        codes = TensorType("F8_E4M3", (rows, columns))
        if self.format == "mxfp4":
            codes = TensorType("U8", (rows, columns // 2))
        return codes, TensorType("U8", (rows, groups))

    def scratch(self, *args: TensorType) -> int:
        """A tile twice as float32."""
        return 2 * aligned(4 * min(args[0].numel, TILE_ELEMENTS))

    def loss(self, *args: TensorType) -> str | None:
        return f"rounds to {self.format} with a power-of-two scale for {BLOCK} columns"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        total = ins[0].type.numel // BLOCK
        a_row = ins[0].type.shape[1] // BLOCK
        step = min(total, TILE_ELEMENTS // BLOCK)
        half = len(scratch) // 2
        weight = array(ins[0].data, np.uint16, (total, BLOCK))
        wide = BLOCK // 2 if self.format == "mxfp4" else BLOCK
        codes = array(outs[0].data, np.uint8, (total, wide))
        exponents = array(outs[1].data, np.uint8, (total,))
        bits = array(scratch[: 4 * step * BLOCK], np.int32, (step, BLOCK))
        spare = array(scratch[half : half + 4 * step * BLOCK], np.int32, (step, BLOCK))
        for start in range(0, total, max(1, step)):
            stop = min(start + step, total)
            count = stop - start
            try:
                self._groups(
                    weight[start:stop], bits[:count], spare[:count],
                    codes[start:stop], exponents[start:stop],
                )  # fmt: skip
            except RowError as error:
                raise RowError((start + error.row) // a_row, error.what) from error
        return {}

    def _groups(
        self, weight: UInt16s, bits: Int32s, spare: Int32s, codes: UInt8s, exponents: UInt8s
    ) -> None:
        """Groups [n, 32] of bf16 bits -> their codes and exponents [n]. An error's row is a group."""
        import numpy as np

        if done(f"{self.format}_encode", weight, codes, exponents):
            return
        largest = np.empty((weight.shape[0], 1), np.int32)
        largest_sizes(weight.view(np.int16), spare, largest)
        if int(largest.max()) >= _BF16_INFINITY:
            group = int(np.argmax(largest >= _BF16_INFINITY))
            raise RowError(group, NOT_FINITE)
        powers = (largest + _QUARTER) >> 7
        if int(powers.max()) == 0xFF:
            group = int(np.argmax(powers == 0xFF))
            raise RowError(group, "holds weights above 2.9e38, which no scale of MX can hold")
        np.maximum(powers - _LARGEST_POWER[self.format], 0, out=powers)
        np.copyto(exponents[:, None], powers, casting="unsafe")
        np.copyto(bits, weight)
        np.multiply(bits, 1 << 16, out=bits)  # faster than numpy's shift
        values = bits.view(np.float32)
        np.multiply(values, ((254 - powers) << 23).view(np.float32), out=values)
        if self.format == "mxfp8":
            to_e4m3(bits, spare, codes)
            return
        if int(powers.max()) > 127:
            values[np.abs(values) <= np.float32(_HALF_LEAST)] = 0
        bytes_ = spare.reshape(-1).view(np.uint8)
        each, beside = bytes_[: weight.size], bytes_[weight.size : 2 * weight.size]
        to_codes(values.reshape(-1), each, beside)
        pack(each, beside, codes.reshape(-1))


@dataclass(frozen=True, slots=True)
class EncodeQuarkMxfp4(EncodeMx):
    """`EncodeMx` of MXFP4 as amd-quark stores it (0.13, scale_calculation_mode `even`, round_method
    `half_even`): the same, but no code is a negative zero."""

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        counts = EncodeMx.run(self, ins, outs, scratch)
        codes = array(outs[0].data, np.uint8, (outs[0].type.numel,))
        for start in range(0, codes.size, TILE_ELEMENTS):
            part = codes[start : start + TILE_ELEMENTS]
            part[:] = _without_negative_zeros()[part]
        return counts


@cache
def _without_negative_zeros() -> UInt8s:
    """Each byte of two codes with 0 in place of 8."""
    import numpy as np

    both = np.arange(256)[:, None] >> np.array([0, 4]) & 15
    both[both == _NEGATIVE_ZERO] = 0
    found: UInt8s = (both[:, 0] | both[:, 1] << 4).astype(np.uint8)
    return found
