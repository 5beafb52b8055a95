"""Any encoding -> F16 or F32: code times scale in float32, rounded to F16 once where that is wanted.

What a decoder of ops/ gives in BF16, from the same arguments and in the same parts, but for the last
rounding; without their speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, Op, Part, aligned
from qconvert.formats.int_packed.repack import taken_apart
from qconvert.ops.awq import DequantAwq
from qconvert.ops.base import array
from qconvert.ops.fp4 import BLOCK, SIZES, DequantNvfp4, factors, from_e4m3
from qconvert.ops.fp8 import DequantFp8
from qconvert.ops.gptq_packed import DequantGptq
from qconvert.ops.int8 import DequantInt8
from qconvert.ops.ints import DequantInts, scale_scratch, scales, spread_nibbles
from qconvert.ops.mx import DequantMxfp4

if TYPE_CHECKING:
    import numpy as np

    Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
    UInt8s = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

Packed = DequantInts | DequantGptq | DequantAwq
Decoder = DequantFp8 | DequantNvfp4 | DequantMxfp4 | DequantInt8 | Packed
FloatDtype = Literal["F16", "F32"]
_TILE = 1 << 16  # elements worked on at a time
_LARGEST = {"F16": 65504.0, "F32": 3.4028234663852886e38}


@dataclass(frozen=True, slots=True)
class DequantTo:
    """The arguments of a decoder of [N, K] or stacks of it -> `dtype` of the same shape.

    Raises PlanError as the decoder does; RowError for a scale that is NaN or infinite and for a result
    beyond the dtype (with the decoder's `overflow` that is written as infinite, and counted). NaN codes
    of FP8 become NaN and are counted.
    """

    decoder: Decoder
    dtype: FloatDtype

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (decoded,) = self.decoder.infer(*args)
        return (TensorType(self.dtype, decoded.shape),)

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        decoder: Op = self.decoder
        width = 4 if self.dtype == "F32" else 2
        for part in decoder.parts(limit // 2, *args):
            ((at, kind),) = part.outs
            yield Part(part.args, ((at // 2 * width, TensorType(self.dtype, kind.shape)),))

    def scratch(self, *args: TensorType) -> int:
        """Codes, zero points and scales of integers; a few tiles are allocated."""
        decoder: Op = self.decoder
        (decoded,) = decoder.infer(*args)
        tile = 8 * max(_TILE, decoded.shape[-1])
        if isinstance(self.decoder, DequantInts | DequantGptq | DequantAwq):
            return 2 * aligned(decoded.numel) + tile
        return aligned(scale_scratch(args[1])) + tile

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
        step = max(1, _TILE // max(1, columns))
        tiles = [(start, min(start + step, rows)) for start in range(0, rows, step)]
        with np.errstate(all="ignore"):
            for start, stop, values in self._values(ins, tiles, columns, scratch):
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
                target[start:stop] = values
        return {what: count for what, count in counts.items() if count}

    def _values(
        self,
        ins: Sequence[Buffer],
        tiles: Sequence[tuple[int, int]],
        columns: int,
        scratch: memoryview,
    ) -> Iterator[tuple[int, int, Floats]]:
        """Rows as float32, a tile at a time."""
        decoder = self.decoder
        if isinstance(decoder, DequantInts | DequantGptq | DequantAwq):
            yield from _of_packed(decoder, ins, tiles, columns, scratch)
        elif isinstance(decoder, DequantInt8):
            yield from _of_int8(decoder, ins, tiles, scratch)
        elif isinstance(decoder, DequantFp8):
            yield from _of_fp8(decoder, ins, tiles, scratch)
        else:
            yield from _of_fp4(decoder, ins, tiles, scratch)


def _check(scale: Floats, row: int) -> None:
    import numpy as np

    wrong = ~np.isfinite(scale)
    if wrong.any():
        at = row + int(np.argwhere(wrong)[0][0])
        raise RowError(at, "has a scale of NaN or infinity; the checkpoint is broken")


def _of_packed(
    decoder: Packed,
    ins: Sequence[Buffer],
    tiles: Sequence[tuple[int, int]],
    columns: int,
    scratch: memoryview,
) -> Iterator[tuple[int, int, Floats]]:
    import numpy as np

    rows = tiles[-1][1] if tiles else 0
    if isinstance(decoder, DequantGptq | DequantAwq) and decoder.first:
        raise PlanError("whole matrices alone are decoded to F16 and F32")
    groups = ins[1].type.shape[1] if isinstance(decoder, DequantInts) else ins[1].type.shape[0]
    codes = array(scratch[: rows * columns], np.int8, (rows, columns))
    at = aligned(rows * columns)
    zero = array(scratch[at : at + rows * groups], np.int8, (rows, groups))
    zero[:] = 0
    scale, order = taken_apart(decoder, ins, codes, zero)
    _check(scale, 0)
    each = order if order is not None else np.arange(columns) // max(1, columns // groups)
    for start, stop in tiles:
        less = zero[start:stop][:, each].astype(np.float32)
        yield (
            start,
            stop,
            (codes[start:stop].astype(np.float32) - less) * scale[start:stop][:, each],
        )


def _of_int8(
    decoder: DequantInt8,
    ins: Sequence[Buffer],
    tiles: Sequence[tuple[int, int]],
    scratch: memoryview,
) -> Iterator[tuple[int, int, Floats]]:
    import numpy as np

    weight = array(ins[0].data, np.int8, ins[0].type.shape)
    scale = scales(ins[1], scratch)
    _check(scale, 0)
    wide = weight.shape[1] // max(1, scale.shape[1])
    for start, stop in tiles:
        values = weight[start:stop].astype(np.float32)
        if not decoder.symmetric:
            zero = array(ins[2].data, np.int8, ins[2].type.shape)[start:stop]
            values -= np.repeat(zero.astype(np.float32), wide, axis=1)
        yield start, stop, values * np.repeat(scale[start:stop], wide, axis=1)


def _of_fp8(
    decoder: DequantFp8,
    ins: Sequence[Buffer],
    tiles: Sequence[tuple[int, int]],
    scratch: memoryview,
) -> Iterator[tuple[int, int, Floats]]:
    import numpy as np

    weight, kind = array(ins[0].data, np.uint8, ins[0].type.shape), ins[1].type.dtype
    if kind in ("U8", "F8_E8M0"):
        scale = _powers()[array(ins[1].data, np.uint8, ins[1].type.shape)]
    else:
        scale = scales(ins[1], scratch)
    _check(scale, 0)
    high, wide = decoder.block
    for start, stop in tiles:
        codes = weight[start:stop]
        if ins[0].type.dtype == "F8_E4M3":
            values = from_e4m3(codes)
        else:  # E5M2 is the upper half of a float16
            values = (codes.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)
        lines = np.arange(start, stop) // high
        spread = np.repeat(scale, min(wide, codes.shape[1]), axis=1)[:, : codes.shape[1]]
        yield start, stop, values * spread[lines]


def _of_fp4(
    decoder: DequantNvfp4 | DequantMxfp4,
    ins: Sequence[Buffer],
    tiles: Sequence[tuple[int, int]],
    scratch: memoryview,
) -> Iterator[tuple[int, int, Floats]]:
    import numpy as np

    sizes = np.array((*SIZES, *(-size for size in SIZES)), np.float32)
    packed = array(ins[0].data, np.uint8, ins[0].type.shape)
    stored = array(ins[1].data, np.uint8, ins[1].type.shape)
    for start, stop in tiles:
        part = np.ascontiguousarray(packed[start:stop])
        pairs = np.empty(part.shape, np.uint16)
        spread_nibbles(part, pairs, np.empty_like(pairs))
        values = sizes[pairs.view(np.uint8)]
        if isinstance(decoder, DequantNvfp4):
            whole = float(array(ins[2].data, np.float32, (1,))[0])
            each, wide = factors(stored[start:stop], whole, decoder.dialect), BLOCK
        else:
            each, wide = _powers()[stored[start:stop]], 32
        _check(each, start)
        yield start, stop, values * np.repeat(each, wide, axis=1)


def _powers() -> Floats:
    """2^(e - 127) of each exponent, NaN of 255."""
    import numpy as np

    found: Floats = np.ldexp(np.float64(1), np.arange(256) - 127).astype(np.float32)
    found[255] = np.nan
    return found
