"""A CPU folder and a GPU folder from one read of a checkpoint, and what says that they belong together.

The fork of sglang that serves them may place any expert on the GPU, so the GPU folder holds all of them,
never a part. Shared experts stay as they are: it is started with --disable-shared-experts-fusion, as
routed experts on two devices cannot hold them.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output
from qconvert.models.experts import calibrated
from qconvert.passes.amx import ExpertsToAmx
from qconvert.passes.drop import Drop
from qconvert.passes.w4a16 import ExpertsToW4A16
from qconvert.plan.plan import Plan, counted, run_passes

FACT = "pair"


def pair_plans(start: Plan, cpu: ExpertsToAmx, gpu: ExpertsToW4A16) -> tuple[Plan, Plan]:
    """The plans of both folders, over shared values: every expert is read and decoded once, and
    calibrated once where the CPU side asks for it. Both carry one id. Raises PlanError as the passes
    do."""
    before = (Drop(what="mtp"),) if cpu.mtp == "drop" and _has_drafts(start) else ()
    plan = run_passes(start, before)
    experts = cpu.experts(plan)
    for projection in experts.projections:
        if getattr(projection.weight.decoder, "format", "") in ("int-packed", "gptq"):
            raise PlanError(
                f"{projection.module} is packed integers already; packed again it would only lose: let "
                "the source be the GPU side (--gpu source)"
            )
    if gpu.packing != "compressed-tensors":
        raise PlanError("the GPU side of a pair is compressed-tensors': its rows are made in parts")
    gpu = replace(gpu, calibrate=cpu.calibrate, shared_experts="keep")
    chosen = gpu.chosen(plan)
    if cpu.calibrate is not None and chosen.linears:
        raise PlanError(
            f"{next(iter(chosen.linears))!r} is a target of the GPU side, and the calibration of a pair "
            "solves routed experts, which both sides have: target those alone"
        )
    digest = gpu.digest(plan, chosen)
    shards: dict[str, Output] = {}
    packed: dict[str, Output] = {}
    encoder = gpu.encoder()
    for projection in experts.projections:
        if digest is None or projection.draft:
            named, results = cpu.shards(projection, (encoder,))
        else:
            packers = cpu.packer(projection), gpu.packer()
            for_cpu, for_gpu = calibrated(projection, packers, digest)
            named, results = cpu.named(projection, for_cpu), list(for_gpu)
        shards.update(named)
        packed.update(gpu.named(projection.module, projection.weight, results))
    beside = "the folder made together with this one"
    sides = {
        "cpu": cpu.with_shards(plan, experts, shards, beside, digest),
        "gpu": gpu.with_results(plan, chosen, packed, digest),
    }
    both = "".join(counted(side).check().fingerprint() for side in sides.values())
    name = sha256(both.encode()).hexdigest()[:32]
    made = [
        replace(side, facts={**side.facts, FACT: {"id": name, "side": kind}})
        for kind, side in sides.items()
    ]
    return made[0], made[1]


def _has_drafts(plan: Plan) -> bool:
    return plan.family.any_mtp(plan.tensors, plan.role_index.dims)
