"""Bytes that no source holds: small tensors a format requires, such as `weight_shape`; and changed
elements put in the place of old ones: a chunk and its blob (checkpoint/delta.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import pack, unpack

import xxhash

from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import PlanError, RunError
from qconvert.core.graph import Buffer
from qconvert.ops.base import Exact, Uncut, array


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


@dataclass(frozen=True, slots=True)
class Zeros(Uncut, Exact):
    """Nothing -> zeros: rows that a runtime adds to a table."""

    type: TensorType

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        return (self.type,)

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        outs[0].data[:] = bytes(self.type.nbytes)
        return {}


@dataclass(frozen=True, slots=True)
class Patch(Uncut, Exact):
    """U8 [n], the old bytes, and U8 [m], their blob -> U8 [n], the new bytes. `element` is the width of
    an element, `changed` how many change, in blocks of `block` elements; `old` and `new` are xxh3-128 of
    the bytes before and after.

    Raises PlanError for sizes that do not fit, RunError where the bytes are not the old ones, or do not
    become the new ones.
    """

    element: int
    changed: int
    block: int
    old: str
    new: str

    def infer(self, *args: TensorType) -> tuple[TensorType, ...]:
        whole, blob = args
        wanted = min(whole.nbytes, 4 * self._blocks(whole) + self.changed * (2 + self.element))
        if whole.nbytes % self.element or blob.nbytes != wanted:
            raise PlanError(
                f"expected a blob of {wanted} bytes for {self.changed} elements, found {blob}"
            )
        return (whole,)

    def _blocks(self, whole: TensorType) -> int:
        return ceil_div(whole.nbytes // self.element, self.block)

    def run(
        self, ins: Sequence[Buffer], outs: Sequence[Buffer], scratch: memoryview
    ) -> Mapping[str, int]:
        whole, blob = ins[0].data, ins[1].data
        if xxhash.xxh3_128_hexdigest(whole) != self.old:
            raise RunError(
                "its bytes are not those that the delta was made of; name the checkpoint that `qconvert "
                "delta` compared"
            )
        if blob.nbytes == whole.nbytes:  # the new bytes themselves
            outs[0].data[:] = blob
        else:
            outs[0].data[:] = whole
            self._put(outs[0].data, blob)
        if xxhash.xxh3_128_hexdigest(outs[0].data) != self.new:
            raise RunError("its patched bytes are not the new tensor's; copy the delta again")
        return {}

    def _put(self, data: memoryview, blob: memoryview) -> None:
        """Write the changed elements over the old ones."""
        import numpy as np

        kind = np.dtype(f"u{self.element}").type
        made = array(data, kind, (data.nbytes // self.element,))
        blocks = ceil_div(made.size, self.block)
        counts = array(blob[: 4 * blocks], np.uint32, (blocks,))
        ends = np.cumsum(counts, dtype=np.int64)
        if int(ends[-1]) != self.changed:
            raise RunError(
                f"its blob counts {ends[-1]} elements, expected {self.changed}; copy the delta again"
            )
        split = 4 * blocks + 2 * self.changed
        offsets = array(blob[4 * blocks : split], np.uint16, (self.changed,))
        values = np.frombuffer(blob[split:], kind)
        start = 0
        for number, end in enumerate(ends.tolist()):
            part = made[number * self.block : (number + 1) * self.block]
            places = offsets[start:end]
            if end > start and int(places.max()) < part.size:
                part[places] = values[start:end]
            start = end
