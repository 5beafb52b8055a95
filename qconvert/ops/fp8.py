"""FP8 with scales -> BF16, exactly: bf16(fp32(w) * fp32(s)), one rounding to bf16.

Format sources: DeepSeek-V3's `inference/kernel.py` (`weight_dequant_kernel`: block scales are
multipliers although called `weight_scale_inv`), Qwen FP8 releases (same layout), compressed-tensors
0.19 `float-quantized` (`weight_scale` per channel or tensor). A block grid has ceil(rows / b0) x
ceil(columns / b1) entries; the ragged last blocks are ordinary (DeepSeek-V3's `kv_a_proj_with_mqa`
has 576 rows under 128-row blocks).

Per-channel scales are the block (1, K) and per-tensor scales the block (N, K): one op serves all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from qconvert.errors import PlanError, RunError
from qconvert.graph import Buffer, Part
from qconvert.ops.buffers import typed
from qconvert.spec import TensorType, ceil_div

if TYPE_CHECKING:
    import torch

WEIGHT_DTYPES = ("F8_E4M3", "F8_E5M2")
# U8 and F8_E8M0 both hold power-of-two exponents: 2^(e - 127), 255 being NaN (OCP MX v1.0, 5.4.1).
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")

# Elements decoded at a time: the float32 copy of them stays inside a core's cache. Measured between
# 64 Ki and 1 Mi elements; flat from 192 Ki to 512 Ki.
TILE_ELEMENTS = 1 << 18

# An e4m3 code shifted left by 20 puts exponent and mantissa where float32 keeps them, with the
# exponent bias off by 127 - 7 = 120: the float32 is the code's value times 2^-120, subnormals
# included. The int8 -> int32 copy extends the sign, so the mask keeps bit 31 and bits 20 to 26.
_SHIFT = 20
_MASK = 0x87F00000 - (1 << 32)
_BIAS = 2.0**120
_SAFE_SCALE = 2.0**7  # s * 2^120 must stay finite


@dataclass(frozen=True, slots=True)
class DequantFp8:
    """weight [..., N, K] F8 and scale [..., ceil(N/b0), ceil(K/b1)] -> BF16 [..., N, K].

    Scales multiply. They may be F32, BF16, F16 or E8M0 (stored as F8_E8M0 or U8). Leading dimensions
    (experts) of weight and scale must be equal. Raises PlanError where dtypes or the grid do not
    fit, RunError where a scale is NaN or infinite. NaN codes become NaN and are remarked upon.
    """

    block: tuple[int, int]

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        weight, scale = args
        if weight.dtype not in WEIGHT_DTYPES:
            raise PlanError(f"expected an FP8 weight ({', '.join(WEIGHT_DTYPES)}), found {weight}")
        if scale.dtype not in SCALE_DTYPES:
            raise PlanError(f"expected a scale in {', '.join(SCALE_DTYPES)}, found {scale}")
        if len(weight.shape) < 2:
            raise PlanError(f"expected a weight of two or more dimensions, found {weight}")
        *lead, rows, columns = weight.shape
        grid = (*lead, ceil_div(rows, self.block[0]), ceil_div(columns, self.block[1]))
        if scale.shape != grid:
            raise PlanError(
                f"expected a scale grid {list(grid)} for {weight} in blocks of "
                f"{self.block[0]}x{self.block[1]}, found {list(scale.shape)}"
            )
        return (TensorType("BF16", weight.shape),)

    def parts(self, limit: int, *args: TensorType) -> Iterator[Part]:
        """Whole block rows of one matrix at a time; a per-tensor scale lets any row start one."""
        weight, scale = args
        *lead, rows, columns = weight.shape
        grid_rows, grid_columns = scale.shape[-2:]
        one_block = self.block[0] >= rows
        step = 1 if one_block else self.block[0]
        row_cost = columns * 3 + 1  # one FP8 byte read and one BF16 written for each element
        height = max(1, limit // (row_cost * step)) * step
        scale_row = TensorType(scale.dtype, (1, grid_columns)).nbytes
        for matrix in range(prod(lead)):
            for start in range(0, rows, height):
                stop = min(start + height, rows)
                first = 0 if one_block else start // step
                count = 1 if one_block else ceil_div(stop, step) - first
                at = (matrix * rows + start) * columns
                yield Part(
                    args=(
                        (at, TensorType(weight.dtype, (stop - start, columns))),
                        (
                            (matrix * grid_rows + first) * scale_row,
                            TensorType(scale.dtype, (count, grid_columns)),
                        ),
                    ),
                    outs=((2 * at, TensorType("BF16", (stop - start, columns))),),
                )

    def scratch(self, *args: TensorType) -> int:
        """One tile as float32, its codes as bytes, and the scales of the part as float32."""
        weight, scale = args
        rows, columns = weight.shape[-2:]
        return 5 * min(rows, max(1, TILE_ELEMENTS // max(1, columns))) * columns + 4 * scale.numel

    def loss(self, *args: TensorType) -> str | None:
        if args[1].dtype in ("F8_E8M0", "U8"):
            return None  # a power of two times 4 significant bits fits bf16's 8
        return "rounds fp8 x scale to bf16 (relative error at most 2^-9)"

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        import torch

        weight, scale = ins
        rows, columns = weight.type.shape
        tile_rows = min(rows, max(1, TILE_ELEMENTS // columns))
        elements = tile_rows * columns
        scale_at = 4 * elements
        codes_at = scale_at + 4 * scale.type.numel
        factors = typed(scratch[scale_at:codes_at], torch.float32, scale.type.shape)
        _decode_scale(scale, factors)
        bits = typed(scratch[:scale_at], torch.int32, (tile_rows, columns))
        codes = typed(scratch[codes_at : codes_at + elements], torch.int8, (tile_rows, columns))
        source = typed(weight.data, torch.int8, (rows, columns))
        target = typed(outs[0].data, torch.bfloat16, (rows, columns))

        # abs().max() of a few thousand scales; NaN propagates through max.
        largest = float(factors.abs().max())
        if not largest < float("inf"):
            raise RunError("its scale is NaN or infinite; the checkpoint is broken")
        fast = weight.type.dtype == "F8_E4M3" and largest < _SAFE_SCALE
        if fast:
            factors.mul_(_BIAS)
        nan_codes = 0
        for start, stop in _row_spans(rows, self.block[0], tile_rows):
            grid_row = start // self.block[0]
            # One scale row for the span, or, for per-channel scales, one for each of its rows.
            height = stop - start if self.block[0] == 1 else 1
            span_scale = factors[grid_row : grid_row + height]
            span = source[start:stop]
            if fast:
                torch.bitwise_and(span, 0x7F, out=codes[: stop - start])
                if int(codes[: stop - start].max()) < 0x7F:
                    work = bits[: stop - start]
                    work.copy_(span)
                    work.bitwise_left_shift_(_SHIFT).bitwise_and_(_MASK)
                    decoded = work.view(torch.float32)
                    _scale_columns(decoded, span_scale, self.block[1])
                    target[start:stop].copy_(decoded)
                    continue
            # NaN codes, E5M2 or a huge scale: torch's own cast, several times slower.
            decoded = bits[: stop - start].view(torch.float32)
            decoded.copy_(span.view(_torch_fp8(weight.type.dtype)))
            nan_codes += int(decoded.isnan().sum())
            _scale_columns(decoded, span_scale / _BIAS if fast else span_scale, self.block[1])
            target[start:stop].copy_(decoded)
        return {"NaN codes": nan_codes} if nan_codes else {}


def _torch_fp8(dtype: str) -> torch.dtype:
    import torch

    return torch.float8_e4m3fn if dtype == "F8_E4M3" else torch.float8_e5m2


def _row_spans(rows: int, block_rows: int, tile_rows: int) -> Iterator[tuple[int, int]]:
    """Cut rows into tiles that do not cross a block row; per-channel blocks do not limit a tile."""
    start = 0
    while start < rows:
        stop = min(start + tile_rows, rows)
        if block_rows > 1:
            stop = min(stop, (start // block_rows + 1) * block_rows)
        yield start, stop
        start = stop


def _scale_columns(values: torch.Tensor, scale: torch.Tensor, block_columns: int) -> None:
    """Multiply float32 values [r, K] by scale [1 or r, ceil(K/b1)] in place."""
    columns = values.shape[1]
    whole = columns // block_columns
    if whole:
        rows, stride = values.shape[0], values.stride(0)
        blocks = values.as_strided((rows, whole, block_columns), (stride, block_columns, 1))
        blocks.mul_(scale[:, :whole, None])
    if columns > whole * block_columns:
        values[:, whole * block_columns :].mul_(scale[:, whole:])


def _decode_scale(scale: Buffer, out: torch.Tensor) -> None:
    """Scales as float32. E8M0 e is 2^(e-127): a float32 with exponent field e, except that 0 is the
    subnormal 2^-127 and 255 is NaN."""
    import torch

    dtype = scale.type.dtype
    if dtype not in ("F8_E8M0", "U8"):
        kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
        out.copy_(typed(scale.data, kinds[dtype], scale.type.shape))
        return
    exponents = typed(scale.data, torch.uint8, scale.type.shape).to(torch.int32)
    bits = exponents << 23
    bits[exponents == 0] = 0x00400000
    bits[exponents == 255] = 0x7FC00000
    out.copy_(bits.view(torch.float32))
