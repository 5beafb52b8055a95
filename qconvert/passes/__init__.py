"""Passes: pure functions from plan to plan, found by file: a module's `PASSES` are its passes."""

from __future__ import annotations

from qconvert.checkpoint.family import discover
from qconvert.plan.plan import Pass


def passes() -> dict[str, type[Pass]]:
    """Every pass by its recipe name. An import error is fatal and names the file."""
    found: list[type[Pass]] = [
        step for module in discover("qconvert.passes") for step in module.PASSES
    ]
    return {step.name: step for step in found}
