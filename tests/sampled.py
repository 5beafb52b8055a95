"""Cases of which `make test` runs some, so that it takes minutes, `make check` as many of the others as
CI has time for, and `QCONVERT_ALL=1 make check` all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

# Of a list's other cases, every so-manieth is run by `make check`.
_CHECKED = 1 if os.environ.get("QCONVERT_ALL") == "1" else 2


def sampled(
    cases: Iterable[Any], every: int = 2, *, name: Callable[[Any], str] | None = None
) -> list[Any]:
    """Parameters: each `every`th case is run always, the others are marked `big`, or `rest`."""
    found, others = [], 0
    for number, case in enumerate(cases):
        marks = []
        if number % every:
            marks = [pytest.mark.rest if others % _CHECKED else pytest.mark.big]
            others += 1
        found.append(pytest.param(case, id=None if name is None else name(case), marks=marks))
    return found
