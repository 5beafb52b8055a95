"""F16 or F32 -> BF16, the parts of it that other ops share, and any encoding -> F16 or F32.

Rounding is IEEE 754's to nearest, ties to even, on the bits of float32: what torch's
`.to(torch.bfloat16)` gives, denormals included; every NaN becomes the quiet NaN with its sign. A finite
number above the largest bf16 by half a step or more, which torch makes infinite, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, Part
from qconvert.ops.base import array
from qconvert.ops.rowwise import EachRow, FloatDecoder

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.arrays import Float32s, Int32s


FLOAT_DTYPES = ("F32", "F16", "BF16")

# Elements worked on at a time: a float32 copy and one more fit in a core's own cache.
TILE_ELEMENTS = 1 << 16
# Said of rows that no format can hold.
NOT_FINITE = "holds NaN or infinity; the checkpoint is broken"
NAN_SCALE = "has a scale of NaN; the checkpoint is broken"

_NAMES = {"F32": "fp32", "F16": "fp16"}
_BF16_NAN = 0x7FC0
_F16_INFINITY = 0x7C00
# Half a step above bf16's largest number: from there on bf16 is infinite.
BF16_OVERFLOW = (2.0 - 2.0**-8) * 2.0**127
BEYOND = "they are finite in fp32, and runtimes compute in bf16: leave this tensor unquantized"
_DECODED = "look whether its scales are damaged, or take `dequant --dtype f32`"


@dataclass(frozen=True, slots=True)
class ToBf16(EachRow):
    """F16 or F32 [N, ...] -> BF16 [N, ...], rounded to nearest, ties to even.

    Raises PlanError for other dtypes and for scalars, RowError for a number that bf16 has no room for.
    """

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (source,) = args
        if source.dtype not in _NAMES:
            raise PlanError(f"expected a tensor in {' or '.join(_NAMES)}, found {source}")
        if not source.shape:
            raise PlanError(f"expected a tensor with rows, found {source}")
        return (TensorType("BF16", source.shape),)

    def scratch(self, *args: TensorType) -> int:
        """A tile as float32 and its rounded copy."""
        return 8 * min(args[0].numel, TILE_ELEMENTS)

    def loss(self, *args: TensorType) -> str | None:
        """float16 has 11 significant bits, bfloat16 8; its range fits."""
        return f"rounds {_NAMES[args[0].dtype]} to bf16 (relative error at most 2^-8)"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        kind = ins[0].type
        size = kind.numel
        width = kind.nbytes // max(1, size)
        tile = min(size, TILE_ELEMENTS)
        bits = array(scratch[: 4 * tile], np.int32, (tile,))
        spare = array(scratch[4 * tile :], np.int32, (tile,))
        target = array(outs[0].data, np.uint16, (size,))
        with np.errstate(all="ignore"):  # signalling NaNs are not an error here
            for start in range(0, size, TILE_ELEMENTS):
                stop = min(start + TILE_ELEMENTS, size)
                part, beside = bits[: stop - start], spare[: stop - start]
                values = part.view(np.float32)
                data = ins[0].data[width * start : width * stop]
                decode(data, kind.dtype, values, beside)
                largest = float(np.maximum(values.max(), -values.min()))  # NaN if any value is
                if not largest < BF16_OVERFLOW:
                    check_beyond(values, start, size // kind.shape[0], BEYOND)
                nan = largest != largest
                if nan:
                    found = np.flatnonzero(np.isnan(values))
                    signs = (part[found] < 0).astype(np.uint16)
                round_to_bf16(part, beside)
                np.copyto(target[start:stop], part, casting="unsafe")
                if nan:
                    target[start + found] = _BF16_NAN | signs << np.uint16(15)
        return {}


def decode(data: memoryview, dtype: str, out: Float32s, spare: Int32s) -> None:
    """F32, F16 or BF16 as float32, exactly; `spare` is as large as `out`."""
    import numpy as np

    shape, bits = out.shape, out.view(np.int32)
    if dtype == "F32":
        np.copyto(bits, array(data, np.int32, shape))
    elif dtype == "BF16":
        np.copyto(bits, array(data, np.uint16, shape))
        np.multiply(bits, 1 << 16, out=bits)  # faster than numpy's shift
    else:
        _decode_f16(data, out, spare)


def _decode_f16(data: memoryview, out: Float32s, spare: Int32s) -> None:
    """Exponent and mantissa moved to where float32 keeps them give the value times 2^-112, subnormals
    included, except that float16's infinity and NaN look like numbers: those are left to numpy's own
    conversion, which is five times slower."""
    import numpy as np

    shape, bits = out.shape, out.view(np.int32)
    halves = array(data, np.int16, shape)
    sizes = spare.reshape(-1).view(np.int16)[: halves.size].reshape(shape)
    np.bitwise_and(halves, 0x7FFF, out=sizes)
    if sizes.size and int(sizes.max()) >= _F16_INFINITY:
        np.copyto(out, halves.view(np.float16))
        return
    np.copyto(bits, halves)  # extends the sign
    np.multiply(bits, 1 << 13, out=bits)
    np.bitwise_and(bits, 0x8FFFE000 - (1 << 32), out=bits)
    np.multiply(out, np.float32(2.0**112), out=out)


def check_beyond(
    values: Float32s, first: int, width: int, what: str, *, infinite: bool = False
) -> None:
    """Raise RowError for numbers that bf16 has no room for, with `infinite` ones among them. Rows have
    `width` numbers, and the first one here is number `first` of all. `what` says what to do."""
    import numpy as np

    sizes = np.abs(values).reshape(-1)
    beyond = sizes >= np.float32(BF16_OVERFLOW)
    if not infinite:
        beyond &= np.isfinite(sizes)
    found = np.flatnonzero(beyond)
    if found.size:
        raise RowError(
            (first + int(found[0])) // width,
            f"has weights of up to {float(sizes[found].max()):.5g}, beyond bf16 (3.3895e+38 at most); "
            f"{what}",
        )


def round_to_bf16(bits: Int32s, spare: Int32s) -> None:
    """Float32 bits -> the bits of the nearest bf16, ties to even, in the lower halves. (The upper
    halves repeat the sign.) Half of what is dropped is added, minus one if what is kept is even;
    the carry does the rest. NaN is not handled."""
    import numpy as np

    np.right_shift(bits, 16, out=spare)
    np.bitwise_and(spare, 1, out=spare)
    np.add(spare, 0x7FFF, out=spare)
    np.add(bits, spare, out=bits)
    np.right_shift(bits, 16, out=bits)


def float_tiles(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """First and last rows of tiles of TILE_ELEMENTS numbers, or a row."""
    step = max(1, TILE_ELEMENTS // max(1, columns))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def matrix_to_quantize(
    weight: TensorType, to: str, dtypes: Sequence[str] = ("BF16",)
) -> tuple[int, int]:
    """Rows and columns. Raises PlanError for what is no matrix in one of the dtypes."""
    if weight.dtype not in dtypes or len(weight.shape) != 2:
        asked = " or ".join(dtypes)
        raise PlanError(f"expected a {asked} matrix to quantize to {to}, found {weight}")
    rows, columns = weight.shape
    return rows, columns


def check_finite(scale: Float32s, first: int) -> None:
    """Raise RowError for a scale that is NaN or infinite; `first` is the number of its first row."""
    import numpy as np

    wrong = ~np.isfinite(scale)
    if wrong.any():
        row = first + int(np.argwhere(wrong)[0][0])
        raise RowError(row, "has a scale of NaN or infinity; the checkpoint is broken")


class RoundedTiles(EachRow):
    """A decoder whose BF16 is its `floats`, rounded to nearest, ties to even. NaN stays NaN; a number
    that bf16 has no room for is a RowError."""

    __slots__ = ()

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
        raise NotImplementedError

    def scratch(self, *args: TensorType) -> int:
        """None: a few tiles are allocated."""
        return 0

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        rows, columns = outs[0].type.shape
        target = array(outs[0].data, np.uint16, (rows, columns))
        for start, values in self.floats(ins, scratch):
            largest = float(np.maximum(values.max(initial=0), -values.min(initial=0)))
            if not largest < BF16_OVERFLOW:  # NaN too
                check_beyond(values, start * columns, columns, _DECODED, infinite=True)
            bits = values.view(np.int32)
            round_to_bf16(bits, np.empty_like(bits))
            np.copyto(target[start : start + values.shape[0]], bits, casting="unsafe")
        return {}


# --- Encodings to F16 and F32 ---------------------------------------------------------------------

FloatDtype = Literal["F16", "F32"]
_LARGEST = {"F16": 65504.0, "F32": 3.4028234663852886e38}


@dataclass(frozen=True, slots=True)
class DequantTo:
    """The arguments of a decoder of [N, K] or stacks of it -> `dtype` of the same shape: code times
    scale in float32, rounded to F16 once. Not in compiled loops.

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

        rows = outs[0].type.shape[0]
        raw = array(outs[0].data, np.uint8, (outs[0].type.nbytes,))
        kind = np.float32 if self.dtype == "F32" else np.float16
        target: np.ndarray[Any, Any] = raw.view(kind).reshape(rows, -1)
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
                        cure = getattr(self.decoder, "cure", "take another dtype")
                        raise RowError(
                            row,
                            f"has weights beyond {self.dtype} ({_LARGEST[self.dtype]:g} at most); "
                            f"{cure}{'' if allowed is None else may}",
                        )
                    counts[beyond] += int(np.count_nonzero(infinite))
                counts[nans] += int(np.count_nonzero(np.isnan(values)))
                target[start : start + values.shape[0]] = values
        return {what: count for what, count in counts.items() if count}
