"""AMXINT4 and AMXINT8 from codes that were found elsewhere (by calibration), not by rounding rows.

The bytes are those of formats/amx/encode.py; codes and scales are chosen otherwise. A scale is a
float32, one for each row and NUMA shard; int4 stores a sixteenth of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RunError
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import Bits, Codes, IntScheme
from qconvert.formats.amx.encode import Amx
from qconvert.formats.amx.format import RUNTIME_NAME, Method
from qconvert.formats.amx.tiles import place_codes
from qconvert.ops.base import array

_LARGEST = {"int4": 7, "int8": 127}


@dataclass(frozen=True, slots=True)
class AmxCodes:
    """Codes [N, K] -> for each of `numa` shards packed I8 and scale F32, shards cut by rows (gate, up)
    or by columns (`down`), which then have a scale each.

    Raises PlanError for sizes the kernels cannot hold, RunError for codes outside -7 to 7 (int4) or
    -127 to 127: the kernels' codes are symmetric.
    """

    method: Method
    numa: int
    down: bool

    @property
    def suffixes(self) -> tuple[str, ...]:
        return tuple(
            f"numa.{shard}.{part}" for shard in range(self.numa) for part in ("weight", "scale")
        )

    @property
    def row_step(self) -> int:
        return 0

    def scheme_of(self, columns: int) -> IntScheme:
        group = columns // self.numa if self.down and self.numa > 1 else None
        bits: Bits = 4 if self.method == "int4" else 8
        return IntScheme(bits, group, True, None, "F32", narrow=True)

    def infer(self, weight: TensorType) -> tuple[TensorType, ...]:
        if self.down:
            return Amx(self.method, self.numa).infer(weight)
        if weight.shape[0] % self.numa:
            raise PlanError(
                f"expected rows for {self.numa} NUMA shards, found {list(weight.shape)}"
            )
        return Amx(self.method).infer(weight.with_rows(weight.shape[0] // self.numa)) * self.numa

    def loss(self, weight: TensorType) -> str | None:
        return f"rounds experts to {RUNTIME_NAME[self.method]}"

    def pack(self, codes: Codes, outs: Sequence[Buffer]) -> None:
        import numpy as np

        rows, columns = codes.codes.shape
        largest = _LARGEST[self.method]
        if codes.codes.min(initial=0) < -largest:
            raise RunError(
                f"a code is {codes.codes.min()}, and the kernels' are {-largest} to {largest}"
            )
        for shard in range(self.numa):
            if self.down:
                width = columns // self.numa
                part = codes.codes[:, shard * width : (shard + 1) * width]
                step = codes.scale[:, shard if codes.scale.shape[1] > 1 else 0]
            else:
                height = rows // self.numa
                part = codes.codes[shard * height : (shard + 1) * height]
                step = codes.scale[shard * height : (shard + 1) * height, 0]
            weight, scale = outs[2 * shard], outs[2 * shard + 1]
            place_codes(self.method, part, array(weight.data, np.uint8, (weight.type.nbytes,)))
            factor = np.float32(1 / 16 if self.method == "int4" else 1)
            np.multiply(step, factor, out=array(scale.data, np.float32, scale.type.shape))
