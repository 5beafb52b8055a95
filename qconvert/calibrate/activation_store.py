"""Store of what is kept of each token: a row, on a GPU, in memory or, if too large, in a file.

Where the files lie: calibrate/work_dir.py. They are read and written, not mapped: mapped pages
count as memory of the process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qconvert.core.errors import RunError
from qconvert.run.work.files import Files

if TYPE_CHECKING:
    import torch

    from qconvert.calibrate.distributed import Communicator


# Page-locked memory of the host, from and to which an accelerator copies as fast as the bus is.
# torch's own is rounded up to a power of two, 17.2 GB for the 15.0 GB of a million tokens of
# DeepSeek-V3, of which there are five, and took over 10 s. Here pages are large where the system gives
# such, and written to by several threads before they are locked: 0.35 s for 8.6 GB, or 2 in a virtual
# machine that is given that memory only then.


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


class Rows(Protocol):
    """Rows [count, width] of one dtype."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop): whoever changes them writes them again."""

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Replace rows from `start` on."""


class TokenRows(Rows, Protocol):
    """Rows in the memory of `device` or, `cpu`, in a file."""

    @property
    def device(self) -> str: ...

    def close(self) -> None:
        """Give the memory or the file back."""


class InMemory:
    """Rows in a device's memory, holding anything at first. `locked`: in the host's so that an
    accelerator copies them as fast as the bus is."""

    def __init__(
        self, count: int, width: int, dtype: torch.dtype, device: str, *, locked: bool
    ) -> None:
        import torch

        self.device = device
        self._locked = locked
        if locked:
            self._rows = PAGE_LOCKED.take(count, width, dtype)
        else:
            self._rows = torch.empty(count, width, dtype=dtype, device=device)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._rows[start:stop]

    def write(self, start: int, rows: torch.Tensor) -> None:
        to = self._rows[start : start + rows.shape[0]]
        if to.data_ptr() != rows.data_ptr():
            to.copy_(rows)

    def close(self) -> None:
        if self._locked:
            PAGE_LOCKED.give(self._rows)
        del self._rows


def _bytes(rows: torch.Tensor) -> memoryview:
    """A CPU tensor's own bytes."""
    import torch

    data: Any = rows.view(torch.uint8).numpy()
    return memoryview(data).cast("B")


class InFile:
    """Rows in a file, which `close` leaves where it is. A new file is all zero."""

    device = "cpu"

    def __init__(
        self, path: Path, count: int, width: int, dtype: torch.dtype, files: Files, *, new: bool
    ) -> None:
        self.path, self.rows, self._files = path, count, files
        self._width, self._dtype = width, dtype
        self._row = width * dtype.itemsize
        if new:
            files.create(path, count * self._row)
        elif not path.is_file() or path.stat().st_size != count * self._row:
            raise RunError(
                f"{path}: expected {count * self._row} bytes of hidden states; the work folder is "
                "damaged: run qconvert clean on the output folder and start again"
            )
        self._fd = files.open(path)

    def read(self, start: int, stop: int) -> torch.Tensor:
        import torch

        rows = torch.empty(stop - start, self._width, dtype=self._dtype)
        into = _bytes(rows)
        at = start * self._row
        while into.nbytes:
            done = os.preadv(self._fd, [into], at)
            if not done:
                raise RunError(f"{self.path}: the file ends at byte {at}")
            into, at = into[done:], at + done
        return rows

    def write(self, start: int, rows: torch.Tensor) -> None:
        data = _bytes(rows.to("cpu", self._dtype).contiguous())
        self._files.write(self._fd, self.path, data, start * self._row)

    def sync(self) -> None:
        """Make what was written survive a power cut."""
        self._files.sync(self._fd, self.path)

    def close(self) -> None:
        self._files.close(self._fd)


class InFiles:
    """Rows [count, width] in a file for each of some ranges, `cuts`, in their order: hidden states of
    several processes. Each writes its `own` range, because two hosts that write to one page of a file
    through a network file system may lose what one of them wrote."""

    device = "cpu"

    def __init__(
        self, name: Path, cuts: Sequence[tuple[int, int]], own: tuple[int, int] | None, width: int,
        dtype: torch.dtype, files: Files,
    ) -> None:  # fmt: skip
        """`own` is a file to be made, None where all are read."""
        self._name, self._cuts, self._own = name, cuts, own
        self._form = width, dtype, files
        self._opened: dict[tuple[int, int], InFile] = {}
        if own is not None and own[0] < own[1]:
            self._file(own, new=True)

    def _file(self, cut: tuple[int, int], *, new: bool = False) -> InFile:
        if cut not in self._opened:
            path = self._name.with_name(f"{self._name.name}.{cut[0]}.rows")
            width, dtype, files = self._form
            self._opened[cut] = InFile(path, cut[1] - cut[0], width, dtype, files, new=new)
        return self._opened[cut]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop), of whichever process."""
        import torch

        found = [
            self._file((first, last)).read(max(start, first) - first, min(stop, last) - first)
            for first, last in self._cuts
            if max(first, start) < min(last, stop)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Replace rows of this process."""
        own = self._own
        assert own is not None
        assert own[0] <= start
        assert start + rows.shape[0] <= own[1]
        if rows.shape[0]:
            self._file(own).write(start - own[0], rows)

    def gather(self, comm: Communicator, cuts: Sequence[tuple[int, int]]) -> None:
        """As WrittenBehind: who reads another's file finds there what that has written."""
        if comm.count > 1:
            self.sync()
            comm.barrier()

    def sync(self) -> None:
        """Make what was written survive a power cut, and be read on other hosts."""
        if self._own in self._opened:
            self._opened[self._own].sync()

    def close(self) -> None:
        for file in self._opened.values():
            file.close()
        self._opened.clear()


