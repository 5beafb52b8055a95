"""Store of what is kept of each token: a row, on a GPU, in memory or, if too large, in a file.

Where the files lie: calibrate/work_dir.py. They are read and written, not mapped: mapped pages
count as memory of the process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from qconvert.calibrate.page_locked import PAGE_LOCKED
from qconvert.core.errors import RunError
from qconvert.run.files import Files

if TYPE_CHECKING:
    import torch

    from qconvert.calibrate.distributed import Communicator


class Rows(Protocol):
    """Rows [count, width] of one dtype, in the memory of `device` or, `cpu`, in a file."""

    @property
    def device(self) -> str: ...

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop): whoever changes them writes them again."""

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Replace rows from `start` on."""

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
        self.path, self._width, self._dtype, self._files = path, width, dtype, files
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
        """As behind.Held: who reads another's file finds there what that has written."""
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


class Scratch:
    """Makes rows that live for a layer, on the first of some devices with space: `shares` are bytes by
    device. What fits none goes to files in `folder`, which other processes, of other ranks, share."""

    def __init__(
        self, folder: Path, shares: Mapping[str, int], files: Files, rank: int = 0
    ) -> None:
        self._folder, self._files, self._rank = folder, files, rank
        self._left = dict(shares)
        self._locked = any(device != "cpu" for device in shares)
        self._made: list[InMemory | InFile] = []

    def rows(self, name: str, count: int, width: int, dtype: torch.dtype) -> Rows:
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
