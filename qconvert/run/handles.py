"""A few open descriptors at a time: models have hundreds of files, and processes may open a thousand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class Handles:
    """Descriptors by file number, opened when first asked for. Of more than `limit`, the one unused
    for longest is closed."""

    def __init__(
        self, opens: Callable[[int], int], closes: Callable[[int], None], limit: int
    ) -> None:
        self._opens = opens
        self._closes = closes
        self._limit = limit
        self._open: OrderedDict[int, int] = OrderedDict()

    def __getitem__(self, number: int) -> int:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if len(self._open) >= self._limit:
            _, oldest = self._open.popitem(last=False)
            self._closes(oldest)
        self._open[number] = self._opens(number)
        return self._open[number]

    def close(self) -> None:
        while self._open:
            _, descriptor = self._open.popitem()
            self._closes(descriptor)