class ScratchRows:
    """Makes rows that live for a layer, on the first of some devices with space: `shares` are bytes by
    device. What fits none goes to files in `folder`, which other processes, of other ranks, share."""

    def __init__(
        self, folder: Path, shares: Mapping[str, int], files: Files, rank: int = 0
    ) -> None:
        self._folder, self._files, self._rank = folder, files, rank
        self._left = dict(shares)
        self._locked = any(device != "cpu" for device in shares)
        self._made: list[InMemory | InFile] = []

    def rows(self, name: str, count: int, width: int, dtype: torch.dtype) -> TokenRows:
        """Rows, holding anything."""
        size = count * width * dtype.itemsize
        found: InMemory | InFile
        for device, left in self._left.items():
            if size <= left:
                self._left[device] -= size
                locked = self._locked and device == "cpu"
                found = InMemory(count, width, dtype, device, locked=locked)
                break
        else:
            path = self._folder / f"{name}.{self._rank}.rows"
            found = InFile(path, count, width, dtype, self._files, new=True)
        self._made.append(found)
        return found

    def left(self, device: str) -> int:
        """Bytes of a device that no rows have."""
        return self._left.get(device, 0)

    def close(self) -> None:
        """Give back all that was made."""
        for rows in self._made:
            rows.close()
            if isinstance(rows, InFile):
                self._files.remove(rows.path)
        self._made.clear()


# Rows of tokens on their way to an accelerator: from the host's memory while it works on those before.
# A DeepSeek-V3 layer of a million tokens sends its experts 100 GB for each group of them: two seconds
# of PCIe, in which a GPU that waits for them does nothing.


Part = tuple[int, int]


def prefetched(
    rows: Sequence[TokenRows], parts: Sequence[Part], device: str
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Of each part [start, stop) what `rows` have there, on `device`. Rows in memory there are given as
    they lie; others are read into one of two buffers, and are gone when the next but one is asked for.
    A clock around it all hides no waiting: one around each part would wait for what is on its way."""
    if device == "cpu":
        for part in parts:
            yield tuple(one.read(*part) for one in rows)
        return
    if not parts:
        return
    most = max(stop - start for start, stop in parts)
    lanes = [_PrefetchLane(one, device, most) for one in rows]
    try:
        for lane in lanes:
            lane.send(*parts[0])
        for place in range(len(parts)):
            found = tuple(lane.arrived() for lane in lanes)
            if place + 1 < len(parts):
                for lane in lanes:
                    lane.send(*parts[place + 1])
            yield found
    finally:
        for lane in lanes:
            lane.close()


class _PrefetchLane:
    """The way of some rows to `device`: at most two parts of them are there, of up to `most` rows."""

    def __init__(self, rows: TokenRows, device: str, most: int) -> None:
        import torch

        cuda: Any = torch.cuda  # its streams are typed for nobody
        self._rows, self._device, self._most = rows, device, most
        self._buffers: list[torch.Tensor] = []
        self._sent: tuple[torch.Tensor, Any] | None = None
        self._cuda, self._stream = cuda, cuda.Stream(device)

    def send(self, start: int, stop: int) -> None:
        import torch

        rows = self._rows.read(start, stop)
        if self._rows.device == self._device:
            self._sent = rows, None
            return
        if len(self._buffers) < 2:
            self._buffers.append(
                torch.empty(self._most, *rows.shape[1:], dtype=rows.dtype, device=self._device)
            )
        else:
            self._buffers.reverse()
        into = self._buffers[-1][: stop - start]
        free, arrived = self._cuda.Event(), self._cuda.Event()
        # Whatever was asked of the buffer's last contents has been asked by now.
        free.record(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            self._stream.wait_event(free)
            into.copy_(rows, non_blocking=True)
            arrived.record(self._stream)
        self._sent = into, arrived

    def arrived(self) -> torch.Tensor:
        """Return what was sent last, for kernels that are asked for from now on."""
        assert self._sent is not None
        rows, event = self._sent
        if event is not None:
            self._cuda.current_stream(self._device).wait_event(event)
        return rows

    def close(self) -> None:
        """Buffers are given back, to others who use them after what is on its way."""
        if self._sent is not None:
            self.arrived()
        self._sent = None
        self._buffers.clear()
