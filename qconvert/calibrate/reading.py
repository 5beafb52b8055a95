"""Weights as torch tensors, computed from the source as a plan says; hashes of what was read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.clock import Clock
from qconvert.core.errors import PlanError, RowError, RunError
from qconvert.core.graph import Apply, Buffer, Output, Source, whole
from qconvert.matrices.stored import Stored
from qconvert.plan.plan import Plan
from qconvert.run.reader import Reader
from qconvert.run.unit_runner import SourceHashes

if TYPE_CHECKING:
    import torch


class Weights:
    """Reads the tensors of one checkpoint; nothing is kept. What decoding takes is counted by `clock`,
    within what it counts as reading."""

    def __init__(self, plan: Plan, clock: Clock | None = None) -> None:
        self._reader = Reader(plan.checkpoint.shards)
        self._clock = clock

    def close(self) -> None:
        self._reader.close()

    def tensor(self, name: str, output: Output) -> torch.Tensor:
        """An unquantized tensor as it is. Raises PlanError for other dtypes than BF16, F16, F32."""
        import torch

        dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
        kind = output.type
        if kind.dtype not in dtypes:
            raise PlanError(f"{name!r}: expected BF16, F16 or F32, found {kind}")
        data = bytearray(self._bytes(output, SourceHashes()))
        return torch.frombuffer(data, dtype=dtypes[kind.dtype]).reshape(kind.shape)

    def matrix(self, module: str, stored: Stored) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """A matrix [rows, columns] as BF16, whatever form it is stored in, and the ranges it was read
        from, each with its xxh3-128. Raises RunError for data that cannot be right."""
        import torch

        read = SourceHashes()
        ins = [Buffer(arg.type, memoryview(self._bytes(arg, read))) for arg in stored.args]
        data: bytearray | memoryview = ins[0].data
        if stored.decoder is not None:
            types = [buffer.type for buffer in ins]
            (kind,) = stored.decoder.infer(*types)
            data = bytearray(kind.nbytes)
            scratch = memoryview(bytearray(stored.decoder.scratch(*types)))
            counted = nullcontext() if self._clock is None else self._clock.part("decode", "read")
            try:
                with counted:
                    stored.decoder.run(ins, [Buffer(kind, memoryview(data))], scratch)
            except RowError as error:
                raise RunError(f"{module}: row {error.row} {error.what}") from error
        matrix = torch.frombuffer(data, dtype=torch.bfloat16).reshape(stored.rows, stored.columns)
        if not bool(torch.isfinite(matrix).all()):
            raise RunError(f"{module}: holds NaN or infinity; the checkpoint is broken")
        return matrix, read.records()

    def _bytes(self, output: Output, read: SourceHashes) -> bytearray:
        """All bytes of an output; what an earlier pass computes is computed, a node at a time."""
        data = bytearray(output.type.nbytes)
        into, at = memoryview(data), 0
        results: Mapping[int, list[Buffer]] = {}
        for origin, start, stop in output.pieces:
            target = into[at : at + stop - start]
            if isinstance(origin, Source):
                self._reader.read(origin, start, target)
                read.feed(origin.name, start, target)
            else:
                if id(origin.node) not in results:
                    results = {id(origin.node): self._compute(origin.node, read)}
                target[:] = results[id(origin.node)][origin.port].data[start:stop]
            at += stop - start
        return data

    def _compute(self, node: Apply, read: SourceHashes) -> list[Buffer]:
        ins = [Buffer(arg.type, memoryview(self._bytes(arg, read))) for arg in node.args]
        types = [buffer.type for buffer in ins]
        outs = [
            Buffer(kind, memoryview(bytearray(kind.nbytes)))
            for _, kind in whole(node.op, types).outs
        ]
        node.op.run(ins, outs, memoryview(bytearray(node.op.scratch(*types))))
        return outs
