"""Fused linear-attention projections: a GEMM, and the kernel that splits its result.

What runtimes do with a fused `in_proj_qkvz` and `in_proj_ba`: one GEMM each, then one kernel that
splits, reorders and joins their columns into `mixed_qkv` (q | k | v, the input of the convolution), `z`,
`b` and `a`. Fused columns come in G groups (qconvert.core.row_order): G = 1 as Qwen3.5's class in sglang
takes them, G = key heads as Qwen3-Next's checkpoints hold them (transformers,
models/qwen3_next/modeling_qwen3_next.py, `fix_query_key_value_ordering`), any other too.

Rows may be strided: `mixed` is often a view into the result of a larger GEMM, and a kernel that takes
it for dense is right for the first token alone. Offsets are 64-bit: 2^31 elements are 131,072 tokens of
Qwen3.5-397B's 20,480 columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl

from qconvert.validators.kernels.device import Case, bitwise


@dataclass(frozen=True, slots=True)
class Heads:
    """Key heads, value heads and the columns of each."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @property
    def segments(self) -> tuple[int, int, int, int]:
        """Columns of q, k, v and z."""
        k, v = self.keys * self.key_dim, self.values * self.value_dim
        return k, k, v, v

    def __str__(self) -> str:
        return f"{self.keys}x{self.key_dim} keys, {self.values}x{self.value_dim} values"


# Qwen3-Next-80B and Qwen3.5-35B-A3B; Qwen3.5-397B-A17B; Qwen3.5-27B (config.json of each).
HEADS_35B = Heads(16, 32, 128, 128)
HEADS_397B = Heads(16, 64, 128, 128)
HEADS_27B = Heads(16, 48, 128, 128)

