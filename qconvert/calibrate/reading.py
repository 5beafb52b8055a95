"""Weights as torch tensors, computed from the source as a plan says; hashes of what was read.

For an accelerator bytes are read into memory that it copies from at the speed of the bus, and FP8
is decoded there: to the bits of formats/fp8/decode.py, which a test compares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from qconvert.calibrate.progress import Clock
from qconvert.core.errors import PlanError, RowError, RunError
from qconvert.core.graph import Apply, Buffer, Output, Source, whole
from qconvert.formats.base import Stored
from qconvert.formats.fp8.decode import DequantFp8
from qconvert.plan.plan import Plan
from qconvert.run.work.reader import Reader
from qconvert.run.work.unit_runner import SourceHashes

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_THREADS = 4  # that read ahead


@dataclass(frozen=True, eq=False)
class Fetched:
    """A matrix's bytes, uint8 in memory that is pinned: BF16, or, with `block`, FP8 codes and their
    scales; and the ranges that these were read from."""

    data: torch.Tensor
    scale: torch.Tensor | None
    block: tuple[int, int] | None
    sources: list[dict[str, Any]]


# Names in torch of codes and scales that are decoded on an accelerator.
_CODES = {
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_SCALES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def decode(found: Fetched, there: torch.Tensor) -> None:
    """A matrix as BF16 [N, K] on its device. FP8 is what formats/fp8/decode.py says: code times scale in
    float32, rounded once; where that refuses a scale or a product there is a NaN or an infinity."""
    import torch

    if found.scale is None or found.block is None:
        there.copy_(found.data.view(torch.bfloat16).view(there.shape), non_blocking=True)
        return
    rows, columns = there.shape
    codes = found.data.to(there.device, non_blocking=True).reshape(there.shape)
    scale = found.scale.to(there.device, non_blocking=True).float()
    high, wide = min(found.block[0], rows), min(found.block[1], columns)
    spread = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    there.copy_(codes.float().mul_(spread))


def _is_finite(data: bytearray | memoryview) -> bool:
    """Tell whether no BF16 number among these bytes is NaN or infinity: of none all bits of the exponent
    are set. By torch's own operator it took 15 times as long."""
    import numpy as np

    sizes = np.frombuffer(data, np.uint16) & 0x7FFF
    return not sizes.size or int(sizes.max()) < 0x7F80


