"""Codes of a matrix as what formats store for it, packed in a thread beside what computes them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass
from queue import Queue
from threading import Event
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import CodePacker

if TYPE_CHECKING:
    from qconvert.calibrate.settings import Matrix


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """One solved matrix as formats store it, in the order of their packers: types of the results and
    their bytes. `layer`, `expert`, `kind` and `sources` are the matrix's."""

    layer: int
    expert: int | None
    kind: str
    types: Sequence[TensorType]
    data: Sequence[bytes | bytearray]
    sources: Sequence[Mapping[str, Any]]

    def buffers(self) -> list[Buffer]:
        pairs = zip(self.types, self.data, strict=True)
        return [Buffer(each, memoryview(data)) for each, data in pairs]


@dataclass(frozen=True)
class Packers:
    """Packers of codes: by layer of each kind of an expert's matrices (gate_proj, up_proj, down_proj),
    and of each module beside the experts."""

    experts: Mapping[tuple[int, str], tuple[CodePacker, ...]]
    linears: Mapping[str, tuple[CodePacker, ...]]

    def pack(self, matrix: Matrix) -> Packed:
        own = matrix.layer, matrix.kind
        packers = self.linears[matrix.kind] if matrix.expert is None else self.experts[own]
        types: list[TensorType] = []
        made: list[bytearray] = []
        for packer, codes in zip(packers, matrix.codes, strict=True):
            parts = packer.infer(TensorType("BF16", codes.codes.shape))
            some = [bytearray(part.nbytes) for part in parts]
            pairs = zip(parts, some, strict=True)
            packer.pack(codes, [Buffer(part, memoryview(data)) for part, data in pairs])
            types += parts
            made += some
        return Packed(matrix.layer, matrix.expert, matrix.kind, types, made, matrix.sources)


# A stream computed in a thread of its own, so that what it gives is packed and written while a GPU
# goes on: half a second a layer of a hundred experts.


T = TypeVar("T")


class _Item(Generic[T]):
    """An item on its way; None in its place says that the stream has ended."""

    def __init__(self, value: T) -> None:
        self.value = value


def run_in_thread(stream: Generator[T], most: int, waits: Callable[[T], bool]) -> Generator[T]:
    """The items of a stream, in order. It goes on while they are worked on, `most` of them ahead;
    after one that it `waits` for only once the item after that is asked for. Closed early, it is
    closed too."""
    ready: Queue[_Item[T] | None] = Queue(most)
    asked, stopped = Event(), Event()

    def run() -> None:
        try:
            with closing(stream):
                for item in stream:
                    if stopped.is_set():
                        return
                    last = waits(item)
                    asked.clear()
                    ready.put(_Item(item))
                    del item
                    if last:
                        asked.wait()
        finally:
            ready.put(None)

    with ThreadPoolExecutor(1, "qconvert-calibrate") as pool:
        job = pool.submit(copy_context().run, run)
        ended = False
        try:
            while (found := ready.get()) is not None:
                value = found.value
                yield value
                if waits(value):
                    asked.set()
                del found, value
            ended = True
        finally:
            stopped.set()
            asked.set()
            while not ended:  # it must not wait for ever for somebody to take its item
                ended = ready.get() is None
                asked.set()
        job.result()
