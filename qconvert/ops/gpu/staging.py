"""Rows of host arrays to a GPU and back, through pinned memory, two chunks at a time: while one is
worked on, the next is on its way there and the last on its way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from qconvert.core.errors import RunError

if TYPE_CHECKING:
    Array = np.ndarray[tuple[int, ...], np.dtype[Any]]

# Of all arrays of a chunk: the bus is at its full rate from 1 MiB on.
CHUNK_BYTES = 6 << 20

Launch = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor], None]


class Staging:
    """The way to one device and back. In Triton's interpreter the device is the CPU."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._slots = [_Slot(self.device), _Slot(self.device)]

    def run(self, ins: Sequence[Array], outs: Sequence[Array], launch: Launch) -> bool:
        """Rows [n, ...] of `ins` to rows of `outs`, which are in C order: `launch` is given both on the
        device, in C order, some rows at a time, and a flag int32 [1] to set where it declines. False if
        it did; the results are undefined then. Raises RunError where the GPU has no memory left."""
        rows = ins[0].shape[0]
        each = sum(array.nbytes for array in (*ins, *outs)) // max(1, rows)
        step = max(1, CHUNK_BYTES // max(1, each))
        declined = False
        try:
            for number, start in enumerate(range(0, rows, step)):
                slot = self._slots[number % 2]
                declined |= slot.collect()
                stop = min(start + step, rows)
                slot.send([a[start:stop] for a in ins], [a[start:stop] for a in outs], launch)
            for slot in self._slots:
                declined |= slot.collect()
        except torch.cuda.OutOfMemoryError as error:
            raise RunError(
                f"device {self.device}: out of memory ({error}); free some, give fewer --jobs, or "
                "--device cpu"
            ) from error
        return not declined


class _Slot:
    """Buffers of one chunk, which grow to the largest, and a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device)
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._there = torch.empty(0, dtype=torch.uint8, device=device)
        # Waited for asleep: eight processes that spin take the cores from the others' work.
        self._done = _event(device)
        self._waiting: list[tuple[torch.Tensor, Array]] = []

    def send(self, ins: Sequence[Array], outs: Sequence[Array], launch: Launch) -> None:
        """Copy `ins` there, work on them, and copy back; `collect` takes the results."""
        flag = np.zeros(1, np.int32)
        arrays = [*ins, *outs, flag]
        starts = np.cumsum([0, *(-(-array.nbytes // 256) * 256 for array in arrays)])
        self._reserve(int(starts[-1]))
        here = [_cut(self._pinned, at, a) for at, a in zip(starts, arrays, strict=False)]
        there = [_cut(self._there, at, a) for at, a in zip(starts, arrays, strict=False)]
        for tensor, array in zip(here[: len(ins)], ins, strict=True):
            tensor.numpy()[...] = _plain(array)
        here[-1].zero_()
        if self._stream is None:
            self._work(here, there, len(ins), launch)
        else:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._work(here, there, len(ins), launch)
                assert self._done is not None
                self._done.record(self._stream)
        results = [*outs, flag]
        self._waiting = list(zip(here[len(ins) :], results, strict=True))

    def _work(
        self,
        here: Sequence[torch.Tensor],
        there: Sequence[torch.Tensor],
        count: int,
        launch: Launch,
    ) -> None:
        for source, target in zip(
            [*here[:count], here[-1]], [*there[:count], there[-1]], strict=True
        ):
            target.copy_(source, non_blocking=True)
        launch(there[:count], there[count:-1], there[-1])
        for source, target in zip(there[count:], here[count:], strict=True):
            target.copy_(source, non_blocking=True)

    def collect(self) -> bool:
        """Wait for what was sent, and hand it out. Whether it was declined."""
        if not self._waiting:
            return False
        if self._done is not None:
            self._done.synchronize()
        for tensor, array in self._waiting:
            _plain(array)[...] = tensor.numpy()
        flag = self._waiting[-1][1]
        self._waiting = []
        return bool(flag[0])

    def _reserve(self, nbytes: int) -> None:
        if self._pinned.numel() < nbytes:
            cuda = self._stream is not None
            self._pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=cuda)
            self._there = torch.empty(nbytes, dtype=torch.uint8, device=self._device)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    made: Any = torch.cuda.Stream
    found: torch.cuda.Stream | None = made(device) if device.type == "cuda" else None
    return found


def _event(device: torch.device) -> torch.cuda.Event | None:
    made: Any = torch.cuda.Event
    found: torch.cuda.Event | None = made(blocking=True) if device.type == "cuda" else None
    return found


# torch has no kernels for unsigned integers of 16 and 32 bits, and needs none here.
_SIGNED = {"u2": np.int16, "u4": np.int32}


def _plain(array: Array) -> Array:
    signed = _SIGNED.get(array.dtype.str[1:])
    return array if signed is None else array.view(signed)


def _cut(buffer: torch.Tensor, at: int, like: Array) -> torch.Tensor:
    """Part of a buffer in the shape and type of an array."""
    dtype = torch.from_numpy(np.empty(0, _plain(like[:0]).dtype)).dtype
    return buffer[at : at + like.nbytes].view(dtype).view(like.shape)
