"""Passes: pure functions from plan to plan, found by file: a module's `PASSES` are its passes."""

from __future__ import annotations

from qconvert.checkpoint.family import discover
from qconvert.plan.plan import Pass

PACKAGES = ("qconvert.passes", "qconvert.contrib.trtllm_gen")


def passes() -> dict[str, type[Pass]]:
    """Every pass by its recipe name. An import error is fatal and names the file."""
    found: list[type[Pass]] = [
        step for module in discover(*PACKAGES) for step in getattr(module, "PASSES", ())
    ]
    return {step.name: step for step in found}
