"""Clock of a calibration: where its time goes, and how much of its work is done."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from qconvert.core.profiling import phase

# Called with a kind of work, how much of it was done, and the seconds it took.
Told = Callable[[str, float, float], None]


class Clock:
    """Adds up seconds by what they were spent on, and work. Accelerators are waited for at both ends.
    `told` hears of each piece."""

    def __init__(self, told: Told | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.work: defaultdict[str, float] = defaultdict(float)
        self._tell, self._now = told, now

    @contextmanager
    def __call__(self, what: str, device: str) -> Iterator[Callable[[float], None]]:
        """Around what is done; what it gives is called with the amount of each piece."""
        _wait(device)
        start = self._now()

        def tick(amount: float) -> None:
            nonlocal start
            at = self._now()
            self.told(what, amount, at - start)
            start = at

        try:
            with phase(f"calibrate: {what}"):
                yield tick
        finally:
            _wait(device)
            tick(0.0)

    @contextmanager
    def part(self, what: str, of: str) -> Iterator[None]:
        """Around something within another kind of work, whose seconds are then less by these. `told`
        does not hear of it: it belongs to the other's speed."""
        start = self._now()
        try:
            with phase(f"calibrate: {what}"):
                yield
        finally:
            seconds = self._now() - start
            self.seconds[what] += seconds
            self.seconds[of] -= seconds

    def told(self, what: str, amount: float, seconds: float) -> None:
        """Another process has done work, and took so long."""
        self.seconds[what] += seconds
        self.work[what] += amount
        if self._tell is not None:
            self._tell(what, amount, seconds)

    def layer_done(self, planned: Mapping[str, float], before: Mapping[str, float]) -> None:
        """A layer has ended: what was told of it since `before` is made what was planned."""
        for what, amount in planned.items():
            self.told(what, amount - (self.work[what] - before.get(what, 0.0)), 0.0)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)
