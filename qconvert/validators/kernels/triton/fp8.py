"""FP8 E4M3 with scales -> BF16 in a Triton kernel, bit for bit bf16(fp32(w) * fp32(s)).

Codes are decoded and results rounded on integers, so that any GPU can run it, with FP8 types or
without. Formats: OCP OFP8 (E4M3: bias 7, no infinities, S.1111.111 is NaN) and MX v1.0, 5.4.1 (E8M0
scales). A NaN is written as 0x7FC0 with the code's sign, as qconvert.formats.fp8.decode does.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ldexp, nan, prod

import numpy as np
import torch
import triton
import triton.language as tl

from qconvert.core.dtypes import ceil_div
from qconvert.validators.kernels.device import Case, bitwise

BF16_NAN = 0x7FC0
# Rows and columns a program works on. In the interpreter a program is expensive, an element cheap.
_TILE = {"cuda": (32, 128), "cpu": (32, 1024)}

Block = tuple[int, int]


@triton.jit  # type: ignore[untyped-decorator]
def _dequant(
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    block_rows: tl.tensor,
    block_columns: tl.tensor,
    code_matrix: tl.tensor,
    code_row: tl.tensor,
    scale_matrix: tl.tensor,
    scale_row: tl.tensor,
    out_matrix: tl.tensor,
    out_row: tl.tensor,
    KIND: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """A tile of one matrix. Strides are in elements; those of columns are 1. `scales` are float32
    or float16 (KIND 0), bf16 as uint16 bits (1) or E8M0 as uint8 (2); `out` is int16 bits."""
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = codes + matrix * code_matrix + row[:, None] * code_row + column[None, :]
    code = tl.load(at, mask=inside, other=0).to(tl.int32)
    exponent = (code >> 3) & 15
    mantissa = code & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    # The sign goes on as a bit: Triton's minus takes from zero, which makes -0 a +0 on a GPU.
    size_bits = size.to(tl.int32, bitcast=True)
    value = (size_bits | ((code & 128) << 24)).to(tl.float32, bitcast=True)

    entry = (row // block_rows)[:, None] * scale_row + (column // block_columns)[None, :]
    stored = tl.load(scales + matrix * scale_matrix + entry, mask=inside, other=0)
    if KIND == 0:
        scale = stored.to(tl.float32)
    elif KIND == 1:
        scale = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        power = stored.to(tl.int32)
        bits_of = tl.where(power == 0, 0x00400000, power << 23)
        scale = tl.where(power == 255, 0x7FC00000, bits_of).to(tl.float32, bitcast=True)

    product = value * scale
    bits = product.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    broken = ((code & 127) == 127) | (product != product)
    word = tl.where(broken, ((code & 128) << 8) | 0x7FC0, rounded.to(tl.int32))
    target = out + matrix * out_matrix + row[:, None] * out_row + column[None, :]
    tl.store(target, word.to(tl.int16), mask=inside)


def dequant(codes: torch.Tensor, scales: torch.Tensor, block: Block) -> torch.Tensor:
    """codes uint8 [..., N, K] and scales [..., ceil(N/b0), ceil(K/b1)] -> bf16 bits, int16
    [..., N, K], by the kernel. Scales are float32, float16, bfloat16, or uint8 for E8M0. Rows may be
    strided. Raises ValueError where shapes do not fit or a last dimension is strided."""
    *lead, rows, columns = codes.shape
    grid = (*lead, ceil_div(rows, block[0]), ceil_div(columns, block[1]))
    if codes.dtype != torch.uint8 or tuple(scales.shape) != grid:
        raise ValueError(
            f"expected uint8 codes and a scale grid {list(grid)} for blocks of {block}, found "
            f"{codes.dtype} {list(codes.shape)} and {list(scales.shape)}"
        )
    if codes.stride(-1) != 1 or scales.stride(-1) != 1:
        raise ValueError("columns must be adjacent in memory")
    kinds = {torch.float32: 0, torch.float16: 0, torch.bfloat16: 1, torch.uint8: 2}
    kind = kinds[scales.dtype]
    out = torch.empty((prod(lead), rows, columns), dtype=torch.int16, device=codes.device)
    flat = codes.reshape(-1, rows, columns)
    factors = scales.view(torch.int16) if kind == 1 else scales
    factors = factors.reshape(-1, *grid[-2:])
    tall, wide = _TILE[codes.device.type]
    wide = min(wide, triton.next_power_of_2(columns))
    tiles = ceil_div(rows, tall), ceil_div(columns, wide), prod(lead)
    with np.errstate(all="ignore"):  # overflow to infinity is what fp32 arithmetic does
        _dequant[tiles](
            flat, factors, out, rows, columns, *block, flat.stride(0), flat.stride(1),
            factors.stride(0), factors.stride(1), out.stride(0), out.stride(1),
            KIND=kind, TALL=tall, WIDE=wide,
        )  # fmt: skip
    return out.reshape(codes.shape)


def values() -> list[float]:
    """The value of each of the 256 codes, by the definition."""
    found = []
    for code in range(256):
        sign = -1.0 if code & 128 else 1.0
        exponent, mantissa = code >> 3 & 15, code & 7
        if code & 127 == 127:
            found.append(nan)
        elif exponent == 0:
            found.append(sign * ldexp(mantissa, -9))
        else:
            found.append(sign * ldexp(8 + mantissa, exponent - 10))
    return found


def reference(codes: torch.Tensor, scales: torch.Tensor, block: Block) -> torch.Tensor:
    """The same in torch: a table of the 256 values, scales spread over their blocks, torch's own
    rounding to bf16."""
    table = torch.tensor(values(), dtype=torch.float32, device=codes.device)
    if scales.dtype == torch.uint8:
        powers = [ldexp(1.0, e - 127) for e in range(255)] + [nan]
        scales = torch.tensor(powers, dtype=torch.float32, device=codes.device)[scales.int()]
    rows, columns = codes.shape[-2:]
    spread = scales.float().repeat_interleave(block[0], -2)[..., :rows, :]
    spread = spread.repeat_interleave(block[1], -1)[..., :columns]
    product = table[codes.int()] * spread
    bits = product.to(torch.bfloat16).view(torch.int16)
    negative = torch.where(codes >= 128, BF16_NAN - 0x8000, BF16_NAN).to(torch.int16)
    return torch.where(product.isnan(), negative, bits)


def compared(name: str, codes: torch.Tensor, scales: torch.Tensor, block: Block) -> Case:
    """Kernel and reference on the same weights."""
    return bitwise(name, dequant(codes, scales, block), reference(codes, scales, block))


# --- random weights ------------------------------------------------------------------------------

_ROOM = 6 << 30  # bytes of GPU memory that offsets past 32 bits take to try
_SMALL = ((96, 320), (576, 64), (1, 129), (3, 40, 72))
_REAL = (
    (576, 7168), (7168, 2048), (2048, 7168), (768, 2048), (1536, 4096), (129280, 512), (1, 7168),
    (129, 130), (8, 1536, 2048), (3, 576, 7168),
)  # fmt: skip


def random_cases(device: str) -> Iterator[Case]:
    """Every code with extreme scales; then gaussian and heavy-tailed weights with outlier channels,
    in every form of scales; ragged shapes, strided rows, stacks."""
    generator = torch.Generator(device).manual_seed(0)
    for kind in ("F32", "BF16", "F16", "E8M0"):
        yield _all_codes(kind, device)
    shapes = _SMALL if device == "cpu" else _REAL
    for number, shape in enumerate(shapes):
        for tails in ("gaussian", "student"):
            for kind in ("F32", "BF16", "F16", "E8M0") if device != "cpu" else ("F32", "E8M0"):
                codes, scales = drawn(shape, (128, 128), kind, tails, generator)
                name = f"{tails} {spelled(shape)} blocks 128x128 scales {kind}"
                yield compared(name, codes, scales, (128, 128))
        rows, columns = shape[-2:]
        for block in ((1, columns), (rows, columns), (64, 32)):
            kind = ("F32", "BF16")[number % 2]
            codes, scales = drawn(shape, block, kind, "student", generator)
            name = f"student {spelled(shape)} blocks {spelled(block)} scales {kind}"
            yield compared(name, codes, scales, block)
    codes, scales = drawn(shapes[0], (128, 128), "F32", "student", generator)
    columns = shapes[0][1] // 2
    grid = ceil_div(columns, 128)
    yield compared(
        f"strided rows of {spelled(shapes[0])}",
        codes[:, :columns], scales[:, :grid], (128, 128),
    )  # fmt: skip
    if device != "cpu" and torch.cuda.mem_get_info()[0] > _ROOM:
        yield _far_apart(device, generator)


def _far_apart(device: str, generator: torch.Generator) -> Case:
    """Rows whose offsets do not fit 32 bits: a few columns of a buffer of 2.4 GB."""
    rows, columns, stride = 3000, 512, 800_000
    codes, scales = drawn((rows, columns), (128, 128), "F32", "student", generator)
    apart = torch.zeros(rows * stride, dtype=torch.uint8, device=device).view(rows, stride)
    apart[:, :columns] = codes
    name = f"rows {stride} bytes apart, {spelled((rows, columns))}"
    return compared(name, apart[:, :columns], scales, (128, 128))


def _all_codes(kind: str, device: str) -> Case:
    """A row for each scale, a column for each code: ties, subnormal and infinite results, NaN."""
    if kind == "E8M0":
        scales = torch.arange(256, dtype=torch.uint8).reshape(-1, 1)
    else:
        # Odd mantissas whose products with 8 to 15 are halves of bf16's last place, and the ends.
        awkward = [ldexp(m, e) for m in (129, 137, 171, 255) for e in (-133, -120, -20, -7, 0, 9)]
        awkward += [0.0, 1.0, -1.0, 0.1, 1e-38, 2e-45, 1e-40, 3e38, -3e38, 65504.0, 2.0**-24, 7e35]
        scales = torch.tensor(awkward, dtype=torch.float32).reshape(-1, 1)
        scales = scales.to(
            {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[kind]
        )
    codes = torch.arange(256, dtype=torch.uint8).repeat(scales.shape[0], 1)
    name = f"all 256 codes x {scales.shape[0]} scales {kind}"
    return compared(name, codes.to(device), scales.to(device), (1, 256))


def drawn(
    shape: tuple[int, ...], block: Block, kind: str, tails: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as in an FP8 release: codes uint8 and scales, each block scaled so that its
    largest weight is near 448. Outlier channels are eight times the others; a few codes are
    NaN."""
    weight = torch.randn(shape, generator=generator, device=generator.device)
    if tails == "student":
        square = sum(
            torch.randn(shape, generator=generator, device=generator.device) ** 2 for _ in range(4)
        )
        weight = weight * (4 / square) ** 0.5  # Student's t, 4 degrees of freedom
    weight[..., :: max(2, shape[-1] // 16)] *= 8
    rows, columns = shape[-2:]
    grid = ceil_div(rows, block[0]), ceil_div(columns, block[1])
    full = weight.new_zeros(*shape[:-2], grid[0] * block[0], grid[1] * block[1])
    full[..., :rows, :columns] = weight
    cut = full.reshape(*shape[:-2], grid[0], block[0], grid[1], block[1])
    scale = cut.abs().amax((-3, -1)).clamp_min(2.0**-20) / 448
    if kind == "E8M0":
        powers = scale.log2().ceil()
        stored, scale = (powers + 127).to(torch.uint8), powers.exp2()
    else:
        stored = scale.to(
            {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[kind]
        )
        scale = stored.float()
    scale = scale.clamp_min(2.0**-30)  # a float16 may have become zero
    spread = scale.repeat_interleave(block[0], -2)[..., :rows, :]
    spread = spread.repeat_interleave(block[1], -1)[..., :columns]
    codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    flat = codes.view(-1)
    flat[:: max(7, flat.numel() // 5)] = 0x7F
    flat[3 :: max(7, flat.numel() // 3)] = 0xFF
    return codes, stored


def spelled(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
