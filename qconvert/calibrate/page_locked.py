"""Page-locked memory of the host, from and to which an accelerator copies as fast as the bus is.

torch's own is rounded up to a power of two, 17.2 GB for the 15.0 GB of a million tokens of DeepSeek-V3,
of which there are five, and took over 10 s. Here pages are large where the system gives such, and
written to by several threads before they are locked: 0.35 s for 8.6 GB, or 2 in a virtual machine
that is given that memory only then.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from qconvert.core.errors import RunError

if TYPE_CHECKING:
    import torch

_THREADS = 8
_PAGE = 4096  # the smallest that there is


class _Locked(mmap.mmap):
    """Memory that is unlocked before it is unmapped: what is mapped there next would be taken for
    locked. (A weak reference to a mapping is told after it.)"""

    unlock: Callable[[], Any] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


class PageLocked:
    """Blocks of page-locked memory, which are kept for others of the same size once they are given
    back."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows [count, width], holding anything. Raises RunError where the system has or locks no more
        memory."""
        size = count * width * dtype.itemsize
        left = self._free.get(size)
        block = left.pop() if left else _locked(size)
        return block.view(dtype).view(count, width)

    def give(self, rows: torch.Tensor) -> None:
        """Give rows back that were taken, and that nobody reads or writes any more."""
        import torch

        block = rows.flatten().view(torch.uint8)
        self._free.setdefault(block.numel(), []).append(block)

    def clear(self) -> None:
        """Give the system what was given back."""
        self._free.clear()


def _locked(size: int) -> torch.Tensor:
    """Memory that is locked until its last tensor is gone."""
    import torch

    cuda: Any = torch.cuda  # its functions are typed for nobody
    try:
        memory = _Locked(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _refused(size, str(error.strerror or error)) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda part: part[::_PAGE].fill_(0), block.chunk(_THREADS)))
    cudart = cuda.cudart()
    failed = int(cudart.cudaHostRegister(block.data_ptr(), size, 0))
    if failed:
        raise _refused(size, f"CUDA error {failed}")
    memory.unlock = partial(cudart.cudaHostUnregister, block.data_ptr())
    return block


def _refused(size: int, why: str) -> RunError:
    return RunError(
        f"cannot lock {size >> 20} MiB of the host's memory for a GPU ({why}); give less --memory"
    )


PAGE_LOCKED = PageLocked()
