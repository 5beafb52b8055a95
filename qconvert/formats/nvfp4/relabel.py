"""MXFP4 to NVFP4 without loss: the same E2M1 codes under other scales.

MXFP4 (OCP Microscaling Formats v1.0, 6.2; compressed-tensors 0.19 `mxfp4-pack-quantized`; DeepSeek-V4's
experts, whose codes are called I8) has a power of two, 2^(e - 127), for each 32 columns. NVFP4's global
scale takes the largest of them over 2^8, and each 16 columns' E4M3 scale what is left, which is a power
of two from 2^8 down to 2^-9: exponents may spread over 17, gate's and up's together. Blocks of zeros
alone do not count, whatever their exponent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from qconvert.core.dtypes import TensorType
from qconvert.core.encodings import Dialect
from qconvert.core.errors import PlanError, RowError, RunError
from qconvert.core.graph import Buffer, Part
from qconvert.formats.mxfp4.limits import EXPONENTS, check_mxfp4
from qconvert.ops.base import Exact, Uncut
from qconvert.ops.buffers import array
from qconvert.ops.rowwise import row_parts

# E4M3's largest and smallest powers of two; the spread that fits between them.
_HIGH, _LOW = 8, -9
SPREAD = _HIGH - _LOW
_BIAS = 127
_NAN = 255
_SIZES = 0x7777777777777777  # codes without their signs


@dataclass(frozen=True, slots=True)
class ExponentRange(Exact):
    """packed U8 or I8 [N, K/2] and E8M0 scales U8 or F8_E8M0 [N, K/32] -> U8 [N, 2], the least and the
    largest exponent of a row's blocks that are not all zero: 255 and 0 where there is none.

    Raises PlanError where shapes do not fit, RowError where the scale of such a block is NaN.
    """

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        packed, scale = args
        check_mxfp4(packed, scale)
        return (TensorType("U8", (packed.shape[0], 2)),)

    def row_step(self, *args: TensorType) -> int:
        return 1

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        kinds = (*args, *self.infer(*args))
        cut = [(start * kind.row_nbytes, kind.with_rows(stop - start)) for kind in kinds]
        return Part(tuple(cut[:-1]), (cut[-1],))

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        row_bytes = sum(kind.row_nbytes for kind in args)
        return row_parts(self, args[0].shape[0], row_bytes, limit, *args)

    def scratch(self, *args: TensorType) -> int:
        """The codes without their signs."""
        return args[0].nbytes

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        rows, blocks = ins[1].type.shape
        sizes = array(scratch, np.uint64, (rows, blocks, 2))
        np.bitwise_and(array(ins[0].data, np.uint64, (rows, blocks, 2)), _SIZES, out=sizes)
        used = (sizes[..., 0] | sizes[..., 1]) != 0
        scale = array(ins[1].data, np.uint8, (rows, blocks))
        broken = np.flatnonzero((used & (scale == _NAN)).any(axis=1))
        if broken.size:
            raise RowError(int(broken[0]), "has a scale of NaN; the checkpoint is broken")
        target = array(outs[0].data, np.uint8, (rows, 2))
        np.min(scale, axis=1, initial=_NAN, where=used, out=target[:, 0])
        np.max(scale, axis=1, initial=0, where=used, out=target[:, 1])
        return {}


@dataclass(frozen=True, slots=True)
class RelabelOwn(Uncut, Exact):
    """Exponent ranges U8 [N, 2] of matrices that share a scale -> that scale, F32 [1]: 2^(e - 135) of
    the largest exponent e (modelopt), or its inverse (compressed-tensors).

    Raises RunError, with the numbers and their rows, where exponents spread over more than E4M3 holds.
    """

    dialect: Dialect

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        for kind in args:
            if kind.dtype != "U8" or len(kind.shape) != 2 or kind.shape[1] != 2:
                raise PlanError(f"expected exponent ranges as U8 [rows, 2], found {kind}")
        return (TensorType("F32", (1,)),)

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        ranges = np.concatenate([array(b.data, np.uint8, b.type.shape) for b in ins])
        least, largest = int(ranges[:, 0].min(initial=_NAN)), int(ranges[:, 1].max(initial=0))
        power = 0
        if least <= largest:
            if largest - least > SPREAD:
                low, high = (
                    _place(ins, int(ranges[:, 0].argmin())),
                    _place(ins, int(ranges[:, 1].argmax())),
                )
                raise RunError(
                    f"its MXFP4 exponents go from {least} to {largest}, a spread of "
                    f"{largest - least} ({low}, {high}), and NVFP4's block scales hold {SPREAD}: it "
                    "cannot be relabelled without loss; quantize to NVFP4 from the original weights"
                )
            power = largest - _BIAS - _HIGH
        if self.dialect == "compressed-tensors":
            power = -power
        if power > _BIAS:
            raise RunError(
                f"its largest MXFP4 exponent is {largest}, whose divisor 2^{power} is no float32; "
                "take dialect modelopt, which multiplies"
            )
        array(outs[0].data, np.float32, (1,))[0] = np.float32(2.0**power)
        return {}


def _place(ranges: Sequence[Buffer], at: int) -> str:
    """Row `at` of the matrices that share a scale, as a row of its own matrix."""
    number = 0
    while at >= ranges[number].type.shape[0]:
        at -= ranges[number].type.shape[0]
        number += 1
    return f"row {at}" if len(ranges) == 1 else f"row {at} of matrix {number + 1} of {len(ranges)}"


@dataclass(frozen=True, slots=True)
class RelabelBlocks(Exact):
    """E8M0 scales U8 or F8_E8M0 [N, K/32] and what `RelabelOwn` made of them F32 [1] -> F8_E4M3
    [N, K/16], each twice. Raises PlanError where types do not fit."""

    dialect: Dialect

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        scale, global_scale = args
        wanted = TensorType("F32", (1,))
        if scale.dtype not in EXPONENTS or len(scale.shape) != 2 or global_scale != wanted:
            raise PlanError(
                f"expected U8 or F8_E8M0 scales and an {wanted}, found {scale} and {global_scale}"
            )
        return (TensorType("F8_E4M3", (scale.shape[0], 2 * scale.shape[1])),)

    def row_step(self, *args: TensorType) -> int:
        return 1

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        scale, result = args[0], self.infer(*args)[0]
        cut = [(start * kind.row_nbytes, kind.with_rows(stop - start)) for kind in (scale, result)]
        return Part((cut[0], (0, args[1])), (cut[1],))

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        return row_parts(self, args[0].shape[0], 3 * args[0].row_nbytes, limit, *args)

    def scratch(self, *args: TensorType) -> int:
        return 0

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        power = int(np.log2(float(array(ins[1].data, np.float32, (1,))[0])))
        largest = (power if self.dialect == "modelopt" else -power) + _BIAS + _HIGH
        # Blocks of zeros may lie outside; any scale means the same for them.
        table = [_power_code(min(max(e - largest + _HIGH, _LOW), _HIGH)) for e in range(256)]
        scale = array(ins[0].data, np.uint8, ins[0].type.shape)
        target = array(outs[0].data, np.uint8, (*scale.shape, 2))
        target[:] = np.array(table, np.uint8)[scale][..., None]
        return {}


def _power_code(power: int) -> int:
    """2^power in E4M3: an exponent field from 2^-6 on, a bit of the mantissa below."""
    return (power + 7) << 3 if power >= -6 else 1 << (power + 9)
