"""Page-locked memory of the host, from and to which an accelerator copies as fast as the bus is.

torch's own is rounded up to a power of two, 17.2 GB for the 15.0 GB of a million tokens of DeepSeek-V3,
of which there are five, and takes 8 s. Here pages are large where the system gives such, and written to
by several threads before they are locked: .6 s, or 3.3 in a virtual machine that is given that memory
only then.
"""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from qconvert.core.errors import RunError

if TYPE_CHECKING:
    import torch

_THREADS = 8
_PAGE = 4096  # the smallest that there is


class PageLocked:
    """Blocks of page-locked memory, which are kept for others of the same size once they are given
    back."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows [count, width], holding anything. Raises RunError where the system locks no more."""
        size = count * width * dtype.itemsize
        left = self._free.get(size)
        block = left.pop() if left else _locked(size)
        return block.view(dtype).view(count, width)

    def give(self, rows: torch.Tensor) -> None:
        """Give rows back that were taken, and that nobody reads or writes any more."""
        import torch

        block = rows.flatten().view(torch.uint8)
        self._free.setdefault(block.numel(), []).append(block)


def _locked(size: int) -> torch.Tensor:
    import torch

    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda part: part[::_PAGE].fill_(0), block.chunk(_THREADS)))
    cuda: Any = torch.cuda  # its functions are typed for nobody
    failed = int(cuda.cudart().cudaHostRegister(block.data_ptr(), size, 0))
    if failed:
        raise RunError(
            f"cannot lock {size >> 20} MiB of the host's memory for a GPU (CUDA error {failed}); give "
            "--memory less, or allow this user more locked memory (ulimit -l)"
        )
    return block


PAGE_LOCKED = PageLocked()
