"""Any encoding -> F16 or F32: code times scale in float32, rounded to F16 once where that is wanted.

Numbers that a decoder rounds to BF16, from the same arguments and in the same parts; not in
compiled loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import RowError
from qconvert.core.graph import Buffer, Part
from qconvert.ops.base import array
from qconvert.ops.cast import TILE_ELEMENTS
from qconvert.ops.rowwise import FloatDecoder

if TYPE_CHECKING:
    import numpy as np

FloatDtype = Literal["F16", "F32"]
_LARGEST = {"F16": 65504.0, "F32": 3.4028234663852886e38}


@dataclass(frozen=True, slots=True)
class DequantTo:
    """The arguments of a decoder of [N, K] or stacks of it -> `dtype` of the same shape.

    Raises PlanError as the decoder does; RowError for a scale that is NaN or infinite and for a result
    beyond the dtype (with the decoder's `overflow` that is written as infinite, and counted). NaN codes
    of FP8 become NaN and are counted.
    """

    decoder: FloatDecoder
    dtype: FloatDtype

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (decoded,) = self.decoder.infer(*args)
        return (TensorType(self.dtype, decoded.shape),)

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        width = 4 if self.dtype == "F32" else 2
        for part in self.decoder.parts(limit // 2, *args):
            ((at, kind),) = part.outs
            yield Part(part.args, ((at // 2 * width, TensorType(self.dtype, kind.shape)),))

    def scratch(self, *args: TensorType) -> int:
        """Return what the decoder needs; a few tiles are allocated."""
        (decoded,) = self.decoder.infer(*args)
        return self.decoder.scratch(*args) + 8 * max(TILE_ELEMENTS, decoded.shape[-1])

    def loss(self, *args: TensorType) -> str | None:
        if self.dtype == "F32":
            return None
        return "rounds codes x scale to fp16 (relative error at most 2^-11 from 2^-14 on)"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        rows, columns = outs[0].type.shape
        raw = array(outs[0].data, np.uint8, (outs[0].type.nbytes,))
        kind = np.float32 if self.dtype == "F32" else np.float16
        target: np.ndarray[Any, Any] = raw.view(kind).reshape(rows, columns)
        counts = {"NaN codes": 0, f"values beyond {self.dtype}, written as infinite": 0}
        nans, beyond = counts
        with np.errstate(all="ignore"):
            for start, values in self.decoder.floats(ins, scratch):
                infinite = np.abs(values) > _LARGEST[self.dtype]
                if infinite.any():
                    allowed = getattr(self.decoder, "overflow", None)
                    if not allowed:
                        row = start + int(np.flatnonzero(infinite.any(axis=1))[0])
                        may = ", or write infinities with `dequant --allow-overflow`"
                        raise RowError(
                            row,
                            f"has weights beyond {self.dtype} ({_LARGEST[self.dtype]:g} at most); take "
                            f"another dtype{'' if allowed is None else may}",
                        )
                    counts[beyond] += int(np.count_nonzero(infinite))
                counts[nans] += int(np.count_nonzero(np.isnan(values)))
                target[start : start + values.shape[0]] = values
        return {what: count for what, count in counts.items() if count}
