"""Bytes that no source holds: small tensors a format requires, such as `weight_shape`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import pack, unpack

from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.core.graph import Buffer
from qconvert.ops.base import Exact, Uncut


@dataclass(frozen=True, slots=True)
class Constant(Uncut, Exact):
    """Nothing -> `dtype` `shape`, whose little-endian bytes are `hex`. (As text, because an op's repr
    is its identity.) Raises PlanError if the digits are not bytes or have another length."""

    dtype: str
    shape: tuple[int, ...]
    hex: str

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        if args:
            raise PlanError(f"expected no arguments for a constant, found {len(args)}")
        kind = TensorType(self.dtype, self.shape)
        try:
            size = len(bytes.fromhex(self.hex))
        except ValueError as error:
            raise PlanError(f"expected hexadecimal bytes for {kind}, found {self.hex!r}") from error
        if size != kind.nbytes:
            raise PlanError(f"expected {kind.nbytes} bytes for {kind}, found {size}")
        return (kind,)

    def numbers(self) -> tuple[int, ...]:
        """The elements of an I64 constant."""
        assert self.dtype == "I64"
        return unpack(f"<{TensorType(self.dtype, self.shape).numel}q", bytes.fromhex(self.hex))

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        outs[0].data[:] = bytes.fromhex(self.hex)
        return {}


def constant_i64(values: tuple[int, ...]) -> Constant:
    """I64 [len(values)]. Raises PlanError for a value that does not fit."""
    for value in values:
        if not -(1 << 63) <= value < 1 << 63:
            raise PlanError(f"expected signed 64-bit values, found {value}")
    return Constant("I64", (len(values),), pack(f"<{len(values)}q", *values).hex())


def constant_f32(value: float, shape: tuple[int, ...]) -> Constant:
    """F32 `shape` of one element."""
    return Constant("F32", shape, pack("<f", value).hex())
