"""Shared experts beside quantized routed ones: quantized with them or kept, and what to say of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from qconvert.core.errors import PlanError
from qconvert.core.shown import count, format_size
from qconvert.passes.replace_weights import Selection, shared_experts
from qconvert.plan.plan import Plan
from qconvert.runtimes.shared_experts import (
    NO_FUSION,
    loses_shared,
    needs_plain_linears,
    would_fuse,
)

SharedExperts = Literal["quantize", "keep"]
# Families whose draft classes in vLLM 0.33 fuse projections without a packed_modules_mapping
# (`models/deepseek_mtp.py`, `models/glm4_moe_mtp.py`).
DRAFTS_WITHOUT_MAPPING = ("deepseek_v3", "glm4_moe", "kimi_k2")


def check_any_shared(chosen: Selection, asked: SharedExperts | None) -> None:
    """Raises PlanError where shared experts are to be quantized, and there are none."""
    if asked == "quantize" and not chosen.names_shared:
        raise PlanError("shared_experts is quantize, and the model has none: leave it out")


def with_shared(
    plan: Plan,
    chosen: Selection,
    asked: SharedExperts | None,
    block_of: Callable[[Selection], Mapping[str, Any]],
    *,
    drafts: bool,
) -> Selection:
    """The same with shared experts (of draft layers too, if `drafts`), if they are to be quantized with
    the routed ones: where that is `asked`, or (None) where sglang would otherwise fuse them and not read
    them. `block_of` gives the config's block of a selection."""
    shared = shared_experts(plan, chosen.linears, drafts=drafts)
    if not shared:
        check_any_shared(chosen, asked)
    routed = chosen.experts.projections if chosen.experts is not None else ()
    if not shared or not routed or asked == "keep":
        return chosen
    if asked is None:
        block = block_of(chosen)
        # Targets that name shared experts never take those of draft layers.
        lost = chosen.names_shared and drafts and would_fuse(plan.config, block)
        if not (lost or loses_shared(plan.config, block)):
            return chosen
    return replace(chosen, linears={**chosen.linears, **shared}, shared=frozenset(shared))


def shared_notes(plan: Plan, chosen: Selection, block: Mapping[str, Any]) -> list[str]:
    """Return what the plan says of shared experts: which were quantized for the routed ones' sake and
    what keeping them would take, or with which option sglang reads those that are kept."""
    if chosen.shared:
        names = [n for m, one in chosen.linears.items() if m in chosen.shared for n in one.names]
        held = format_size(sum(plan.tensors[name].type.nbytes for name in names))
        said = (
            f"{count(len(chosen.shared), 'matrix', 'matrices')} of shared experts quantized with the "
            f"routed ones (kept they would take {held}, and {NO_FUSION} in sglang)"
        )
        if needs_plain_linears(plan.config) and block.get("quant_method") != "modelopt":
            said += "; sglang with expert parallelism needs them kept"
        if _lost_by_vllms_draft(plan, chosen, block):
            said += "; vLLM 0.33's draft class does not load its own so, and needs them kept"
        return [said]
    if loses_shared(plan.config, block):
        said = "sglang would fuse the shared experts, which are in another form, and not read them"
        return [f"{said}: start it with {NO_FUSION}"]
    return []


def _lost_by_vllms_draft(plan: Plan, chosen: Selection, block: Mapping[str, Any]) -> bool:
    """vLLM 0.33 (`gptq_utils.py`, `is_layer_gptq_quantized`) takes a fused layer for quantized by the
    names of its parts, and the draft classes of DeepSeek and GLM have no mapping to them."""
    dims, family = plan.role_index.dims, plan.family
    return (
        block.get("quant_method") == "gptq"
        and family.name in DRAFTS_WITHOUT_MAPPING
        and any(family.is_mtp(f"{module}.weight", dims) for module in chosen.shared)
    )
