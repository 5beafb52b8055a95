"""Cases of which `make test` runs some, so that it takes minutes, and `make check` all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(
    cases: Iterable[Any], every: int = 2, *, name: Callable[[Any], str] | None = None
) -> list[Any]:
    """Parameters: each `every`th case is run always, the others are marked `big`."""
    return [
        pytest.param(
            case,
            id=None if name is None else name(case),
            marks=[pytest.mark.big] if number % every else [],
        )
        for number, case in enumerate(cases)
    ]
