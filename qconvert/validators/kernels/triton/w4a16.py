"""Tokens times packed INT4 experts, as GPU kernels of the W4A16 kind compute them, in Triton: weights
are unpacked and scaled in the kernel, products are summed in float32.

Format: compressed-tensors 0.19 `pack-quantized`, symmetric: eight codes a word, the first in its lowest
bits, each stored plus 8; one scale for each group of columns in a row.

The bound. A code times a scale is the same float32 in kernel and reference, so all that may differ is
rounding in the sum y of K products. Summed in any order it is off by at most K * 2^-24 of
|x| |W| = sum of |x_k w_k|; errors that do not all go the same way add up to about sqrt(K) of them
(Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019). Held here is
4 * sqrt(K) * 2^-24 of |x| |W|, against a sum in float64, whose own error does not show. One wrong
code moves a sum over 2048 columns by some 1e-4 of |x| |W|; the bound there is 1.1e-5. TF32 products
would be off by 2^-11 each, and do not fit either.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

import torch
import triton
import triton.language as tl

from qconvert.core.dtypes import ceil_div
from qconvert.validators.kernels.device import Case
from qconvert.validators.reading.decode import int4_floats

# Tokens and rows a program works on, and columns at a time. In the interpreter a program is expensive,
# an element cheap.
_TILE = {"cuda": (16, 64, 32), "cpu": (64, 256, 128)}


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(
    x: tl.tensor,
    packed: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    x_row: tl.tensor,
    packed_row: tl.tensor,
    scale_row: tl.tensor,
    out_row: tl.tensor,
    GROUP: tl.constexpr,
    SHIFT_SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """A tile [TOKENS, TALL] of out = x @ W.T, along all columns. Scales are float32 or float16, or,
    where SHIFT_SCALE, bf16 as int16 bits."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1).to(tl.int64) * TALL + tl.arange(0, TALL)
    total = tl.zeros((TOKENS, TALL), dtype=tl.float32)
    for start in range(0, columns, WIDE):
        k = start + tl.arange(0, WIDE)
        mine = (token < tokens)[:, None] & (k < columns)[None, :]
        inputs = tl.load(x + token[:, None] * x_row + k[None, :], mask=mine, other=0.0)
        inside = (k < columns)[:, None] & (row < rows)[None, :]
        word = tl.load(packed + row[None, :] * packed_row + (k // 8)[:, None], mask=inside, other=0)
        code = ((word >> (k % 8 * 4)[:, None]) & 15) - 8
        stored = tl.load(
            scales + row[None, :] * scale_row + (k // GROUP)[:, None], mask=inside, other=0
        )
        if SHIFT_SCALE:
            scale = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            scale = stored.to(tl.float32)
        weight = code.to(tl.float32) * scale
        total += tl.dot(inputs.to(tl.float32), weight, input_precision="ieee")
    outside = (token < tokens)[:, None] & (row < rows)[None, :]
    tl.store(out + token[:, None] * out_row + row[None, :], total, mask=outside)


def product(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int
) -> torch.Tensor:
    """x [T, K] (float32, float16, bfloat16), packed int32 [N, K/8], scales [N, K/group] (the same
    dtypes) -> float32 [T, N] by the kernel. Rows of each may be strided. Raises ValueError where
    shapes do not fit or columns do not lie side by side."""
    (tokens, columns), rows = x.shape, packed.shape[0]
    if packed.shape[1] * 8 != columns or tuple(scales.shape) != (rows, columns // group):
        raise ValueError(
            f"expected packed [N, {columns // 8}] and scales [N, {columns // group}] for x "
            f"{list(x.shape)} in groups of {group}, found {list(packed.shape)} and "
            f"{list(scales.shape)}"
        )
    if any(tensor.stride(-1) != 1 for tensor in (x, packed, scales)):
        raise ValueError("columns must be adjacent in memory")
    shift = scales.dtype == torch.bfloat16
    factors = scales.view(torch.int16) if shift else scales
    out = torch.empty((tokens, rows), dtype=torch.float32, device=x.device)
    high, tall, wide = _TILE[x.device.type]
    high = min(high, max(16, triton.next_power_of_2(tokens)))
    _multiply[ceil_div(tokens, high), ceil_div(rows, tall)](
        x, packed, factors, out, tokens, rows, columns, x.stride(0), packed.stride(0),
        factors.stride(0), out.stride(0), GROUP=group, SHIFT_SCALE=shift,
        TOKENS=high, TALL=tall, WIDE=wide,
    )  # fmt: skip
    return out


def reference(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product, and |x| |W|, both float64 [T, N] in torch, over codes decoded on the
    host."""
    words, factors = packed.cpu().contiguous().numpy(), scales.cpu().float().contiguous().numpy()
    codes = int4_floats(words.view("u1").reshape(-1)).reshape(*factors.shape, group)
    weight = torch.from_numpy(codes * factors[:, :, None]).reshape(words.shape[0], -1)
    weight = weight.to(x.device).double()
    wide = x.double()
    return wide @ weight.T, wide.abs() @ weight.abs().T


def bound(columns: int) -> float:
    """Of |x| |W|, how far a sum over so many columns may be off; see the top of this file."""
    return 4 * sqrt(columns) * 2.0**-24


def compared(
    name: str, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, group: int
) -> Case:
    """Kernel and reference on the same tokens and weights: the largest error, as a part of
    |x| |W|."""
    return judged(name, product(x, packed, scales, group), *reference(x, packed, scales, group),
                  x.shape[1])  # fmt: skip


def judged(
    name: str, found: torch.Tensor, expected: torch.Tensor, size: torch.Tensor, columns: int
) -> Case:
    """A product's case, `size` being |x| |W|."""
    error = (found.double() - expected).abs() / size.clamp_min(2.0**-1000)
    return Case(name, float(error.max().item()), bound(columns))


# --- random weights ------------------------------------------------------------------------------

_ROOM = 16 << 30  # bytes of GPU memory that offsets past 32 bits take to try
_SMALL = ((72, 256), (64, 128))
_REAL = ((768, 2048), (2048, 768), (1536, 4096), (7168, 2048), (2048, 7168))
_COUNTS = (1, 2, 7, 129)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def random_cases(device: str) -> Iterator[Case]:
    """Tokens 1, 2, 7 and 129 in each dtype, groups of 32 and 128, gaussian and heavy-tailed weights
    and tokens with channels that stand out; scales in each dtype; strided rows."""
    generator = torch.Generator(device).manual_seed(0)
    for rows, columns in _SMALL if device == "cpu" else _REAL:
        for group in (32, 128):
            for tails in ("gaussian", "student"):
                packed, scales = drawn(rows, columns, group, tails, generator)
                for count in _COUNTS:
                    for kind, dtype in _DTYPES.items():
                        x = tokens(count, columns, generator).to(dtype)
                        name = f"{tails} {rows}x{columns} groups of {group}, {count} tokens {kind}"
                        yield compared(name, x, packed, scales, group)
    packed, scales = drawn(64, 256, 32, "student", generator)
    x = tokens(7, 256, generator)
    for kind, dtype in _DTYPES.items():
        name = f"student 64x256 groups of 32, scales {kind}"
        yield compared(name, x, packed, scales.to(dtype), 32)
    yield compared(
        "strided rows, the first 128 columns of 64x256",
        x[:, :128], packed[:, :16], scales[:, :4], 32,
    )  # fmt: skip
    if device != "cpu" and torch.cuda.mem_get_info()[0] > _ROOM:
        yield _far_apart(device, generator)


def _far_apart(device: str, generator: torch.Generator) -> Case:
    """Rows whose offsets do not fit 32 bits: a few columns of a buffer of 9.6 GB."""
    rows, columns, stride = 3000, 512, 800_000
    packed, scales = drawn(rows, columns, 128, "student", generator)
    apart = torch.zeros(rows * stride, dtype=torch.int32, device=device).view(rows, stride)
    apart[:, : columns // 8] = packed
    name = f"rows {stride} words apart, {rows}x{columns}"
    x = tokens(7, columns, generator)
    return compared(name, x, apart[:, : columns // 8], scales, 128)


def tokens(count: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Activations like those of models, float32 [T, K]: gaussian, a few channels far above the
    others."""
    x = torch.randn((count, columns), generator=generator, device=generator.device)
    x[:, :: max(2, columns // 8)] *= 20
    return x


def drawn(
    rows: int, columns: int, group: int, tails: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed int32 [N, K/8] and scales bf16 [N, K/group] of both signs. All codes -8 to 7 occur."""
    weight = torch.randn((rows, columns), generator=generator, device=generator.device)
    if tails == "student":
        square = sum(
            torch.randn((rows, columns), generator=generator, device=generator.device) ** 2
            for _ in range(4)
        )
        weight = weight * (4 / square) ** 0.5  # Student's t, 4 degrees of freedom
    weight[:, :: max(2, columns // 16)] *= 8
    groups = weight.reshape(rows, -1, group)
    scales = (groups.abs().amax(-1) / 7.5).clamp_min(2.0**-20).to(torch.bfloat16)
    signs = torch.randint(0, 2, scales.shape, generator=generator, device=generator.device)
    scales *= 1 - 2 * signs
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).to(torch.int64) + 8
    words = codes.reshape(rows, -1, 8)
    packed = sum(words[..., place] << (4 * place) for place in range(8))
    assert isinstance(packed, torch.Tensor)
    return packed.to(torch.int32), scales
