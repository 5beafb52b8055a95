"""NVFP4's scalars from one dialect to the other: modelopt multiplies by what compressed-tensors divides
by.

vLLM 0.33 (`compressed_tensors_w4a4_nvfp4.py`) and sglang 0.5.23 take the reciprocal of what
compressed-tensors stores, in float32, and go on with a multiplier. So a divisor is the same scale where
its reciprocal, rounded, is the multiplier. Of float32 numbers most have such a divisor, and not all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RunError
from qconvert.core.graph import Buffer
from qconvert.ops.base import Uncut
from qconvert.ops.buffers import array


@dataclass(frozen=True, slots=True)
class Reciprocal(Uncut):
    """F32 [] or [1] -> F32 of the same shape: the divisor that means the same multiplier, or the
    multiplier that the same divisor means, by what is wanted.

    Raises RunError for what is no positive finite number, and, unless `nearest`, where there is no such
    divisor, or where that of the multiplier would be another one.
    """

    wanted: Literal["divisor", "multiplier"]
    nearest: bool = False

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (scale,) = args
        if scale.dtype != "F32" or scale.numel != 1:
            raise PlanError(f"expected a scale in F32 [1] or [], found {scale}")
        return (scale,)

    def loss(self, *args: TensorType) -> str | None:
        if not self.nearest:
            return None
        return "takes the nearest float32 where a scale has no exact reciprocal (2^-23 at most)"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        value = array(ins[0].data, np.float32, (1,))
        if not 0 < float(value[0]) < float("inf"):
            raise RunError(f"its scale is {value[0]}; the checkpoint is broken")
        one = np.float32(1)
        with np.errstate(all="ignore"):
            near = one / value
            tried = [near, np.nextafter(near, np.float32(0)), np.nextafter(near, one * np.inf)]
            fits = [other for other in tried if (one / other)[0] == value[0]]
        if self.wanted == "multiplier":
            # What a divisor means is its rounded reciprocal; back again it has to be the same divisor.
            fits = [near] if fits and fits[0][0] == near[0] else []
        if not fits and not self.nearest:
            raise RunError(
                f"its scale {float(value[0])!r} has no reciprocal in float32 that leads back to it; "
                "relabel with --nearest to take the nearest (2^-23 of the scale at most)"
            )
        array(outs[0].data, np.float32, (1,))[:] = fits[0] if fits else near
        return {} if fits else {"scales without an exact reciprocal": 1}
