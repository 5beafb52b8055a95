"""Passes: pure functions from plan to plan, found by file (or another package's
entry point): a module's `PASSES` are its passes."""

from __future__ import annotations

from qconvert.core.discovery import PASSES, discover
from qconvert.core.errors import QConvertError
from qconvert.plan.pass_options import PACKAGES
from qconvert.plan.plan import Pass


def passes() -> dict[str, type[Pass]]:
    """Every pass by its recipe name, those of other packages too. An import error is fatal and names the
    file; so are two passes of one name."""
    found: dict[str, type[Pass]] = {}
    for module in discover(*PACKAGES, group=PASSES):
        for step in getattr(module, "PASSES", ()):
            if step.name in found:
                both = f"{found[step.name].__module__} and {step.__module__}"
                raise QConvertError(
                    f"pass {step.name!r} is defined by {both}; uninstall one of them"
                )
            found[step.name] = step
    return found
