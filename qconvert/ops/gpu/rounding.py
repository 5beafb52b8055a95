"""What kernels of searches have in common: bf16 and fp16 rounded on integers, and whole numbers.

Products and sums must not be fused (`OPTIONS`), or bytes are not numpy's."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OPTIONS = {} if INTERPRETED else {"enable_fp_fusion": False}


@triton.jit  # type: ignore[untyped-decorator]
def bf16(value: tl.tensor) -> tl.tensor:
    """To a number of bf16, ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def f16(value: tl.tensor) -> tl.tensor:
    """A number above 0 to the nearest of fp16, ties to even: multiples of 2^-24 below 2^-14."""
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & -8192
    small = (value + 0.75) - 0.75
    return tl.where(value < 0.00006103515625, small, bits.to(tl.float32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def held(value: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    if DTYPE == 0:
        return bf16(value)
    if DTYPE == 1:
        return f16(value)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def whole(value: tl.tensor) -> tl.tensor:
    return (value + 12582912.0) - 12582912.0


@triton.jit  # type: ignore[untyped-decorator]
def from_bf16(bits: tl.tensor) -> tl.tensor:
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
