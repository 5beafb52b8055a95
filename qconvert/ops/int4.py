"""Packed INT4 with group scales -> BF16: bf16(fp32(code) * fp32(scale)), one rounding to bf16.

Format source: compressed-tensors 0.19, `compressors/pack_quantized/base.py` and `helpers.py`, for
symmetric 4-bit weights. A 32-bit word holds eight codes, the first in its lowest bits, each stored
as code + 8. With BF16 scales this is what that project's decompression gives; with F16 and F32
scales it decompresses to the scale's dtype instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, Part
from qconvert.ops.buffers import array
from qconvert.ops.cast import FLOAT_DTYPES, TILE_ELEMENTS, decode, round_to_bf16
from qconvert.ops.rowwise import row_parts

if TYPE_CHECKING:
    import numpy as np

    UInt16s = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]

CODES_PER_WORD = 8
_ZERO_CODE = 8  # what code 0 is stored as


@dataclass(frozen=True, slots=True)
class DequantInt4:
    """packed I32 [N, K/8] and scale [N, K/group] in BF16, F16 or F32 -> BF16 [N, K].

    Raises PlanError where dtypes or shapes do not fit, RowError where a scale is NaN or infinite.
    """

    group: int

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        packed, scale = args
        if packed.dtype != "I32" or len(packed.shape) != 2:
            raise PlanError(f"expected packed codes in an I32 matrix, found {packed}")
        if scale.dtype not in FLOAT_DTYPES:
            raise PlanError(f"expected a scale in {', '.join(FLOAT_DTYPES)}, found {scale}")
        rows, columns = packed.shape[0], CODES_PER_WORD * packed.shape[1]
        if self.group < 1 or columns % self.group:
            raise PlanError(
                f"expected columns in groups of {self.group}, found {columns} in {packed}"
            )
        if scale.shape != (rows, columns // self.group):
            raise PlanError(
                f"expected scales [{rows}, {columns // self.group}] for {packed} in groups of "
                f"{self.group}, found {list(scale.shape)}"
            )
        return (TensorType("BF16", (rows, columns)),)

    def row_step(self, *args: TensorType) -> int:
        return 1

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        (result,) = self.infer(*args)
        return Part(
            args=tuple((start * arg.row_nbytes, arg.with_rows(stop - start)) for arg in args),
            outs=((start * result.row_nbytes, result.with_rows(stop - start)),),
        )

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        row_bytes = sum(kind.row_nbytes for kind in (*args, *self.infer(*args)))
        return row_parts(self, args[0].shape[0], row_bytes, limit, *args)

    def scratch(self, *args: TensorType) -> int:
        """A tile as float32, its rounding beside it, and its scales twice, as float32."""
        groups = min(args[1].numel, tile_groups(self.group))
        return 8 * groups * self.group + 8 * groups

    def loss(self, *args: TensorType) -> str | None:
        return "rounds int4 x scale to bf16 (relative error at most 2^-9)"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        packed, scale = ins
        total, group = scale.type.numel, self.group
        width = scale.type.nbytes // max(1, total)
        step = min(total, tile_groups(group))
        tile = 4 * step * group
        bits = array(scratch[:tile], np.int32, (step, group))
        spare = array(scratch[tile : 2 * tile], np.int32, (step, group))
        factors = array(scratch[2 * tile : 2 * tile + 4 * step], np.float32, (step, 1))
        beside = array(scratch[2 * tile + 4 * step :], np.int32, (step, 1))
        source = array(packed.data, np.uint8, (total * group // 2,))
        target = array(outs[0].data, np.uint16, (total, group))
        with np.errstate(all="ignore"):  # overflow to infinity is what fp32 arithmetic does
            for start in range(0, total, max(1, step)):
                stop = min(start + step, total)
                count = stop - start
                size = count * group
                scales = factors[:count]
                decode(
                    scale.data[width * start : width * stop],
                    scale.type.dtype,
                    scales,
                    beside[:count],
                )
                # NaN propagates through all three.
                if not np.maximum(scales.max(), -scales.min()) < float("inf"):
                    row = _row_of(scales, start, scale.type)
                    raise RowError(row, "has a scale of NaN or infinity; the checkpoint is broken")
                nibbles = spare.reshape(-1).view(np.uint16)[: size // 2]
                other = spare.reshape(-1).view(np.uint16)[size // 2 : size]
                spread_nibbles(source[start * group // 2 : stop * group // 2], nibbles, other)
                codes = nibbles.view(np.int8)
                np.subtract(codes, _ZERO_CODE, out=codes)
                part = bits[:count]
                values = part.view(np.float32)
                np.copyto(values, codes.reshape(count, group))
                np.multiply(values, scales, out=values)
                round_to_bf16(part, spare[:count])
                np.copyto(target[start:stop], part, casting="unsafe")
        return {}


def tile_groups(group: int) -> int:
    """Groups worked on at a time: as many as fill a tile, and whole words."""
    step = CODES_PER_WORD // gcd(CODES_PER_WORD, group)
    return max(1, TILE_ELEMENTS // (step * group)) * step


def spread_nibbles(
    source: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], out: UInt16s, spare: UInt16s
) -> None:
    """Each byte's low and high nibble -> the low and high byte of a 16-bit entry of `out`."""
    import numpy as np

    np.copyto(out, source)
    np.left_shift(out, 4, out=spare)
    np.bitwise_or(out, spare, out=out)
    np.bitwise_and(out, 0x0F0F, out=out)


def _row_of(
    scales: np.ndarray[tuple[int, ...], np.dtype[np.float32]], start: int, kind: TensorType
) -> int:
    """The row that holds the first scale that is not finite; `scales` begin at number `start`."""
    import numpy as np

    return (start + int(np.flatnonzero(~np.isfinite(scales))[0])) // kind.shape[1]
