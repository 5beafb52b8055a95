"""Rows of tokens on their way to an accelerator: from the host's memory while it works on those before.

A DeepSeek-V3 layer of a million tokens sends its experts 100 GB for each group of them: two seconds of
PCIe, in which a GPU that waits for them does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.rows import Rows

if TYPE_CHECKING:
    import torch

Part = tuple[int, int]


def prefetched(
    rows: Sequence[Rows], parts: Sequence[Part], device: str
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
    lanes = [_Lane(one, device, most) for one in rows]
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


class _Lane:
    """The way of some rows to `device`: at most two parts of them are there, of up to `most` rows."""

    def __init__(self, rows: Rows, device: str, most: int) -> None:
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
