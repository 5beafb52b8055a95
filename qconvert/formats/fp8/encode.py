"""FP8: E4M3 codes with a scale for each block of rows and columns, or for each row.

    dialect              fp8                                compressed-tensors
    scale                F32, amax / 448                    BF16, bf16(amax / 448)
    with exponents       the power of two from there on     (none)
    code                 e4m3(w / scale)                    e4m3(bf16(w / scale))
    scale of zeros       1                                  2^-7, bf16's epsilon

Codes are rounded with the scale that is stored, to nearest, ties to even, and held to 448. The first
column is what DeepSeek-V3 publishes (`inference/kernel.py`: scales multiply, under the name
`weight_scale_inv`), and with exponents DeepSeek-V3.1 (`scale_fmt: ue8m0`): rounding a scale after its
codes would multiply weights by up to 2. The second is llm-compressor on bf16 weights
(compressed-tensors, `quantization/utils/helpers.py` `calculate_qparams`,
`quantization/lifecycle/forward_helpers.py` `_quantize`), which rounds every result to bf16.

One scale may be for a whole matrix, or for several that runtimes compute as one (`TensorScale`). Of q, k
and v, or gate and up, runtimes keep the largest of their scales and round the others' codes once more
with it (sglang `requantize_with_max_scale`, vLLM `process_fp8_weight_tensor_strategy`): with one scale
for all, from the largest weight of all, codes stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import PlanError, RowError
from qconvert.core.graph import Buffer, aligned
from qconvert.ops.base import Exact, Uncut, array
from qconvert.ops.cast import NOT_FINITE, TILE_ELEMENTS, matrix_to_quantize, round_to_bf16
from qconvert.ops.compiled import done
from qconvert.ops.rowwise import EachRow, Scaled

if TYPE_CHECKING:
    import numpy as np

    from qconvert.core.arrays import Float32s, Int32s, UInt8s, UInt16s

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


Dialect = Literal["fp8", "compressed-tensors"]
LARGEST = 448.0
_BF16_INFINITY = 0x7F80
_BF16_EPS = 2.0**-7  # what a scale of zero becomes in compressed-tensors
_LEAST_SCALE = 2.0**-126  # kernels may take smaller numbers for zero
_LARGEST_CODE = 0x7E
# The upper half of a float32: 8 bits of exponent and 7 of mantissa. E4M3 keeps the upper 3 of those, and
# its exponent is less by 127 - 7 = 120.
_DROPPED = 4
_BIAS = 120 << 3
_LEAST_NORMAL = (127 - 6) << 7  # 2^-6: below it, E4M3's codes are multiples of 2^-9
_TILE_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class EncodeFp8(EachRow):
    """BF16 [N, K] -> codes F8_E4M3 [N, K] and scales: [ceil(N / b0), ceil(K / b1)] for a `block` (b0,
    b1), else [N, 1]; F32 in dialect fp8, BF16 in compressed-tensors'. Scales multiply. `exponents`: they
    are powers of two.

    Raises PlanError where the argument is no BF16 matrix or the dialect has no such scales, RowError for
    NaN and infinity.
    """

    dialect: Dialect
    block: tuple[int, int] | None
    exponents: bool = False

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        (weight,) = args
        rows, columns = matrix_to_quantize(weight, "FP8")
        if self.exponents and self.dialect != "fp8":
            raise PlanError("scales that are exponents are of dialect fp8")
        grid = (rows, 1)
        if self.block is not None:
            grid = ceil_div(rows, self.block[0]), ceil_div(columns, self.block[1])
        dtype = "F32" if self.dialect == "fp8" else "BF16"
        return TensorType("F8_E4M3", weight.shape), TensorType(dtype, grid)

    def row_step(self, *args: TensorType) -> int:
        return 1 if self.block is None else self.block[0]

    def scratch(self, *args: TensorType) -> int:
        """A tile as float32, and two copies of half that width."""
        height, width = self._tile(*args[0].shape)
        return 2 * aligned(4 * height * width)

    def _tile(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns worked on at a time: whole blocks or rows, of a size that stays in a core's
        own cache if it can."""
        if self.block is None:
            return max(1, min(rows, _TILE_ELEMENTS // max(1, columns))), columns
        height, wide = min(rows, self.block[0]), self.block[1]
        return height, min(columns, max(1, _TILE_ELEMENTS // (max(1, height) * wide)) * wide)

    def loss(self, *args: TensorType) -> str | None:
        what = "a row" if self.block is None else f"a block of {self.block[0]}x{self.block[1]}"
        kind = "power-of-two scale" if self.exponents else "scale"
        return f"rounds to fp8 with a {kind} for {what} (relative error at most 2^-4, mean 2.6 %)"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import numpy as np

        rows, columns = ins[0].type.shape
        weight = array(ins[0].data, np.uint16, (rows, columns))
        codes = array(outs[0].data, np.uint8, (rows, columns))
        scale_dtype: type[np.uint16 | np.float32]
        scale_dtype = np.float32 if self.dialect == "fp8" else np.uint16
        stored = array(outs[1].data, scale_dtype, outs[1].type.shape)
        whole = self.dialect == "fp8"
        each = np.empty(stored.shape, np.float32)
        block = (1, max(1, columns)) if self.block is None else self.block
        if done("fp8_encode", weight, *block, self.exponents, whole, codes, each):
            put_scales(each, outs[1])
            return {}
        height, width = self._tile(rows, columns)
        half = len(scratch) // 2
        for top in range(0, rows, max(1, height)):
            for left in range(0, columns, max(1, width)):
                part = weight[top : top + height, left : left + width]
                bits = array(scratch[: 4 * part.size], np.int32, part.shape)
                spare = array(scratch[half : half + 4 * part.size], np.int32, part.shape)
                largest = self._largest(part, spare, top)
                scale = scales_of(largest, self.dialect, exponents=self.exponents)
                step = self.row_step()
                at = top // step, 0 if self.block is None else left // self.block[1]
                into = stored[at[0] : at[0] + scale.shape[0], at[1] : at[1] + scale.shape[1]]
                if self.dialect == "fp8":
                    np.copyto(into, scale)
                else:
                    np.copyto(into, scale.view(np.uint32) >> np.uint32(16), casting="unsafe")
                if self.block is not None:
                    scale = np.repeat(scale, self.block[1], axis=1)[:, : part.shape[1]]
                made = codes[top : top + height, left : left + width]
                to_fp8(part, scale, bits, spare, made, whole=whole)
        return {}

    def _largest(self, part: UInt16s, spare: Int32s, top: int) -> Int32s:
        """The largest size under each scale, as the bits of a bf16: without their sign, bf16 numbers are
        in the order of their bits, NaN last."""
        import numpy as np

        sizes = spare.reshape(-1).view(np.uint16)[: part.size].reshape(part.shape)
        np.bitwise_and(part, np.uint16(0x7FFF), out=sizes)
        if self.block is None:
            found = sizes.max(axis=1, keepdims=True)
        else:
            begins = np.arange(0, part.shape[1], self.block[1])
            found = np.maximum.reduceat(sizes.max(axis=0, keepdims=True), begins, axis=1)
        if int(found.max(initial=0)) >= _BF16_INFINITY:
            row = int(np.argmax(sizes.max(axis=1) >= _BF16_INFINITY))
            raise RowError(top + row, NOT_FINITE)
        found_bits: Int32s = found.astype(np.int32)
        return found_bits


def scales_of(largest: Int32s, dialect: Dialect, *, exponents: bool) -> Float32s:
    """The scales for the bits of the largest weights, exactly as they are stored."""
    import numpy as np

    scale = (largest << 16).view(np.float32) / np.float32(LARGEST)
    if dialect == "fp8":
        np.maximum(scale, np.float32(_LEAST_SCALE), out=scale)
        if exponents:
            # The next power of two: none is closer to a quotient of these than its mantissa shows.
            bits = scale.view(np.int32)
            np.add(bits, (1 << 23) - 1, out=bits)
            np.bitwise_and(bits, -(1 << 23), out=bits)
        scale[largest == 0] = 1
        return scale
    bits = scale.view(np.int32)
    round_to_bf16(bits, np.empty_like(bits))
    np.left_shift(bits, 16, out=bits)
    scale[scale == 0] = _BF16_EPS
    return scale


def put_scales(scale: Float32s, out: Buffer) -> None:
    """Scales into their tensor, F32 or BF16."""
    import numpy as np

    if out.type.dtype == "F32":
        np.copyto(array(out.data, np.float32, out.type.shape), scale)
    else:
        upper = scale.view(np.uint32) >> np.uint32(16)
        np.copyto(array(out.data, np.uint16, out.type.shape), upper, casting="unsafe")


def to_fp8(
    part: UInt16s, scale: Float32s, bits: Int32s, spare: Int32s, codes: UInt8s, *, whole: bool
) -> None:
    """Bits of bf16 weights, divided by their scales, -> E4M3 codes. `bits` and `spare` are working
    memory; not `whole`: quotients are rounded to bf16 first."""
    import numpy as np

    np.copyto(bits, part)
    np.multiply(bits, 1 << 16, out=bits)  # faster than numpy's shift
    values = bits.view(np.float32)
    np.divide(values, scale, out=values)
    _upper_halves(bits, spare, whole=whole)
    to_e4m3(bits, spare, codes)


def _upper_halves(bits: Int32s, spare: Int32s, *, whole: bool) -> None:
    """Float32 numbers such that their upper halves round to E4M3 as the numbers do: the last bit of the
    half stands for what is dropped, or (not `whole`) the numbers are rounded to bf16 first. A quotient
    of two bf16 is never halfway between two, so that half of what is dropped can be added."""
    import numpy as np

    if whole:
        np.bitwise_and(bits, 0xFFFF, out=spare)
        np.add(spare, 0xFFFF, out=spare)
        np.bitwise_or(bits, spare, out=bits)
    else:
        np.add(bits, 0x8000, out=bits)


def to_e4m3(bits: Int32s, spare: Int32s, codes: UInt8s) -> None:
    """Upper halves of float32 bits -> E4M3 codes, to nearest, ties to even, at most 448. A look into a
    table is three times as quick as the arithmetic that makes it, and twice as quick into memory that
    lies in a row."""
    import numpy as np

    upper = bits.view(np.uint16).reshape(*bits.shape, 2)[..., 1]
    found = spare.reshape(-1).view(np.uint8)[: bits.size].reshape(bits.shape)
    np.take(_codes(), upper, out=found, mode="clip")
    np.copyto(codes, found)


@lru_cache(maxsize=1)
def _codes() -> UInt8s:
    """The code of each upper half of a float32; below 2^-6 it is how many 2^-9 there are."""
    import numpy as np

    upper = np.arange(1 << 16, dtype=np.uint32)
    size = upper & np.uint32(0x7FFF)
    odd = size >> _DROPPED & 1
    code = ((size + odd + ((1 << (_DROPPED - 1)) - 1)) >> _DROPPED).astype(np.int32) - _BIAS
    with np.errstate(all="ignore"):
        steps = np.rint((size << np.uint32(16)).view(np.float32) * np.float32(2.0**9))
    small = size < _LEAST_NORMAL
    code[small] = steps[small].astype(np.int32)
    np.minimum(code, _LARGEST_CODE, out=code)
    code |= (upper >> 8 & 0x80).astype(np.int32)
    found: UInt8s = code.astype(np.uint8)
    return found
