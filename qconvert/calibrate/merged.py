"""Several streams as one, each computed in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Event
from typing import Generic, TypeVar

T = TypeVar("T")


class _Item(Generic[T]):
    """An item on its way; None in its place says that a stream has ended."""

    def __init__(self, value: T) -> None:
        self.value = value


def _nothing(number: int) -> None:
    """What a thread begins with where nobody says."""


def merged(
    streams: Sequence[Iterator[T]], begin: Callable[[int], None] = _nothing, most: int = 1
) -> Generator[T, None, None]:
    """Items of all streams, as they come. What a stream raises is raised once all have ended; closed
    early, each stops at its next item. `begin` is called with a stream's number in its thread. A stream
    waits for its items to be taken where there are `most`, so that they do not pile up in memory."""
    if len(streams) == 1:  # a thread would have a heap of its own
        yield from streams[0]
        return
    ready: Queue[_Item[T] | None] = Queue(most)
    stopped = Event()

    def run(number: int, stream: Iterator[T]) -> None:
        try:
            begin(number)
            for item in stream:
                if stopped.is_set():
                    return
                ready.put(_Item(item))
                del item
        finally:
            ready.put(None)

    left = len(streams)
    with ThreadPoolExecutor(left) as pool:
        jobs = [pool.submit(run, number, stream) for number, stream in enumerate(streams)]
        try:
            while left:
                found = ready.get()
                if found is None:
                    left -= 1
                else:
                    yield found.value
                    del found
        finally:
            stopped.set()
            while left:  # a stream must not wait for ever for somebody to take its item
                left -= ready.get() is None
    for job in jobs:
        job.result()
