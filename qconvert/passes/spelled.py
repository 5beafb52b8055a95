"""The repr of a pass that got fields later: its name in manifests and journals, where an option that is
not given leaves it as it was."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Any


def spelled(step: Any, later: Collection[str]) -> str:
    """A dataclass as it spells itself, without those of the `later` fields that have their default."""
    said = []
    for field in fields(step):
        value = getattr(step, field.name)
        assert field.name not in later or field.default is not MISSING
        if field.name not in later or value != field.default:
            said.append(f"{field.name}={value!r}")
    return f"{type(step).__name__}({', '.join(said)})"
