"""FP8 with one scale for a matrix, or for several that runtimes compute as one.

    dialect              fp8                       compressed-tensors
    scale                F32, amax / 448           BF16, bf16(amax / 448)
    code                 e4m3(w / scale)           e4m3(bf16(w / scale))

The rest is as in `formats/fp8/encode.py`. Of q, k and v, or gate and up, runtimes keep the largest of
their scales and round the others' codes once more with it (sglang `requantize_with_max_scale`,
vLLM `process_fp8_weight_tensor_strategy`): with one scale for all, from the largest weight of all,
codes stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer, aligned
from qconvert.formats.fp8.encode import Dialect, put_scales, scales_of, to_fp8
from qconvert.ops.base import Exact, Uncut, array
from qconvert.ops.cast import TILE_ELEMENTS, matrix_to_quantize
from qconvert.ops.compiled import done
from qconvert.ops.rowwise import Scaled

if TYPE_CHECKING:
    import numpy as np

SCALE_DTYPE: Mapping[Dialect, str] = {"fp8": "F32", "compressed-tensors": "BF16"}


@dataclass(frozen=True, slots=True)
class TensorScale(Uncut, Exact):
    """Row maxima BF16 [N] of one matrix, or of several that share a scale -> that scale [1], F32 or
    BF16. Raises PlanError for other maxima."""

    dialect: Dialect

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        if not args or any(kind.dtype != "BF16" for kind in args):
            raise PlanError("expected the row maxima of BF16 matrices")
        return (TensorType(SCALE_DTYPE[self.dialect], (1,)),)

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        each = [int(array(b.data, np.int16, b.type.shape).max(initial=0)) for b in ins]
        scale = scales_of(np.array([max(each)], np.int32), self.dialect, exponents=False)
        put_scales(scale, outs[0])
        return {}


@dataclass(frozen=True, slots=True)
class EncodeFp8Tensor(Scaled):
    """The decoder's arguments (a matrix BF16 [N, K] where there is none) and the scale [1] -> codes
    F8_E4M3 [N, K]. The matrix has no NaN and no infinity: `RowMaxima` looks. Raises PlanError where
    arguments do not fit."""

    dialect: Dialect

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        weight = self.decoded(*args)
        matrix_to_quantize(weight, "FP8")
        if args[-1] != TensorType(SCALE_DTYPE[self.dialect], (1,)):
            raise PlanError(f"expected a scale {SCALE_DTYPE[self.dialect]} [1], found {args[-1]}")
        return (TensorType("F8_E4M3", weight.shape),)

    def own_scratch(self, weight: TensorType) -> int:
        """A tile twice as float32."""
        return 2 * aligned(4 * min(weight.numel, TILE_ELEMENTS))

    def loss(self, *args: TensorType) -> str | None:
        before = None if self.decoder is None else self.decoder.loss(*args[:-1])
        own = "rounds to fp8 with a scale for a tensor (relative error at most 2^-4, mean 2.6 %)"
        return own if before is None else f"{before}; {own}"

    def encode(
        self, weight: Buffer, scale: Buffer, outs: Sequence[Buffer], scratch: memoryview
    ) -> None:
        import numpy as np

        total = weight.type.numel
        step, half = min(total, TILE_ELEMENTS), len(scratch) // 2
        source = array(weight.data, np.uint16, (1, total))
        codes = array(outs[0].data, np.uint8, (1, total))
        own = _number(scale)
        if done("fp8_codes", source, float(own[0]), self.dialect == "fp8", codes):
            return
        for start in range(0, total, max(1, step)):
            stop = min(start + step, total)
            size = 4 * (stop - start)
            bits = array(scratch[:size], np.int32, (1, stop - start))
            spare = array(scratch[half : half + size], np.int32, (1, stop - start))
            to_fp8(
                source[:, start:stop], own, bits, spare, codes[:, start:stop],
                whole=self.dialect == "fp8",
            )  # fmt: skip


def _number(scale: Buffer) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """A scale as float32 [1]."""
    import numpy as np

    if scale.type.dtype == "F32":
        return array(scale.data, np.float32, (1,))
    return (array(scale.data, np.uint16, (1,)).astype(np.uint32) << 16).view(np.float32)
