"""Content of qconvert.json that follows from a plan: all of it but the run's identity."""

from __future__ import annotations

from typing import Any

from qconvert.plan.plan import Plan


def described(plan: Plan) -> dict[str, Any]:
    """Return what is made, by which passes, what is lost and left out. It holds no time and no path, so
    the same plan is described by the same bytes anywhere."""
    dims = plan.checkpoint.role_index.dims
    rules: dict[str, list[str]] = {}
    for name, rule in sorted(plan.dropped.items()):
        rules.setdefault(rule, []).append(name)
    return {
        "family": plan.family.name,
        "layers": dims.num_layers,
        "experts": dims.num_experts,
        "passes": [
            {"name": e.name, "options": e.options, "matched": e.matched, "expected": e.expected}
            for e in plan.log
        ],
        "lossy_steps": plan.losses(),
        "dropped": rules,
        "dropped_files": dict(sorted(plan.dropped_files.items())),
        "bytes": {"in": plan.bytes_in, "out": plan.bytes_out, "dropped": plan.bytes_dropped},
        **plan.facts,
    }
