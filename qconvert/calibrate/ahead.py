"""Matrices read before they are asked for: their order is known from the start, so threads read and
decode the next ones while a GPU works on those before. They wait for files, hash and decode outside
of Python's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

THREADS = 4


class Ahead(Generic[T]):
    """Reads what `order` says: a name, its bytes in memory and what reads it. No more than `room`
    bytes are read and not taken, but always one; what is asked for out of order is not given."""

    def __init__(
        self, order: Iterable[tuple[str, int, Callable[[], T]]], room: int, threads: int = THREADS
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
        """What was read under a name, if it is the next one; None if it is not."""
        if not self._waiting or self._waiting[0][0] != name:
            return None
        _, size, found = self._waiting.popleft()
        result = found.result()
        self._room += size
        self.begin()
        return result

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
