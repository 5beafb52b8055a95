"""Passes: pure functions from plan to plan, one a file, found by file under the name `PASS`."""

from __future__ import annotations

from qconvert.family import discover
from qconvert.plan import Pass


def passes() -> dict[str, type[Pass]]:
    """Every pass by its recipe name. An import error is fatal and names the file."""
    found = (
        getattr(module, "PASS", None) for module in discover("qconvert.passes")
    )
    return {step.name: step for step in found if step is not None}
