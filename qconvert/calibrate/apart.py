"""A stream computed in a thread of its own, so that what it gives is packed and written while a GPU
goes on: half a second a layer of a hundred experts."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from queue import Queue
from threading import Event
from typing import Generic, TypeVar

T = TypeVar("T")


class _Item(Generic[T]):
    """An item on its way; None in its place says that the stream has ended."""

    def __init__(self, value: T) -> None:
        self.value = value


def apart(stream: Generator[T], most: int, waits: Callable[[T], bool]) -> Generator[T]:
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
