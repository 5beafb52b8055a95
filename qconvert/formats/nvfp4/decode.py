"""NVFP4 -> BF16: E2M1 codes, sixteen columns under a scale in E4M3, and a matrix under one in float32.

Format sources: compressed-tensors, `compressors/nvfp4/`, which divides by the global scale;
nvidia-modelopt, `torch/quantization/qtensor/nvfp4_tensor.py`, which multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError, RunError
from qconvert.core.graph import Buffer
from qconvert.core.parameter_names import Dialect
from qconvert.ops.base import array
from qconvert.ops.cast import (
    BF16_OVERFLOW,
    NAN_SCALE,
    TILE_ELEMENTS,
    check_finite,
    float_tiles,
    round_to_bf16,
)
from qconvert.ops.compiled import done
from qconvert.ops.fp4 import BLOCK, E4M3_MAX, E4M3_NAN, SIZES, from_codes, from_e4m3
from qconvert.ops.ints import spread_nibbles
from qconvert.ops.rowwise import EachRow

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s, UInt8s


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

    format: ClassVar[str] = "nvfp4"

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

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
        import numpy as np

        packed, stored = (array(one.data, np.uint8, one.type.shape) for one in ins[:2])
        whole = float(array(ins[2].data, np.float32, (1,))[0])
        for start, stop in float_tiles(packed.shape[0], 2 * packed.shape[1]):
            each = factors(stored[start:stop], whole, self.dialect)
            check_finite(each, start)
            yield start, from_codes(packed[start:stop]) * np.repeat(each, BLOCK, axis=1)

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
        if factor * E4M3_MAX >= BF16_OVERFLOW:
            raise RunError(
                f"its global scale is {global_scale:g}, with which block scales are beyond bf16; look "
                "whether it is of the other dialect"
            )
        risky = factor * E4M3_MAX * SIZES[-1] >= BF16_OVERFLOW
        target = array(outs[0].data, np.uint16, (total, BLOCK))
        if not risky:
            codes, how = source.reshape(-1, BLOCK // 2), self.dialect == "modelopt"
            if done("nvfp4_decode", codes, scale, global_scale, how, target.view(np.uint32)):
                return {}
        broken = np.flatnonzero((scale & 0x7F) == E4M3_NAN)
        if broken.size:
            row = int(broken[0]) // blocks
            raise RowError(row, NAN_SCALE)
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
