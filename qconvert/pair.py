"""A CPU folder and a GPU folder from one read of a checkpoint, and what says that they belong together.

The fork of sglang that serves them may place any expert on the GPU, so the GPU folder holds all of them,
never a part.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

from qconvert.errors import PlanError
from qconvert.formats.w4a16 import PackInt4
from qconvert.graph import Output
from qconvert.ops.int4 import DequantInt4
from qconvert.passes.amx import ExpertsToAmx
from qconvert.passes.drop import Drop
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan import Plan, counted, run_passes

FACT = "pair"


def pair_plans(start: Plan, cpu: ExpertsToAmx, gpu: ExpertsToW4A16) -> tuple[Plan, Plan]:
    """The plans of both folders, over shared values: every expert is read and decoded once. Both
    carry one id. Raises PlanError as the passes do."""
    before = (Drop(what="mtp"),) if cpu.mtp == "drop" and _has_drafts(start) else ()
    plan = run_passes(start, before)
    experts = cpu.experts(plan)
    for projection in experts.projections:
        if isinstance(projection.weight.decoder, DequantInt4):
            raise PlanError(
                f"{projection.module} is INT4 already; packed again it would only lose: let the source "
                "be the GPU side (--gpu source)"
            )
    shards: dict[str, Output] = {}
    packed: dict[str, tuple[Output, Output]] = {}
    for projection in experts.projections:
        named, (weight, scale) = cpu.shards(projection, (PackInt4(gpu.group),))
        shards.update(named)
        packed[projection.module] = weight, scale
    sides = {
        "cpu": cpu.with_shards(plan, experts, shards, "the folder made together with this one"),
        "gpu": gpu.with_packed(plan, experts, packed),
    }
    both = "".join(counted(side).check().fingerprint() for side in sides.values())
    name = sha256(both.encode()).hexdigest()[:32]
    made = [
        replace(side, facts={**side.facts, FACT: {"id": name, "side": kind}})
        for kind, side in sides.items()
    ]
    return made[0], made[1]


def _has_drafts(plan: Plan) -> bool:
    dims = plan.census.dims
    return any(plan.family.is_mtp(name, dims) for name in plan.tensors)
