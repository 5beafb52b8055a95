"""AMXINT4 and AMXINT8 tiles -> the float32 weights they mean, in a Triton kernel.

The kernel computes for each weight which byte holds it; the reference goes the other way and computes
for each byte (or half) which weight it holds. The byte order is that of kt-kernel 0.7.2: blocks of STEP
rows, in them blocks of 3584 columns, in them tiles of 32 rows, in them steps of STEP columns, in them
two halves of 16 rows, each 16 words x 16 rows x 4 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import triton
import triton.language as tl

from qconvert.core.dtypes import ceil_div
from qconvert.validators.kernels.device import Case, bitwise
from qconvert.validators.reading.amx import Method, tile_floats

# Written out here, not taken from the format's module, whose constants are checked too.
STEP: dict[str, int] = {"int4": 128, "int8": 64}
K_BLOCK = 3584
# Rows and columns a program works on. In the interpreter a program is expensive, an element cheap.
_TILE = {"cuda": (32, 128), "cpu": (64, 1024)}


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(
    packed: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    out_row: tl.tensor,
    INT4: tl.constexpr,
    STEP: tl.constexpr,
    K_BLOCK: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """A tile of out[row, k] = code * step, the step being scale (int8) or 16 * scale (int4)."""
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    k = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = (row < rows)[:, None] & (k < columns)[None, :]
    first = k // K_BLOCK * K_BLOCK
    count = (tl.minimum(first + K_BLOCK, columns) - first) // STEP
    # In every step, 64 bytes of each row.
    of_row = (row // STEP * STEP * (columns // STEP) * 64 + row % 32 // 16 * 1024 + row % 16 * 4)[
        :, None
    ]
    tile = (row % STEP // 32)[:, None] * (count * 2048)[None, :]
    in_step = k % 64
    of_column = (
        first // STEP * STEP * 64 + (k - first) // STEP * 2048 + in_step // 4 * 64 + in_step % 4
    )
    at = of_row + tile + of_column[None, :]
    byte = tl.load(packed + at, mask=inside, other=0).to(tl.int32)
    step = tl.load(scales + row, mask=row < rows, other=0.0)
    if INT4:
        high = (k % 128 >= 64).to(tl.int32)
        code = (byte >> (4 * high)[None, :]) & 15
        code = tl.where(code > 7, code - 16, code)
        step = step * 16.0
    else:
        code = tl.where(byte > 127, byte - 256, byte)
    value = code.to(tl.float32) * step[:, None]
    tl.store(out + row[:, None] * out_row + k[None, :], value, mask=inside)


def unpacked(
    method: Method,
    packed: torch.Tensor,
    scales: torch.Tensor,
    columns: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """packed uint8 [N * K * bits / 8] and scales float32 [N] -> float32 [N, K] by the kernel, into
    `out` (whose rows may be strided) where given. Raises ValueError where sizes do not fit."""
    rows, step = scales.numel(), STEP[method]
    bits = 4 if method == "int4" else 8
    if rows % step or columns % step or packed.numel() * 8 != rows * columns * bits:
        raise ValueError(f"{packed.numel()} bytes are not an {method} matrix of {rows} x {columns}")
    if out is None:
        out = torch.empty((rows, columns), dtype=torch.float32, device=packed.device)
    tall, wide = _TILE[packed.device.type]
    wide = min(wide, triton.next_power_of_2(columns))
    tiles = ceil_div(rows, tall), ceil_div(columns, wide)
    with np.errstate(all="ignore"):
        _unpack[tiles](
            packed, scales, out, rows, columns, out.stride(0), INT4=method == "int4", STEP=step,
            K_BLOCK=K_BLOCK, TALL=tall, WIDE=wide,
        )  # fmt: skip
    return out


def reference(
    method: Method, packed: torch.Tensor, scales: torch.Tensor, columns: int
) -> torch.Tensor:
    """The same in torch, from each byte's place in the file."""
    row, column = positions(method, scales.numel(), columns, packed.device)
    out = torch.empty((scales.numel(), columns), dtype=torch.float32, device=packed.device)
    if method == "int8":
        out[row, column] = packed.view(torch.int8).float()
        return out * scales[:, None]
    signed = packed.view(torch.int8)
    out[row, column] = ((signed << 4) >> 4).float()
    out[row, column + 64] = (signed >> 4).float()
    return out * (scales * 16)[:, None]


