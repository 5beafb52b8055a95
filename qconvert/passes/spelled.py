"""The repr of a pass that got fields later: its name in manifests and journals, where an option that is
not given leaves it as it was."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any


def spelled(step: Any, later: Collection[str]) -> str:
    """A dataclass as it spells itself, without those of the `later` fields that are None or False."""
    found = [(field.name, getattr(step, field.name)) for field in fields(step)]
    said = [f"{name}={value!r}" for name, value in found if name not in later or value]
    return f"{type(step).__name__}({', '.join(said)})"
