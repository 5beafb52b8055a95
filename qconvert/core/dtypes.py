"""The type of a tensor before any byte of it is read: a dtype and a shape.

The dtype names are those of the safetensors format (safetensors 0.8, `safetensors/src/tensor.rs`,
enum `Dtype`). Standard library only: planning must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Protocol

from qconvert.core.errors import PlanError

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

# Floats of 8 bits that are codes of weights.
FP8_DTYPES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorType:
    """A dtype (safetensors spelling) and a shape.

    Raises PlanError for an unknown dtype, a negative dimension, or a sub-byte tensor whose bits do
    not fill whole bytes.
    """

    dtype: str
    shape: Shape
    # Size in bytes, sub-byte dtypes packed. Asked for some 25 times a tensor while planning.
    nbytes: int = field(init=False, repr=False, compare=False)
    # Asked for by every cache of what types are read as; strings hash anew in each process.
    _hash: int = field(init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorType, (self.dtype, self.shape)

    def __post_init__(self) -> None:
        bits = DTYPE_BITS.get(self.dtype)
        if bits is None:
            raise PlanError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BITS)}")
        if self.shape and min(self.shape) < 0:
            raise PlanError(f"shape {list(self.shape)} has a negative dimension")
        size, rest = divmod(prod(self.shape) * bits, 8)
        if rest:
            raise PlanError(f"{self} does not fill whole bytes: {prod(self.shape)} x {bits} bits")
        object.__setattr__(self, "nbytes", size)
        object.__setattr__(self, "_hash", hash((self.dtype, self.shape)))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.shape)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one index of the first dimension.

        Raises PlanError if a row does not start on a byte (a packed sub-byte row).
        """
        if not self.shape:
            raise PlanError(f"{self} is a scalar and has no rows")
        bits = prod(self.shape[1:]) * DTYPE_BITS[self.dtype]
        if bits % 8:
            raise PlanError(f"rows of {self} do not start on whole bytes")
        return bits // 8

    def with_shape(self, shape: Shape) -> TensorType:
        """The same bytes under another shape of equal element count, else PlanError."""
        if prod(shape) != self.numel:
            raise PlanError(f"{self} cannot be reshaped to {list(shape)}")
        return known_type(self.dtype, shape)

    def with_rows(self, rows: int) -> TensorType:
        """The same dtype and inner dimensions with another first dimension."""
        return known_type(self.dtype, (rows, *self.shape[1:]))

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


class Typed(Protocol):
    """Object with a type, as the tensor of a shard and an output have."""

    @property
    def type(self) -> TensorType: ...


class TypesOf(Mapping[str, TensorType]):
    """The types of tensors by name, without a table of their own: one of Kimi-K2's tiles takes 10 MB."""

    def __init__(self, tensors: Mapping[str, Typed]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> TensorType:
        return self._tensors[name].type

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)


@lru_cache(maxsize=4096)
def known_type(dtype: str, shape: Shape) -> TensorType:
    """One object for each type: those cut from Kimi-K2's experts are 184,000, of four types (26 MB).
    Raises PlanError as TensorType does."""
    return TensorType(dtype, shape)


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b, for a >= 0 and b > 0."""
    return -(-a // b)
