"""Ways in which vLLM puts a tensor into a parameter, where it differs from what simulators share: a
rank's part is never filled up with zeros, and scales of blocks that a rank cuts are cut in silence.

Read in vLLM: `model_executor/parameter.py`, `layers/linear.py` (weight_loader_v2, which all
linears use), `layers/fused_moe/routed_experts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from qconvert.core.dtypes import Shape, TensorType
from qconvert.runtimes.loading.parameters import (
    Experts,
    Filled,
    Linear,
    Shard,
    asserted,
    broadcast,
    joined,
    narrowed,
    not_as_long,
    refused,
)


@dataclass(frozen=True, slots=True)
class LinearPart(Linear):
    """A parameter of a linear. `across`: the dimension of columns."""

    across: int = 1

    def _row(self, into: Shape, tensor: TensorType) -> Filled:
        shape = tensor.shape or (1,)
        silent = None
        if self.role in ("plain", "matrix", "block"):
            size = into[self.across]
            silent = not_as_long(shape, self.across, size, self.layout)
            shape = narrowed(tensor, shape, self.across, self.layout.rank * size, size)
        asserted(into, tensor, shape)
        return Filled({None: prod(into)}, silent)

    def _column(self, into: Shape, dtype: str, tensor: TensorType) -> Filled:
        shape = tensor.shape
        if self.role in ("tensor", "base"):
            asserted(into, tensor, shape or (1,))
            return Filled({None: prod(into)})
        silent = not_as_long(shape, 0, into[0], self.layout)
        shape = narrowed(tensor, shape, 0, self.layout.rank * into[0], into[0])
        asserted(into, tensor, shape)
        return Filled({None: prod(into)}, silent)

    def _fused(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled:
        """A tensor of several parts, or of all."""
        layout, every = self.layout, range(len(self.layout.outputs))
        chosen = [n for n in shard if isinstance(n, int)] if isinstance(shard, tuple) else [*every]
        if self.role == "tensor":
            return joined([self._part(into, tensor, tensor.shape, number) for number in chosen])
        if self.role == "base":
            asserted(into, tensor, tensor.shape)
            return Filled({None: prod(into)})
        # Shards of a tuple are numbered from 0 again, and fill the first parts.
        numbers: Sequence[int] = range(len(chosen))
        start, parts = 0, []
        for number, source in zip(numbers, chosen, strict=True):
            rows = layout.outputs[source]
            if layout.kind == "qkv" and number:
                rows //= layout.replicas
            size = -(-rows // self.block) if self.role == "block" else rows // self.packed
            shape = narrowed(tensor, tensor.shape, 0, start, size)
            parts.append(self._part(into, tensor, shape, number))
            start += size
        silent = next((part.silent for part in parts if part.silent), None)
        if tensor.shape[0] != start:
            silent = silent or f"expected {start} rows, found {tensor.shape[0]}"
        return Filled(joined(parts).parts, silent)

    def _part(self, into: Shape, tensor: TensorType, shape: Shape, shard: Shard) -> Filled:
        number = "qkv".index(shard) if isinstance(shard, str) else shard
        assert isinstance(number, int)
        layout = self.layout
        if self.role == "tensor":
            if shape and shape[0] != 1:
                raise refused("AssertionError", "", tensor, into, "expected one scale")
            asserted((), tensor, shape[1:])
            return Filled({number: 1})
        if self.role == "base":
            asserted(into, tensor, shape)
            return Filled({None: prod(into)})
        offset, size = self._place(number)
        place = narrowed(tensor, into, 0, offset, size)
        shared = layout.kind == "qkv" and number > 0
        rank = layout.rank // layout.replicas if shared else layout.rank
        part = narrowed(tensor, shape, 0, rank * size, size)
        asserted(place, tensor, part)
        ranks = layout.tp // layout.replicas if shared else layout.tp
        return Filled({number: prod(place)}, self._silent(number, shape, size, ranks))

    def _silent(self, number: int, shape: Shape, size: int, ranks: int) -> str | None:
        parts = self.layout.parts
        if self.role == "block":
            start, rows = sum(parts[:number]), parts[number]
            if start % self.block or (ranks > 1 and rows % self.block):
                return f"a rank's {rows} rows cut blocks of {self.block}"
        if shape[0] != size * ranks:
            return f"expected {size * ranks} rows, found {shape[0]}"
        return None

    def _place(self, number: int) -> tuple[int, int]:
        parts = self.layout.parts
        offset, size = sum(parts[:number]), parts[number]
        if self.role == "block":
            return -(-offset // self.block), -(-size // self.block)
        return offset // self.packed, size // self.packed


@dataclass(frozen=True, slots=True)
class ExpertPart(Experts):
    """A parameter of all experts of a rank. `finer`: how often a scale of a block is repeated along rows
    and columns, where ranks would cut the block."""

    finer: tuple[int, int] = (1, 1)

    def fill(self, into: Shape, dtype: str, tensor: TensorType, shard: Shard) -> Filled:
        assert isinstance(shard, tuple)
        if len(tensor.shape) == 2 and self.finer != (1, 1):
            rows, columns = tensor.shape
            tensor = replace(tensor, shape=(rows * self.finer[0], columns * self.finer[1]))
        if self.role == "tensor":
            slot = self.local(int(shard[0]))
            assert slot is not None
            if tensor.numel != 1:
                raise refused(
                    "RuntimeError", "is invalid for input of size", tensor, into, "no number"
                )
            key, size = self.part(into, slot, str(shard[1]))
            return Filled({key: size})
        if self.role == "single":
            slot = self.local(int(shard[0]))
            assert slot is not None
            broadcast(into[1:], tensor, tensor.shape)
            key, size = self.part(into, slot, str(shard[1]))
            return Filled({key: size})
        return Experts.fill(self, into, dtype, tensor, shard)
