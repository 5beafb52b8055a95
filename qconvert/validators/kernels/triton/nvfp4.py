"""NVFP4 -> BF16 in a Triton kernel, bit for bit bf16(fp32(code) * fp32(factor)), where a factor is a
block scale times the global scale (modelopt) or divided by it (compressed-tensors), in float32.

Codes are decoded and results rounded on integers, so that any GPU can run it, with FP4 and FP8 types or
without. Formats: OCP MX v1.0, 5.3.3 (E2M1: bias 1, no NaN, no infinity), OCP OFP8 (E4M3: bias 7, no
infinities, S.1111.111 is NaN); compressed-tensors 0.19, nvidia-modelopt 0.47. The kernel divides as IEEE
requires; Triton's own `/` is off by a bit on GPUs.
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

BLOCK = 16
_NAN = 0x7FC0
# Rows and columns a program works on. In the interpreter a program is expensive, an element cheap.
_TILE = {"cuda": (16, 256), "cpu": (64, 1024)}


@triton.jit  # type: ignore[untyped-decorator]
def _dequant(
    packed: tl.tensor,
    scales: tl.tensor,
    global_scales: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    packed_matrix: tl.tensor,
    packed_row: tl.tensor,
    scale_matrix: tl.tensor,
    scale_row: tl.tensor,
    out_matrix: tl.tensor,
    out_row: tl.tensor,
    DIVIDES: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """A tile of one matrix. Strides are in elements; those of columns are 1. `packed` and `scales` are
    uint8, `global_scales` float32, one per matrix, `out` int16 bits."""
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = packed + matrix * packed_matrix + row[:, None] * packed_row + (column // 2)[None, :]
    both = tl.load(at, mask=inside, other=0).to(tl.int32)
    code = (both >> ((column % 2) * 4).to(tl.int32)[None, :]) & 15
    exponent = (code >> 1) & 3
    mantissa = code & 1
    normal = (((exponent + 126) << 23) | (mantissa << 22)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.5, normal)
    # The sign goes on as a bit: Triton's minus takes from zero, which makes -0 a +0 on a GPU.
    bits_of_size = size.to(tl.int32, bitcast=True)
    value = (bits_of_size | ((code & 8) << 28)).to(tl.float32, bitcast=True)

    entry = scales + matrix * scale_matrix + row[:, None] * scale_row + (column // 16)[None, :]
    stored = tl.load(entry, mask=inside, other=0).to(tl.int32)
    power = (stored >> 3) & 15
    rest = stored & 7
    plain = (((power + 120) << 23) | (rest << 20)).to(tl.float32, bitcast=True)
    block = tl.where(power == 0, rest.to(tl.float32) * 0.001953125, plain)
    block_bits = block.to(tl.int32, bitcast=True) | ((stored & 128) << 24)
    block = block_bits.to(tl.float32, bitcast=True)
    global_scale = tl.load(global_scales + matrix)
    factor = tl.div_rn(block, global_scale) if DIVIDES else block * global_scale

    product = value * factor
    bits = product.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    broken = ((stored & 127) == 127) | (product != product)
    word = tl.where(broken, 0x7FC0, rounded.to(tl.int32))
    target = out + matrix * out_matrix + row[:, None] * out_row + column[None, :]
    tl.store(target, word.to(tl.int16), mask=inside)


def dequant(
    packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, *, divides: bool
) -> torch.Tensor:
    """packed uint8 [..., N, K/2], scales uint8 (E4M3 codes) [..., N, K/16] and global_scale float32
    [...] -> bf16 bits, int16 [..., N, K], by the kernel; a NaN is 0x7FC0. Rows may be strided. Raises
    ValueError where shapes or dtypes do not fit or a last dimension is strided."""
    *lead, rows, half = packed.shape
    columns = 2 * half
    wanted = (*lead, rows, columns // BLOCK)
    kinds = packed.dtype, scales.dtype, global_scale.dtype
    if kinds != (torch.uint8, torch.uint8, torch.float32) or columns % BLOCK:
        raise ValueError(
            f"expected uint8, uint8, float32 and whole blocks, found {kinds}, {columns}"
        )
    if tuple(scales.shape) != wanted or tuple(global_scale.shape) != tuple(lead):
        raise ValueError(
            f"expected scales {list(wanted)} and global scales {list(lead)}, found "
            f"{list(scales.shape)} and {list(global_scale.shape)}"
        )
    if packed.stride(-1) != 1 or scales.stride(-1) != 1:
        raise ValueError("columns must be adjacent in memory")
    out = torch.empty((prod(lead), rows, columns), dtype=torch.int16, device=packed.device)
    flat = packed.reshape(-1, rows, half)
    factors = scales.reshape(-1, rows, columns // BLOCK)
    tall, wide = _TILE[packed.device.type]
    wide = min(wide, triton.next_power_of_2(columns))
    tiles = ceil_div(rows, tall), ceil_div(columns, wide), prod(lead)
    with np.errstate(all="ignore"):  # overflow to infinity is what fp32 arithmetic does
        _dequant[tiles](
            flat, factors, global_scale.reshape(-1).contiguous(), out, rows, columns, flat.stride(0),
            flat.stride(1), factors.stride(0), factors.stride(1), out.stride(0), out.stride(1),
            DIVIDES=divides, TALL=tall, WIDE=wide,
        )  # fmt: skip
    return out.reshape(*lead, rows, columns)


def block_values() -> list[float]:
    """The value of each of the 256 E4M3 codes, by the definition."""
    found = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        size = ldexp(8 + mantissa, exponent - 10) if exponent else ldexp(mantissa, -9)
        size = nan if code & 127 == 127 else size
        found.append(-size if code & 128 else size)
    return found


def reference(
    packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, *, divides: bool
) -> torch.Tensor:
    """The same in torch: tables of 16 and 256 values, torch's own rounding to bf16."""
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    device = packed.device
    codes = torch.tensor([*sizes, *(-size for size in sizes)], device=device)
    blocks = torch.tensor(block_values(), dtype=torch.float32, device=device)[scales.int()]
    each = global_scale.reshape(*global_scale.shape, 1, 1)
    factor = blocks / each if divides else blocks * each
    pair = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    product = codes[pair.int()] * factor.repeat_interleave(BLOCK, -1)
    bits = product.to(torch.bfloat16).view(torch.int16)
    return torch.where(product.isnan(), torch.tensor(_NAN, dtype=torch.int16, device=device), bits)


