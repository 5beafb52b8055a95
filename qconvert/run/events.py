"""What a run tells its caller while it goes on."""

from __future__ import annotations

from typing import Protocol


class Events(Protocol):
    """What a run tells while it goes on."""

    def start(self, total: int, done: int) -> None:
        """Bytes to write in all, and those an interrupted run left finished."""

    def wrote(self, nbytes: int) -> None:
        """That many more bytes were written."""

    def phase(self, text: str) -> None:
        """What follows the writing: hashing, publishing."""


class Silent:
    """Events nobody listens to."""

    def start(self, total: int, done: int) -> None:
        pass

    def wrote(self, nbytes: int) -> None:
        pass

    def phase(self, text: str) -> None:
        pass
