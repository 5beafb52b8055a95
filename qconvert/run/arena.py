"""One block of memory a worker reuses for everything it reads and computes; its size is the promise
kept to --memory."""

from __future__ import annotations

import mmap

from qconvert.core.errors import RunError
from qconvert.core.graph import aligned
from qconvert.run.pages import fresh_pages


class Arena:
    """A bump allocator over one anonymous mapping. `reset` frees everything at once, or all that was
    taken after a `mark`."""

    def __init__(self, size: int) -> None:
        self.size = max(aligned(size), mmap.PAGESIZE)
        self._view = fresh_pages(self.size)
        self._used = 0

    def take(self, size: int) -> memoryview:
        """`size` bytes, aligned for any dtype. Raises RunError when the arena is used up, which only
        a plan that understates its needs can cause."""
        start = self._used
        if start + size > self.size:
            raise RunError(f"buffers need {start + size} bytes, the arena has {self.size}")
        self._used = start + aligned(size)
        return self._view[start : start + size]

    def mark(self) -> int:
        return self._used

    def reset(self, mark: int = 0) -> None:
        self._used = mark
