"""A tqdm bar on stderr with work per second and time left; silent if stderr is not a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from qconvert.core.say import shown_line


class Bar:
    """Events of a run as a progress bar. `unit` is what is counted: bytes."""

    def __init__(self, unit: str = "B") -> None:
        self._unit = unit

    def __enter__(self) -> Self:
        from tqdm import tqdm

        self._bar = tqdm(
            unit=self._unit, unit_scale=True, dynamic_ncols=True, disable=not sys.stderr.isatty(),
            leave=False, file=sys.stderr,
        )  # fmt: skip
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._bar.close()

    def start(self, total: int, done: int) -> None:
        self._bar.reset(total=total)
        # Work of an earlier run counts toward the total, not toward this run's speed.
        self._bar.initial = done
        self._bar.n = done
        self._bar.refresh()

    def wrote(self, nbytes: int) -> None:
        self._bar.update(nbytes)

    def phase(self, text: str) -> None:
        self._bar.set_description(shown_line(text))
