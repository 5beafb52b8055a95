"""Several streams as one, each computed in a thread of its own."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Event
from typing import Generic, TypeVar

T = TypeVar("T")


class _Item(Generic[T]):
    """An item on its way; None in its place says that a stream has ended."""

    def __init__(self, value: T) -> None:
        self.value = value


def merged(streams: Sequence[Iterator[T]]) -> Generator[T, None, None]:
    """Items of all streams, as they come. What a stream raises is raised once all have ended; closed
    early, each stops at its next item."""
    if len(streams) == 1:  # a thread would have a heap of its own
        yield from streams[0]
        return
    # Bounded: a stream waits for its items to be taken, so that none pile up in memory.
    ready: Queue[_Item[T] | None] = Queue(1)
    stopped = Event()

    def run(stream: Iterator[T]) -> None:
        try:
            for item in stream:
                if stopped.is_set():
                    return
                ready.put(_Item(item))
                del item
        finally:
            ready.put(None)

    left = len(streams)
    with ThreadPoolExecutor(left) as pool:
        jobs = [pool.submit(run, stream) for stream in streams]
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
