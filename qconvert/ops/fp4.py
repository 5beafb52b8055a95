"""E2M1 codes, which NVFP4 and MXFP4 share, and NVFP4 -> BF16.

Format sources: OCP Microscaling Formats v1.0, 5.3.3 (E2M1); compressed-tensors 0.19,
`compressors/nvfp4/`; nvidia-modelopt 0.47, `torch/quantization/qtensor/nvfp4_tensor.py`. A code is a
sign and one of eight sizes; two are in a byte, the even column in its low half. Sixteen columns share
a scale in E4M3, and a matrix one in float32, by which compressed-tensors divides and modelopt
multiplies. MXFP4, of the same codes: ops/mx.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.core.dtypes import TensorType
from qconvert.core.encodings import Dialect
from qconvert.core.errors import PlanError, RowError, RunError
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import NVFP4_BLOCK
from qconvert.ops.base import array
from qconvert.ops.cast import BF16_OVERFLOW, TILE_ELEMENTS, round_to_bf16
from qconvert.ops.compiled import done
from qconvert.ops.ints import spread_nibbles
from qconvert.ops.rowwise import EachRow

if TYPE_CHECKING:
    import numpy as np

    UInt8s = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    UInt16s = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]
    Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
    Float32s = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

BLOCK = NVFP4_BLOCK
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# What lies halfway between two sizes, and whether it goes to the larger one: to the even code.
_HALFWAYS = (
    (0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False),
)  # fmt: skip
_SIGN = 8
_E4M3_NAN, _E4M3_MAX = 0x7F, 448.0


def to_codes(values: Float32s, out: UInt8s, spare: UInt8s) -> None:
    """Float32 -> E2M1 codes, nearest, ties to even, 6 for all that is larger, one a byte. Spends
    `values`, of which none may be NaN; -0 has no sign, as both projects have it."""
    import numpy as np

    flags = spare.view(np.bool_)
    np.less(values, 0, out=flags)
    np.multiply(spare, _SIGN, out=out)
    np.abs(values, out=values)
    for halfway, upwards in _HALFWAYS:
        (np.greater_equal if upwards else np.greater)(values, np.float32(halfway), out=flags)
        np.add(out, spare, out=out)


def pack(codes: UInt8s, spare: UInt8s, out: UInt8s) -> None:
    """Codes, one a byte, to two a byte, the first in the lower half. Spends `codes`."""
    import numpy as np

    pairs, beside = codes.view(np.uint16), spare.view(np.uint16)
    np.right_shift(pairs, 4, out=beside)
    np.bitwise_or(pairs, beside, out=pairs)
    np.copyto(out, pairs, casting="unsafe")


def e4m3(values: Float32s, codes: UInt8s) -> None:
    """Float32 from 0 to 448 -> E4M3 codes, nearest, ties to even; `values` become what they mean."""
    import numpy as np

    # A float32 in [2^(23 + k), 2^(24 + k)) counts steps of 2^k, so adding one power of two rounds to a
    # step. E4M3's step is an eighth of a number's own power of two, and of 2^-6 for all below.
    bits = values.view(np.int32) & 0x7F800000
    np.maximum(bits, (127 - 6) << 23, out=bits)
    power = bits >> 23
    bits += 20 << 23
    rounder = bits.view(np.float32)
    np.add(values, rounder, out=values)
    steps = values.view(np.int32) & 0xFF
    # The sum is the rounder and `steps`, 16 at most, in its lowest bits.
    np.copyto(codes, (power - (127 - 6)) * 8 + steps, casting="unsafe")
    np.subtract(values, rounder, out=values)


def from_e4m3(codes: UInt8s) -> Float32s:
    """E4M3 codes -> float32, NaN included."""
    import numpy as np

    bits = codes.astype(np.int32)
    # Exponent and mantissa where float32 keeps them, off by its larger bias, 127 - 7.
    wide = (bits & 0x7F) << 20 | (bits & 0x80) << 24
    found: Float32s = wide.view(np.float32) * np.float32(2.0**120)
    found[(codes & 0x7F) == _E4M3_NAN] = np.nan
    return found


def factors(scale: UInt8s, global_scale: float, dialect: Dialect) -> Float32s:
    """Return what the codes of each block are multiplied with: E4M3 scales and the global one,
    float32."""
    import numpy as np

    found = from_e4m3(scale)
    if dialect == "modelopt":
        return found * np.float32(global_scale)
    return found / np.float32(global_scale)


@dataclass(frozen=True, slots=True)
class DequantNvfp4(EachRow):
    """packed U8 [N, K/2], scale F8_E4M3 [N, K/16] and the global scale F32 [] or [1] -> BF16 [N, K]:
    bf16(code * factor), factor = scale * global (modelopt) or scale / global (compressed-tensors) in
    float32.

    Raises PlanError where dtypes or shapes do not fit, RowError for a scale that is NaN and for a result
    beyond bf16 (with `overflow` that is written as infinite), RunError for a global scale that is not a
    finite number above 0.
    """

    dialect: Dialect
    overflow: bool = False

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        packed, scale, global_scale = args
        if packed.dtype != "U8" or len(packed.shape) != 2:
            raise PlanError(f"expected packed E2M1 codes in a U8 matrix, found {packed}")
        rows, columns = packed.shape[0], 2 * packed.shape[1]
        wanted = TensorType("F8_E4M3", (rows, columns // BLOCK))
        if columns % BLOCK or scale != wanted:
            raise PlanError(f"expected scales {wanted} for {packed}, found {scale}")
        if global_scale.dtype != "F32" or global_scale.numel != 1:
            raise PlanError(f"expected a global scale in F32 [1] or [], found {global_scale}")
        return (TensorType("BF16", (rows, columns)),)

    def scratch(self, *args: TensorType) -> int:
        """A tile as float32 and its rounding beside it."""
        return 8 * min(args[1].numel, TILE_ELEMENTS // BLOCK) * BLOCK

    def loss(self, *args: TensorType) -> str | None:
        beyond = "; what is beyond bf16 becomes infinite" if self.overflow else ""
        return f"rounds fp4 x scales to bf16 (relative error at most 2^-8){beyond}"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        total = ins[1].type.numel
        step = min(total, TILE_ELEMENTS // BLOCK)
        source = array(ins[0].data, np.uint8, (total * BLOCK // 2,))
        scale = array(ins[1].data, np.uint8, (total,))
        blocks = ins[1].type.shape[1]
        global_scale = float(array(ins[2].data, np.float32, (1,))[0])
        if not 0 < global_scale < float("inf"):
            raise RunError(f"its global scale is {global_scale}; the checkpoint is broken")
        factor = global_scale if self.dialect == "modelopt" else 1 / global_scale
        if factor * _E4M3_MAX >= BF16_OVERFLOW:
            raise RunError(
                f"its global scale is {global_scale:g}, with which block scales are beyond bf16; look "
                "whether it is of the other dialect"
            )
        risky = factor * _E4M3_MAX * SIZES[-1] >= BF16_OVERFLOW
        target = array(outs[0].data, np.uint16, (total, BLOCK))
        if not risky:
            codes, how = source.reshape(-1, BLOCK // 2), self.dialect == "modelopt"
            if done("nvfp4_decode", codes, scale, global_scale, how, target.view(np.uint32)):
                return {}
        broken = np.flatnonzero((scale & 0x7F) == _E4M3_NAN)
        if broken.size:
            row = int(broken[0]) // blocks
            raise RowError(row, "has a scale of NaN; the checkpoint is broken")
        bits = array(scratch[: 4 * step * BLOCK], np.int32, (step, BLOCK))
        spare = array(scratch[4 * step * BLOCK :], np.int32, (step, BLOCK))
        sizes = np.array((*SIZES, *(-size for size in SIZES)), np.float32)
        infinite = 0
        with np.errstate(all="ignore"):  # overflow to infinity is what float32 arithmetic does
            for start in range(0, total, max(1, step)):
                stop = min(start + step, total)
                each = factors(scale[start:stop], global_scale, self.dialect)
                count, size = stop - start, (stop - start) * BLOCK
                halves = spare.reshape(-1).view(np.uint16)
                spread_nibbles(
                    source[start * BLOCK // 2 : stop * BLOCK // 2],
                    halves[: size // 2],
                    halves[size // 2 : size],
                )
                part = bits[:count]
                values = part.view(np.float32)
                np.take(
                    sizes,
                    halves[: size // 2].view(np.uint8).reshape(count, BLOCK),
                    out=values,
                    mode="clip",
                )
                np.multiply(values, each[:, None], out=values)
                if risky:
                    beyond = ~(np.abs(values) < BF16_OVERFLOW)
                    if beyond.any() and not self.overflow:
                        row = (start + int(np.flatnonzero(beyond.any(axis=1))[0])) // blocks
                        raise RowError(
                            row,
                            f"has weights beyond bf16 (3.39e38 at most) under the global scale "
                            f"{global_scale:g}; look whether that is of the other dialect, or write "
                            "infinities with `dequant --allow-overflow`",
                        )
                    infinite += int(np.count_nonzero(beyond))
                round_to_bf16(part, spare[:count])
                np.copyto(target[start:stop], part, casting="unsafe")
        return {"values beyond bf16, written as infinite": infinite} if infinite else {}