# Columns and elements that a program copies. Of 128 to 2048 columns, 2048 to 16384 elements and 2 to 8
# warps these came nearest to the copy bandwidth of an H200, 98.6 % or more in all shapes measured.
_WIDEST = 128
_COPIED = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _split_kernel(
    qkvz: tl.tensor,
    ba: tl.tensor,
    qkv: tl.tensor,
    z: tl.tensor,
    b: tl.tensor,
    a: tl.tensor,
    tokens: tl.tensor,
    stride_qkvz: tl.tensor,
    stride_ba: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    NV: tl.constexpr,
    G: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SMALL: tl.constexpr,
) -> None:
    """Program (c, t): tokens t * ROWS and on; WIDTH columns, within one group's share of a segment:
    first of mixed_qkv, then of z. The last c moves b and a."""
    column = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    alive = (token < tokens)[:, None]
    QKV: tl.constexpr = 2 * K + V
    GROUP: tl.constexpr = 2 * (K + V) // G
    OF_QKV: tl.constexpr = QKV // WIDTH
    OF_Z: tl.constexpr = V // WIDTH
    lane = tl.arange(0, WIDTH)[None, :]
    if column < OF_QKV:
        # q, k and v in turn: where the segment begins in mixed_qkv and in a group, and its share.
        run = column
        in_k = (run >= K // WIDTH) & (run < 2 * K // WIDTH)
        in_v = run >= 2 * K // WIDTH
        within = run - tl.where(in_v, 2 * K // WIDTH, tl.where(in_k, K // WIDTH, 0))
        share = tl.where(in_v, V // G // WIDTH, K // G // WIDTH)
        first = tl.where(in_v, 2 * K // G // WIDTH, tl.where(in_k, K // G // WIDTH, 0))
        begin = (within // share * (GROUP // WIDTH) + first + within % share) * WIDTH
        value = tl.load(qkvz + token[:, None] * stride_qkvz + begin + lane, mask=alive)
        tl.store(qkv + token[:, None] * QKV + run * WIDTH + lane, value, mask=alive)
    elif column < OF_QKV + OF_Z:
        run = column - OF_QKV
        SHARE_Z: tl.constexpr = V // G // WIDTH
        begin = run // SHARE_Z * GROUP + (2 * K + V) // G + run % SHARE_Z * WIDTH
        value = tl.load(qkvz + token[:, None] * stride_qkvz + begin + lane, mask=alive)
        tl.store(z + token[:, None] * V + run * WIDTH + lane, value, mask=alive)
    else:
        SHARE: tl.constexpr = NV // G
        head = tl.arange(0, SMALL)[None, :]
        there = alive & (head < NV)
        source = ba + token[:, None] * stride_ba + head // SHARE * (2 * SHARE) + head % SHARE
        target = token[:, None] * NV + head
        tl.store(b + target, tl.load(source, mask=there), mask=there)
        tl.store(a + target, tl.load(source + SHARE, mask=there), mask=there)


@dataclass(frozen=True)
class Mixed:
    """The inputs of attention: `qkv` [T, 2K + V], `z` [T, V], `b` and `a` [T, value heads], dense."""

    qkv: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor


def split(qkvz: torch.Tensor, ba: torch.Tensor, heads: Heads, groups: int) -> Mixed:
    """Fused [T, 2K + 2V] and [T, 2 nv] in `groups` groups, rows of any stride -> Mixed. Any dtype."""
    tokens = qkvz.shape[0]
    keys, _, values, _ = heads.segments
    assert qkvz.shape == (tokens, 2 * (keys + values)), tuple(qkvz.shape)
    assert ba.shape == (tokens, 2 * heads.values), tuple(ba.shape)
    assert qkvz.stride(1) == ba.stride(1) == 1
    assert heads.keys % groups == 0 == heads.values % groups
    made = [
        torch.empty(tokens, columns, dtype=qkvz.dtype, device=qkvz.device)
        for columns in (2 * keys + values, values, heads.values, heads.values)
    ]
    common = gcd(keys // groups, values // groups)
    width = min(_WIDEST, common & -common)
    rows = max(1, _COPIED // width)
    programs = (2 * keys + 2 * values) // width + 1
    _split_kernel[programs, -(-tokens // rows)](
        qkvz, ba, *made, tokens, qkvz.stride(0), ba.stride(0),
        K=keys, V=values, NV=heads.values, G=groups, WIDTH=width, ROWS=rows,
        SMALL=triton.next_power_of_2(heads.values), num_warps=4,
    )  # fmt: skip
    return Mixed(*made)


def split_reference(qkvz: torch.Tensor, ba: torch.Tensor, heads: Heads, groups: int) -> Mixed:
    """The same with torch's view and split, a group at a time as Qwen3-Next's class has heads."""
    tokens = qkvz.shape[0]
    shares = [columns // groups for columns in heads.segments]
    q, k, v, z = (
        part.reshape(tokens, -1)
        for part in torch.functional.split(qkvz.reshape(tokens, groups, -1), shares, dim=2)
    )
    b, a = (part.reshape(tokens, -1) for part in ba.reshape(tokens, groups, 2, -1).unbind(2))
    return Mixed(torch.cat([q, k, v], dim=1), z, b, a)


@triton.jit  # type: ignore[untyped-decorator]
def _project_kernel(
    x: tl.tensor,
    w: tl.tensor,
    y: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    hidden: tl.tensor,
    stride_x: tl.tensor,
    stride_w: tl.tensor,
    stride_y: tl.tensor,
    T: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
) -> None:
    """Tile [T tokens, N rows of w] of y = x @ w.T, summed in float32 along `hidden`, H at a time."""
    token = tl.program_id(1).to(tl.int64) * T + tl.arange(0, T)
    row = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    column = tl.arange(0, H)
    total = tl.zeros((T, N), dtype=tl.float32)
    for start in range(0, hidden, H):
        there = (start + column) < hidden
        left = tl.load(
            x + token[:, None] * stride_x + (start + column)[None, :],
            mask=(token < tokens)[:, None] & there[None, :],
            other=0.0,
        )
        right = tl.load(
            w + row[None, :] * stride_w + (start + column)[:, None],
            mask=(row < rows)[None, :] & there[:, None],
            other=0.0,
        )
        # In float32: the interpreter's product of bf16 is garbage, and the sum is the same.
        total += tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    there = (token < tokens)[:, None] & (row < rows)[None, :]
    tl.store(y + token[:, None] * stride_y + row[None, :], total, mask=there)


def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, H] @ weight [N, H].T -> float32 [T, N]. An element depends only on its token and its row,
    not on neighbouring rows."""
    tokens, hidden = x.shape
    rows = weight.shape[0]
    made = torch.empty(tokens, rows, dtype=torch.float32, device=x.device)
    grid = (-(-rows // 64), -(-tokens // 16))
    _project_kernel[grid](
        x, weight, made, tokens, rows, hidden, x.stride(0), weight.stride(0), made.stride(0),
        T=16, N=64, H=64,
    )  # fmt: skip
    return made


def fuse_rows(parts: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
    """Weights of the segments -> the fused weight in `groups` groups, by torch's own views."""
    columns = parts[0].shape[1]
    cut = [part.reshape(groups, -1, columns) for part in parts]
    return torch.cat(cut, dim=1).reshape(-1, columns)


def agree(
    name: str,
    x: torch.Tensor,
    apart: Sequence[torch.Tensor],
    fused: tuple[torch.Tensor, torch.Tensor],
    heads: Heads,
    groups: int,
    *,
    padding: int = 0,
) -> Iterator[Case]:
    """Weights q, k, v, z, b, a against fused qkvz and ba on tokens x: the kernel that takes apart
    against torch, bitwise; the projections of both against each other, bitwise on a GPU, where the
    order of a sum does not depend on a row's place (the interpreter's, numpy's, does); and the GEMM
    against torch's. `padding` columns between rows make them strided."""
    qkvz, ba = (_strided(project(x, weight).to(x.dtype), padding) for weight in fused)
    made, expected = split(qkvz, ba, heads, groups), split_reference(qkvz, ba, heads, groups)
    for part in ("qkv", "z", "b", "a"):
        yield bitwise(f"{name}: split {part}", getattr(made, part), getattr(expected, part))
    q, k, v, z, b, a = (project(x, weight).to(x.dtype) for weight in apart)
    wanted = Mixed(torch.cat([q, k, v], dim=1), z, b, a)
    for part in ("qkv", "z", "b", "a"):
        found, expected_part = getattr(made, part), getattr(wanted, part)
        yield (bitwise if x.is_cuda else _close)(f"{name}: {part} of apart", found, expected_part)
    exact = x.double() @ fused[0].double().T
    off = _distance(project(x, fused[0]), exact)
    # A float32 sum of H products is off by sqrt(H) roundings of 2^-24 on average; H is below 2^13.
    yield Case(f"{name}: GEMM", off, 2.0**-17)


def _close(name: str, found: torch.Tensor, expected: torch.Tensor) -> Case:
    """A sum that differs in its last bit may round to the next bf16: 2^-8 of it. Other rows would be
    off by more than 1."""
    return Case(name, _distance(found, expected), 2.0**-8)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _strided(values: torch.Tensor, padding: int) -> torch.Tensor:
    """The same values, with padding after each row that holds other values."""
    if not padding:
        return values
    tokens, columns = values.shape
    spare = torch.full((tokens, columns + padding), 7, dtype=values.dtype, device=values.device)
    spare[:, :columns] = values
    return spare[:, :columns]


def random_cases(device: str) -> Iterator[Case]:
    """r from 1 to 8; tokens; dtypes; dense and strided; G of 1, 2 and the key heads. On a GPU with
    the sizes of real models too."""
    real = device != "cpu"
    dim, hidden, keys = (128, 512, 16) if real else (16, 64, 2)
    counts = (1, 2, 7, 129) if real else (1, 2, 7)
    for ratio in (1, 2, 3, 4, 8):
        heads = Heads(keys, keys * ratio, dim, dim)
        for index, tokens in enumerate(counts):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                for groups in sorted({1, 2, keys}):
                    # Strided and dense in turn here, both for each case on a GPU.
                    for padding in (0, 24) if real else ((0, 24)[(index + ratio) % 2],):
                        name = f"r={ratio} T={tokens} {_spell(dtype)} G={groups} +{padding}"
                        yield from _random(
                            name, heads, hidden, tokens, dtype, groups, padding, device
                        )
    if real:
        yield _far_apart(device)
        for hidden, heads in ((2048, HEADS_35B), (4096, HEADS_397B), (5120, HEADS_27B)):
            for groups in (1, heads.keys):
                name = f"{heads}, H={hidden} G={groups}"
                yield from _random(name, heads, hidden, 129, torch.bfloat16, groups, 0, device)


def _far_apart(device: str) -> Case:
    """Rows whose offsets do not fit 32 bits: some columns of a buffer of 4.8 GB."""
    heads, tokens, stride = Heads(4, 12, 32, 32), 3000, 800_000
    spare = torch.zeros(tokens * stride, dtype=torch.bfloat16, device=device).view(tokens, stride)
    columns = sum(heads.segments)
    mixed = spare[:, : columns + 2 * heads.values]
    mixed.copy_(torch.randn(tokens, mixed.shape[1], device=device))
    parts = mixed[:, :columns], mixed[:, columns:]
    found, wanted = split(*parts, heads, 4), split_reference(*parts, heads, 4)
    name = f"rows {stride} elements apart, T={tokens}"
    return bitwise(name, *(torch.cat([m.qkv, m.z, m.b, m.a], 1) for m in (found, wanted)))


def _random(
    name: str, heads: Heads, hidden: int, tokens: int, dtype: torch.dtype, groups: int, padding: int,
    device: str,
) -> Iterator[Case]:  # fmt: skip
    random = torch.Generator(device="cpu").manual_seed(tokens * 31 + heads.values)

    def values(rows: int) -> torch.Tensor:
        return _strided(torch.randn(rows, hidden, generator=random).to(dtype).to(device), padding)

    apart = [values(rows) for rows in (*heads.segments, heads.values, heads.values)]
    fused = (
        _strided(fuse_rows(apart[:4], groups), padding),
        _strided(fuse_rows(apart[4:], groups), padding),
    )
    yield from agree(name, values(tokens), apart, fused, heads, groups, padding=padding)


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