def positions(
    method: Method, rows: int, columns: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each byte's weight; in int4 those of its low half, whose other half lies 64
    columns on."""
    step = STEP[method]
    width = columns // step * 64  # bytes of a row
    at = torch.arange(rows * width, device=device)
    band, at = at // (step * width), at % (step * width)
    long = step * (K_BLOCK // step) * 64  # bytes of a band in a whole block of columns
    block, at = at // long, at % long
    steps = (columns // step - block * (K_BLOCK // step)).clamp_max(K_BLOCK // step)
    tile, at = at // (32 * 64 * steps), at % (32 * 64 * steps)
    number, at = at // 2048, at % 2048
    half, word, line, byte = at // 1024, at % 1024 // 64, at % 64 // 4, at % 4
    row = band * step + tile * 32 + half * 16 + line
    return row, block * K_BLOCK + number * step + word * 4 + byte


def compared(
    name: str,
    method: Method,
    packed: torch.Tensor,
    scales: torch.Tensor,
    found: torch.Tensor,
) -> Iterator[Case]:
    """What the kernel found against both other ways to read the same bytes: torch's here, and
    numpy's in qconvert.validators.reading.amx."""
    columns = found.shape[1]
    yield bitwise(f"{name}, torch", found, reference(method, packed, scales, columns))
    host = tile_floats(method, packed.cpu().numpy(), scales.cpu().numpy(), columns)
    yield bitwise(f"{name}, numpy", found.cpu(), torch.from_numpy(host))


# --- random weights ------------------------------------------------------------------------------

_SMALL = ((128, 128), (256, 384), (128, 3584 + 256))
_REAL = (
    (128, 128), (768, 2048), (2048, 768), (1536, 4096), (4096, 1536), (7168, 2048), (2048, 7168),
    (1024, 3584), (1024, 3712), (128, 4 * 3584),
)  # fmt: skip


def random_cases(device: str) -> Iterator[Case]:
    """Any bytes with extreme scales, then weights quantized from gaussian and heavy-tailed ones, with
    outlier rows; K over one block of columns and over several, and a strided result."""
    generator = torch.Generator(device).manual_seed(0)
    methods: tuple[Method, ...] = ("int4", "int8")
    for method in methods:
        for rows, columns in _SMALL if device == "cpu" else _REAL:
            shape = f"{method} {rows}x{columns}"
            for tails in ("any bytes", "gaussian", "student"):
                packed, scales = drawn(method, rows, columns, tails, generator)
                found = unpacked(method, packed, scales, columns)
                yield from compared(f"{tails} {shape}", method, packed, scales, found)
        packed, scales = drawn(method, 128, 128, "any bytes", generator)
        yield _strided(method, packed, scales)
    if device != "cpu":
        yield _far_apart(device, generator)


def _far_apart(device: str, generator: torch.Generator) -> Case:
    """Rows of the result whose offsets do not fit 32 bits: some columns of a buffer of 9.8 GB."""
    rows, columns, stride = 3072, 128, 800_000
    packed, scales = drawn("int4", rows, columns, "student", generator)
    spare = torch.zeros(rows * stride, dtype=torch.float32, device=device).view(rows, stride)
    found = unpacked("int4", packed, scales, columns, spare[:, :columns])
    wanted = reference("int4", packed, scales, columns)
    return bitwise(f"rows {stride} elements apart, int4 {rows}x{columns}", found, wanted)


def _strided(method: Method, packed: torch.Tensor, scales: torch.Tensor) -> Case:
    """Two shards into one matrix, side by side, as down's NUMA shards stand."""
    both = torch.zeros((128, 256), dtype=torch.float32, device=packed.device)
    for shard in range(2):
        part = both[:, 128 * shard : 128 * (shard + 1)]
        unpacked(method, packed.flip(0) if shard else packed, scales, 128, part)
    wanted = [reference(method, p, scales, 128) for p in (packed, packed.flip(0))]
    return bitwise(f"{method}, two shards of 128x128 side by side", both, torch.cat(wanted, 1))


def drawn(
    method: Method, rows: int, columns: int, tails: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in the format, built byte by byte from `positions`: packed uint8 and scales.
    `any bytes` are all codes, -8 and -128 too, with scales from zero and denormal to huge."""
    if tails == "any bytes":
        size = rows * columns * (4 if method == "int4" else 8) // 8
        packed = torch.randint(
            0, 256, (size,), generator=generator, dtype=torch.uint8, device=generator.device
        )
        scales = torch.rand(rows, generator=generator, device=generator.device) + 0.5
        scales[1::8], scales[2::8], scales[3::8], scales[4::8] = 0.0, 1e-40, 3e37, 2.0**-130
        return packed, scales
    weight = torch.randn((rows, columns), generator=generator, device=generator.device)
    if tails == "student":
        square = sum(
            torch.randn((rows, columns), generator=generator, device=generator.device) ** 2
            for _ in range(4)
        )
        weight = weight * (4 / square) ** 0.5  # Student's t, 4 degrees of freedom
    weight[:: max(2, rows // 16)] *= 8
    weight[:, :: max(2, columns // 16)] *= 8
    largest = 7 if method == "int4" else 127
    step = weight.abs().amax(1) / largest
    codes = (weight / step[:, None]).round().to(torch.int8)
    row, column = positions(method, rows, columns, weight.device)
    if method == "int8":
        return codes[row, column].view(torch.uint8), step
    low, high = codes[row, column] & 15, codes[row, column + 64] << 4
    return (low | high).view(torch.uint8), step / 16
