"""Where a calibration's time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up seconds by what they were spent on. Accelerators are waited for at both ends."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, what: str, device: str) -> Iterator[None]:
        _wait(device)
        start = time.monotonic()
        try:
            yield
        finally:
            _wait(device)
            self.seconds[what] += time.monotonic() - start


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)
