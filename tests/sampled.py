"""Cases of which `make test` runs some, so that it takes minutes, `make check` as many of the others as
CI has time for, and `QCONVERT_ALL=1 make check` all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

# Of a list's other cases, every so-manieth is run by `make check`.
_ALL = os.environ.get("QCONVERT_ALL") == "1"
_CHECKED = 1 if _ALL else 5


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


def thinned(
    cases: Iterable[Any], every: int, *, name: Callable[[Any], str] | None = None
) -> list[Any]:
    """Parameters of a test that `make check` alone runs: each `every`th, the others are `rest`."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=None if name is None else name(case),
            marks=[pytest.mark.rest] if number % every and not _ALL else [],
        )
        for number, case in enumerate(cases)
    ]
