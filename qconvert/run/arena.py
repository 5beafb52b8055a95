"""One block of memory a worker reuses for everything it reads and computes; its size is the promise
kept to --memory.

Fresh pages are the slowest memory there is (measured 0.25 to 1.9 GB/s on 4 KiB pages against 9 GB/s
reused), so they are taken once, and as huge pages where the kernel grants them."""

from __future__ import annotations

import mmap

from qconvert.core.errors import RunError
from qconvert.core.graph import aligned

_HUGE = 2 << 20


def fresh_pages(size: int) -> memoryview:
    """`size` bytes of zeroed memory, page-aligned, given back with the last view of it."""
    pages = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= _HUGE:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)[:size]


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
