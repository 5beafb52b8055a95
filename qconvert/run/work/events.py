"""Events that a run sends its caller while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

# Called after each write with the bytes written and the bytes to write in total.
Callback = Callable[[int, int], None]


class Events(Protocol):
    """Event of a run while it goes on."""

    def start(self, total: int, done: int) -> None:
        """Bytes to write in all, and those an interrupted run left finished."""

    def wrote(self, nbytes: int) -> None:
        """That many more bytes were written."""

    def phase(self, text: str) -> None:
        """Return what follows the writing: hashing, publishing."""


@runtime_checkable
class ProgressEvents(Events, Protocol):
    """Events that hear of work by kind, too (estimate.py): what a run with a calibration takes."""

    def planned(self, work: Mapping[str, float], before: Mapping[str, float]) -> None:
        """Work of this run, told once after `start`, and what earlier runs have done."""

    def did(self, kind: str, amount: float, seconds: float) -> None:
        """That much of it has been done, in so many seconds; from any thread."""


class NoEvents:
    """Events nobody listens to."""

    def start(self, total: int, done: int) -> None:
        pass

    def wrote(self, nbytes: int) -> None:
        pass

    def phase(self, text: str) -> None:
        pass


class Counted(NoEvents):
    """Events that call a function."""

    def __init__(self, tell: Callback) -> None:
        self._tell, self._total, self._done = tell, 0, 0

    @staticmethod
    def of(events: Events | Callback | None) -> Events | None:
        """Events as they are, or those of a function."""
        return Counted(events) if callable(events) else events

    def start(self, total: int, done: int) -> None:
        self._total, self._done = total, done

    def wrote(self, nbytes: int) -> None:
        self._done += nbytes
        self._tell(self._done, self._total)