def compared(
    name: str,
    packed: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    divides: bool,
) -> Case:
    """Kernel and reference on the same weights."""
    made = dequant(packed, scales, global_scale, divides=divides)
    return bitwise(name, made, reference(packed, scales, global_scale, divides=divides))


# --- random weights ------------------------------------------------------------------------------

_ROOM = 6 << 30  # bytes of GPU memory that offsets past 32 bits take to try
_SMALL = ((96, 320), (576, 64), (1, 16), (65, 1040), (3, 40, 80))
_REAL = (
    (2048, 7168), (7168, 2048), (768, 2048), (2048, 768), (1536, 4096), (129280, 512), (1, 7168),
    (129, 144), (8, 1536, 2048), (256, 2048, 512), (3, 576, 7168),
)  # fmt: skip
_NAMES = {True: "compressed-tensors", False: "modelopt"}


def random_cases(device: str) -> Iterator[Case]:
    """Every pair of codes under every block scale with extreme global scales; then heavy-tailed and
    gaussian weights of both dialects; strided rows, stacks, far offsets."""
    generator = torch.Generator(device).manual_seed(0)
    for divides, dialect in _NAMES.items():
        for global_scale in (1.0, 0.37, 1536.0, 3.1e-5, 1e-38, 3e38, 2.0**-149):
            yield _all_codes(global_scale, device, divides=divides)
        for shape in _SMALL if device == "cpu" else _REAL:
            for tails in ("gaussian", "student"):
                drawing = drawn(shape, tails, generator, divides=divides)
                name = f"{tails} {'x'.join(map(str, shape))} {dialect}"
                yield compared(name, *drawing, divides=divides)
        packed, scales, one = drawn((96, 640), "student", generator, divides=divides)
        yield compared(
            f"strided rows {dialect}", packed[:, :160], scales[:, :20], one, divides=divides
        )
    if device != "cpu" and torch.cuda.mem_get_info()[0] > _ROOM:
        yield _far_apart(device, generator)


def _far_apart(device: str, generator: torch.Generator) -> Case:
    """Rows whose offsets do not fit 32 bits: a few columns of a buffer of 2.4 GB."""
    rows, columns, stride = 3000, 512, 800_000
    packed, scales, global_scale = drawn((rows, columns), "student", generator, divides=False)
    apart = torch.zeros(rows * stride, dtype=torch.uint8, device=device).view(rows, stride)
    apart[:, : columns // 2] = packed
    name = f"rows {stride} bytes apart, {rows}x{columns}"
    return compared(name, apart[:, : columns // 2], scales, global_scale, divides=False)


def _all_codes(global_scale: float, device: str, *, divides: bool) -> Case:
    """A row for each of 256 block scales, NaN and signed ones too; in it all 256 pairs of codes."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).reshape(-1, 1).repeat(1, 512 // BLOCK)
    name = f"all pairs of codes x 256 block scales, global {global_scale:g}, {_NAMES[divides]}"
    one = torch.tensor(global_scale, dtype=torch.float32, device=device)
    return compared(name, packed.to(device), scales.to(device), one, divides=divides)


def drawn(
    shape: tuple[int, ...], tails: str, generator: torch.Generator, *, divides: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights as in a release: codes, block scales and global ones. Outlier channels are
    eight times the others; a few block scales are NaN."""
    device = generator.device
    weight = torch.randn(shape, generator=generator, device=device) * 0.02
    if tails == "student":
        square = sum(torch.randn(shape, generator=generator, device=device) ** 2 for _ in range(4))
        weight = weight * (4 / square) ** 0.5  # Student's t, 4 degrees of freedom
    weight[..., :: max(2, shape[-1] // 16)] *= 8
    amax = weight.abs().amax((-2, -1)).clamp_min(2.0**-20)
    global_scale = 2688 / amax if divides else amax / 2688
    unit = (1 / global_scale if divides else global_scale)[..., None, None]
    blocks = weight.reshape(*shape[:-1], -1, BLOCK)
    stored = (blocks.abs().amax(-1) / 6 / unit).clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
    sizes = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=device)
    step = (stored.float() * unit)[..., None]
    codes = torch.bucketize((blocks.abs() / step).contiguous(), sizes) | (blocks < 0).int() * 8
    pairs = codes.reshape(*shape[:-1], -1, 2).to(torch.uint8)
    packed = pairs[..., 0] | pairs[..., 1] << 4
    scales = stored.view(torch.uint8)
    scales.view(-1)[:: max(7, scales.numel() // 5)] = 0x7F
    return packed, scales, global_scale.float()
