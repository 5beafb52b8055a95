"""Folders made to reach beyond themselves, to hang, to flood, and to lie on a terminal."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

# Colours, a line of its own, GitHub's and Azure's commands, a right-to-left override.
EVIL = "x\x1b[31m\n::error::pwned\n  ::set-output name=a::b\r##vso[task.complete]\u202ey"
HUGE = 3 << 30
_PATIENCE_S = 60


@contextmanager
def no_hang() -> Iterator[None]:
    """Ends what waits for ever, so that a test fails and does not hang."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"still not done after {_PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(_PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pipe(file: Path) -> None:
    """Whoever opens it waits for a writer."""
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def huge(file: Path) -> None:
    """3 GiB of zeros that take no disk."""
    file.unlink(missing_ok=True)
    with file.open("wb") as stream:
        stream.truncate(HUGE)


def device(file: Path) -> None:
    """A link to zeros without end."""
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero")


def escapes(file: Path) -> None:
    """The same bytes, outside of the folder, behind a link."""
    outside = file.parent.parent / f"outside-{file.name}"
    if file.exists():
        file.rename(outside)
    else:
        outside.write_bytes(b"{}")
    file.symlink_to(outside)


def raw_lines(text: str) -> list[str]:
    """Lines of an output that a terminal or a CI log would take for more than text."""
    lines = text.split("\n")
    found = [line for line in lines if line.lstrip().startswith("::") or "##vso[" in line]
    return found + [line for line in lines if not line.isprintable()]
