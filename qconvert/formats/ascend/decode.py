"""msmodelslim's integers -> BF16: bf16((code - offset) * scale), rounded once.

Format source: msmodelslim 26.1, `core/quant_service/modelslim_v1/save/ascendv1.py` (`AscendV1Saver`) and
`ir/api/impl/int_quantization.py` (`dequantize`). A static W8A8 stores no scale of its weights but
`deq_scale`, which is it times that of the inputs: F32, or its bits in an I64 for models in float16. Two
rows of W4A8 are in one, the even one's code in the lower half of a byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer, Output, Part, whole
from qconvert.ops.base import array
from qconvert.ops.cast import FLOAT_DTYPES, RoundedTiles, check_finite, decode, float_tiles
from qconvert.ops.rowwise import row_parts

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s

Kind = Literal["offset", "packed", "static"]


@dataclass(frozen=True, slots=True)
class DequantAscend(RoundedTiles):
    """weight I8 [N, K] (`packed`: [N / 2, K]), weight_scale and weight_offset [N, groups] in floats; or
    (`static`) weight, deq_scale F32 or I64 [N, 1] and input_scale [1] in floats -> BF16 [N, K].

    Raises PlanError where dtypes or shapes do not fit, or rows of one byte would part; RowError where a
    scale or offset is NaN or infinite.
    """

    kind: Kind

    format: ClassVar[str] = "msmodelslim"

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        weight, scale, beside = args
        if weight.dtype != "I8" or len(weight.shape) != 2:
            raise PlanError(f"expected codes in an I8 matrix, found {weight}")
        columns = weight.shape[1]
        rows = scale.shape[0] if self.kind == "packed" and scale.shape else weight.shape[0]
        if self.kind == "static":
            fits = scale.dtype in ("F32", "I64") and scale.shape == (rows, 1)
            fits = fits and beside.dtype in FLOAT_DTYPES and beside.shape == (1,)
            said = f"deq_scale F32 or I64 [{rows}] and input_scale [1] in floats"
        else:
            groups = scale.shape[-1] if len(scale.shape) == 2 else 0
            fits = scale.dtype in FLOAT_DTYPES and beside == scale and scale.shape == (rows, groups)
            fits = fits and groups > 0 and columns % groups == 0
            fits = fits and weight.shape[0] == ceil_div(rows, self._per_byte)
            said = f"weight_scale and weight_offset [{rows}, groups] in floats"
        if not fits:
            raise PlanError(f"expected {said} for {weight}, found {scale} and {beside}")
        return (TensorType("BF16", (rows, columns)),)

    def loss(self, *args: TensorType) -> str | None:
        return "rounds int8 x scale to bf16 (relative error at most 2^-8)"

    @property
    def _per_byte(self) -> int:
        return 2 if self.kind == "packed" else 1

    def row_step(self, *args: TensorType) -> int:
        return self._per_byte

    def rows(self, start: int, stop: int, *args: TensorType) -> Part:
        (made,) = self.infer(*args)
        if (start, stop) == (0, made.shape[0]):
            return whole(self, args)
        taken = []
        for number, arg in enumerate(args):
            step = self._per_byte if number == 0 else 1
            first, last = start // step, ceil_div(stop, step)
            cut = len(arg.shape) > 1
            taken.append((first * arg.row_nbytes, arg.with_rows(last - first)) if cut else (0, arg))
        return Part(tuple(taken), ((start * made.row_nbytes, made.with_rows(stop - start)),))

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        (made,) = self.infer(*args)
        return row_parts(self, made.shape[0], 2 * made.row_nbytes, limit, *args)

    def cut(
        self, args: tuple[Output, ...], start: int, stop: int, rows: int
    ) -> tuple[Self, tuple[Output, ...]]:
        step = self._per_byte
        if start % step:
            raise PlanError(f"rows from {start} on are wanted, and {step} rows share their bytes")
        taken = [args[0].rows(start // step, ceil_div(stop, step))]
        taken += [arg.rows(start, stop) if len(arg.type.shape) > 1 else arg for arg in args[1:]]
        return self, tuple(taken)

    def floats(self, ins: Sequence[Buffer], scratch: memoryview) -> Iterator[tuple[int, Float32s]]:
        import numpy as np

        codes = array(ins[0].data, np.int8, ins[0].type.shape)
        scale, beside = _floats(ins[1]), _floats(ins[2])
        if self.kind == "static":
            with np.errstate(all="ignore"):
                scale, beside = scale / beside, np.zeros_like(scale)
        check_finite(scale, 0)
        check_finite(beside, 0)
        rows, groups = scale.shape
        for start, stop in float_tiles(rows, codes.shape[1]):
            part = codes[start:stop]
            if self.kind == "packed":
                at = np.arange(start, stop)
                pairs = codes[at // 2]
                # A shift to the left and back extends the sign of the lower half.
                lower = np.left_shift(pairs, 4) >> np.int8(4)
                part = np.where((at % 2 == 0)[:, None], lower, pairs >> np.int8(4))
            blocks = part.astype(np.float32).reshape(stop - start, groups, -1)
            with np.errstate(all="ignore"):
                blocks -= beside[start:stop, :, None]
                blocks *= scale[start:stop, :, None]
            yield start, blocks.reshape(stop - start, -1)


def _floats(stored: Buffer) -> Float32s:
    """Scales or offsets as float32; I64 holds the bits of one."""
    import numpy as np

    kind = stored.type
    if kind.dtype == "I64":
        bits = array(stored.data, np.int64, kind.shape)
        return bits.astype(np.int32).view(np.float32)
    found = np.empty(kind.shape, np.float32)
    decode(stored.data, kind.dtype, found, np.empty(kind.shape, np.int32))
    return found
