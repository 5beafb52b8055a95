"""Why a conversion cannot be made of a model: the true cause, and what to do.

A model without experts is not one whose experts are unknown; a folder that qconvert made is told by
what made it.
"""

from __future__ import annotations

from qconvert.checkpoint.prepared import layout_of
from qconvert.core.errors import PlanError
from qconvert.plan.plan import Plan

DESCRIBE = (
    "name a class of transformers with the same layout (--architecture), or describe the family in "
    "layouts/ (CONTRIBUTING.md, a model family)"
)


def model_name(plan: Plan) -> str:
    """The model as its config calls it."""
    return f"model_type {plan.config.get('model_type')!r}"


def check_has_experts(plan: Plan, instead: str) -> None:
    """Raise PlanError for a plan without routed experts, or with some in a form that only a kernel
    reads. `instead` is what to do with a model that has none."""
    if "amx" in (plan.checkpoint.manifest or {}):
        raise PlanError(
            "its experts are in a CPU kernel's format already (qconvert amx made this folder); start "
            "from the source, or cut them for another NUMA count (qconvert split --numa)"
        )
    if layout_of(plan.config) is not None:
        raise PlanError(
            "its experts are prepared for trtllm-gen (qconvert prepare made this folder); give them "
            "back first: qconvert unprepare"
        )
    if not plan.role_index.dims.num_experts:
        if any(".experts." in name or plan.role_index.kind(name).routed for name in plan.tensors):
            fix = "correct config.json" if plan.family.name != "generic" else DESCRIBE
            raise PlanError(
                f"{model_name(plan)}: the config counts no experts by a name that is known, and tensors "
                f"are named for some; {fix}"
            )
        if plan.family.name == "generic":
            instead = "use it as it is"  # of its other layers nothing is known either
        raise PlanError(
            f"this model has no experts: the config of {model_name(plan)} counts none, and no tensor "
            f"is named for one; {instead}"
        )


def check_experts(plan: Plan, instead: str) -> None:
    """Raise PlanError for a plan whose routed experts cannot be worked on: as `check_has_experts`, or no
    file in layouts/ describes the family, or its description does not tell their matrices apart."""
    check_has_experts(plan, instead)
    if plan.family.experts_unread:
        raise PlanError(
            f"{model_name(plan)}: {plan.family.experts_unread}, so they are neither quantized nor "
            "stacked, nor other layers beside them; use the model as it is"
        )
    if plan.family.name == "generic":
        raise PlanError(
            f"{plan.family.undescribed}: it has experts, and no file in layouts/ says how they are "
            f"stored; {DESCRIBE}"
        )


def check_runs(plan: Plan) -> None:
    """Raise PlanError for a model whose class a calibration cannot run a layer at a time."""
    if plan.family.not_run:
        raise PlanError(
            f"{model_name(plan)} cannot be calibrated a layer at a time: {plan.family.not_run}; round "
            "to nearest instead (w4a16 --rtn; amx and nvfp4 without --gptq)"
        )
    check_not_pruned(plan)


def check_not_pruned(plan: Plan) -> None:
    """Raise PlanError where an earlier step left experts out: a calibration runs the checkpoint itself,
    and a folder of CPU experts is served beside its other layers."""
    all_of, left = plan.checkpoint.role_index.dims.num_experts, plan.role_index.dims.num_experts
    if all_of != left:
        raise PlanError(
            f"a step before this one keeps {left} of {all_of} experts, and this one needs a checkpoint "
            "that is so: make the pruned model by a conversion of its own, and start from that"
        )


def check_linear_attention(plan: Plan, what: str) -> None:
    """Raise PlanError for a model without Gated DeltaNet layers; `what` is what was to be done."""
    if plan.role_index.dims.gdn is not None:
        return
    if plan.family.name == "generic" and any(".linear_attn." in name for name in plan.tensors):
        raise PlanError(
            f"{model_name(plan)} is not known: it has linear attention, and no file in layouts/ "
            f"describes its projections; {DESCRIBE}"
        )
    raise PlanError(
        f"this model has no linear-attention layers (Gated DeltaNet; {model_name(plan)}): there is "
        f"nothing to {what}, use it as it is"
    )
