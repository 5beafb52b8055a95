"""One block of memory a worker reuses for everything it reads, computes and writes.

Fresh pages are the slowest memory there is (measured 0.25 to 1.9 GB/s on 4 KiB pages against 9 GB/s
reused), so they are taken once, as huge pages where the kernel grants them, and the size is the
promise kept to --memory.
"""

from __future__ import annotations

import mmap

from qconvert.errors import RunError
from qconvert.units import aligned


class Arena:
    """A bump allocator over one anonymous mapping. `reset` frees everything at once."""

    def __init__(self, size: int) -> None:
        self.size = max(aligned(size), mmap.PAGESIZE)
        self._map = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE") and self.size >= 2 << 20:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)
        self._used = 0

    def take(self, size: int) -> memoryview:
        """`size` bytes, aligned for any dtype. Raises RunError when the arena is spent, which only
        a plan that under-states its needs can cause."""
        start = self._used
        if start + size > self.size:
            raise RunError(f"buffers of {start + size} bytes asked of an arena of {self.size}")
        self._used = start + aligned(size)
        return self._view[start : start + size]

    def reset(self) -> None:
        self._used = 0