class ReadAhead(Generic[T]):
    """Matrices read before they are asked for, while a GPU works on those before: threads wait for
    files, hash and decode outside of the lock of Python. `order` says a name, its bytes in memory and
    what reads it. No more than `room` bytes are read and not taken, but always one; what is asked for
    out of order is not given."""

    def __init__(
        self, order: Iterable[tuple[str, int, Callable[[], T]]], room: int, threads: int = _THREADS
    ) -> None:
        self._order: Iterator[tuple[str, int, Callable[[], T]]] = iter(order)
        self._room = room
        self._waiting: deque[tuple[str, int, Future[T]]] = deque()
        self._pool = ThreadPoolExecutor(threads, "qconvert-ahead")
        self._next = next(self._order, None)

    def begin(self) -> None:
        """Read what there is room for."""
        while self._next is not None:
            name, size, read = self._next
            if self._waiting and size > self._room:
                return
            self._room -= size
            self._waiting.append((name, size, self._pool.submit(read)))
            self._next = next(self._order, None)

    def take(self, name: str) -> T | None:
        """Return what was read under a name, if it is the next one; None if it is not."""
        if not self._waiting or self._waiting[0][0] != name:
            return None
        _, size, found = self._waiting.popleft()
        result = found.result()
        self._room += size
        self.begin()
        return result

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class Weights:
    """Reads the tensors of one checkpoint; nothing is kept but what was read `ahead`. What decoding
    takes is counted by `clock`, within what it counts as reading."""

    def __init__(self, plan: Plan, clock: Clock | None = None) -> None:
        self._reader = Reader(plan.checkpoint.shards)
        self._plan, self._clock = plan, clock
        self._ahead: ReadAhead[Fetched] | None = None
        self._others: list[Weights] = []
        self._free: list[Weights] = []  # of the others; to take one, or to add one, is atomic

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        for other in self._others:
            other.close()
        self._reader.close()

    def expect(self, order: Iterable[tuple[str, Stored]], room: int) -> None:
        """From now on matrices are asked for in this order, by `into`: threads read them ahead, `room`
        bytes at most."""
        if self._ahead is not None:
            self._ahead.close()

        def fetched(module: str, stored: Stored) -> Fetched:
            with self.lent() as mine:
                return mine.fetch(module, stored)

        self._ahead = ReadAhead(
            (
                (module, 2 * stored.rows * stored.columns, partial(fetched, module, stored))
                for module, stored in order
            ),
            room,
        )
        self._ahead.begin()

    def into(self, there: torch.Tensor, module: str, stored: Stored) -> list[dict[str, Any]]:
        """As `matrix`, into BF16 [N, K] on an accelerator; whether all of it is finite is left to the
        caller, who has many of them and one answer to wait for."""
        found = None if self._ahead is None else self._ahead.take(module)
        if found is None:
            found = self.fetch(module, stored)
        decode(found, there)
        return found.sources

    def fetch(self, module: str, stored: Stored) -> Fetched:
        """Read a matrix for an accelerator."""
        import torch

        read = SourceHashes()
        if stored.decoder is None:
            return Fetched(self._pinned(stored.args[0], read), None, None, read.records())
        types = [arg.type for arg in stored.args]
        if isinstance(stored.decoder, DequantFp8) and types[1].dtype in _SCALES:
            codes, scale = (self._pinned(arg, read) for arg in stored.args)
            kind = getattr(torch, _CODES[types[0].dtype])
            scale = scale.view(getattr(torch, _SCALES[types[1].dtype])).reshape(types[1].shape)
            return Fetched(codes.view(kind), scale, stored.decoder.block, read.records())
        matrix, sources = self.matrix(module, stored)
        return Fetched(matrix.view(torch.uint8).flatten().pin_memory(), None, None, sources)

    def _pinned(self, output: Output, read: SourceHashes) -> torch.Tensor:
        import torch

        data = torch.empty(output.type.nbytes, dtype=torch.uint8, pin_memory=True)
        array: Any = data.numpy()
        self._fill(output, memoryview(array), read)
        return data

    def tensor(self, name: str, output: Output) -> torch.Tensor:
        """An unquantized tensor as it is. Raises PlanError for other dtypes than BF16, F16, F32."""
        import torch

        dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
        kind = output.type
        if kind.dtype not in dtypes:
            raise PlanError(f"{name!r}: expected BF16, F16 or F32, found {kind}")
        data = self._bytes(output, SourceHashes())
        return torch.frombuffer(data, dtype=dtypes[kind.dtype]).reshape(kind.shape)

    def matrix(self, module: str, stored: Stored) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """A matrix [rows, columns] as BF16, whatever form it is stored in, and the ranges it was read
        from, each with its xxh3-128. Raises RunError for data that cannot be right."""
        import torch

        read = SourceHashes()
        results: dict[int, list[Buffer]] = {}  # codes and scales are one node's
        ins = [Buffer(arg.type, memoryview(self._bytes(arg, read, results))) for arg in stored.args]
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
        if not _is_finite(data):
            raise RunError(f"{module}: holds NaN or infinity; the checkpoint is broken")
        return matrix, read.records()

    @contextmanager
    def lent(self) -> Iterator[Weights]:
        """Lend the same weights with a reader that nobody else has meanwhile: descriptors are not for
        two threads. There are as many as threads at once, closed with these."""
        try:
            found = self._free.pop()
        except IndexError:
            found = Weights(self._plan)
            self._others.append(found)
        try:
            yield found
        finally:
            self._free.append(found)

    def data(self, output: Output) -> bytearray:
        """All bytes of an output of the plan. Raises RunError for data that cannot be right."""
        return self._bytes(output, SourceHashes())

    def _bytes(
        self, output: Output, read: SourceHashes, results: dict[int, list[Buffer]] | None = None
    ) -> bytearray:
        """All bytes of an output; what an earlier pass computes is computed, a node at a time, and kept
        in `results`, by the node's identity."""
        data = bytearray(output.type.nbytes)
        self._fill(output, memoryview(data), read, results)
        return data

    def _fill(
        self, output: Output, into: memoryview, read: SourceHashes,
        results: dict[int, list[Buffer]] | None = None,
    ) -> None:  # fmt: skip
        at = 0
        results = {} if results is None else results
        for origin, start, stop in output.pieces:
            target = into[at : at + stop - start]
            if isinstance(origin, Source):
                self._reader.read(origin, start, target)
                read.feed(origin.name, start, target)
            else:
                if id(origin.node) not in results:
                    results.clear()
                    results[id(origin.node)] = self._compute(origin.node, read)
                target[:] = results[id(origin.node)][origin.port].data[start:stop]
            at += stop - start

    def _compute(self, node: Apply, read: SourceHashes) -> list[Buffer]:
        ins = [Buffer(arg.type, memoryview(self._bytes(arg, read))) for arg in node.args]
        types = [buffer.type for buffer in ins]
        outs = [
            Buffer(kind, memoryview(bytearray(kind.nbytes)))
            for _, kind in whole(node.op, types).outs
        ]
        node.op.run(ins, outs, memoryview(bytearray(node.op.scratch(*types))))
        return outs
