"""Why a linear that a target names stays as it is. What runtimes do was read in sglang 0.5.23 and vLLM
0.33; tests/test_left_linears.py asks their simulators."""

from __future__ import annotations

from collections.abc import Container

from qconvert.core.names import split_parameter
from qconvert.core.roles import Kind
from qconvert.matrices.linears import matches
from qconvert.plan.plan import Plan

_FUSED_INPUT = (
    "sglang 0.5.23 joins q_a_proj and kv_a_proj_with_mqa while it loads them, their weight_shape too, "
    "which then has four numbers"
)
_WHY = {
    Kind.QUERY_DOWN: _FUSED_INPUT,
    Kind.KV_DOWN: _FUSED_INPUT,
    Kind.KV_UP: "sglang 0.5.23 takes its `weight` apart once it is loaded, and a packed one has none",
    Kind.GDN_QKVZ: "sglang 0.5.23 asks Qwen3-Next's fused inputs of linear attention for a `weight`",
    Kind.VISION: "it is of a vision tower, which sglang 0.5.23 builds unquantized (quant_config=None in "
    "models/qwen3_vl.py)",
}
_UNSEEN = "; nor could it be calibrated, because samples hold no images: nothing goes through it"


def skip_reason(
    plan: Plan, target: str, *, calibrated: bool, kept: Container[Kind] = ()
) -> str | None:
    """Why no linear that a target matches is quantized, with the first of them; None where it matches
    none. `kept` are shared experts where they shall be kept. Raises PlanError for an invalid pattern."""
    dims = plan.role_index.dims
    for name, output in plan.tensors.items():
        module, parameter = split_parameter(name)
        if parameter != "weight" or len(output.type.shape) != 2 or not matches(module, (target,)):
            continue
        kind = plan.role_index.kind(name)
        if kind.never_quantized:
            return f"{module}: no runtime loads such a matrix quantized"
        if plan.family.is_mtp(name, dims):
            return (
                f"{module}: a draft layer's linears stay, as codes cost it more guesses than bytes"
            )
        if kind in kept:
            return f"{module}: shared_experts says keep"
        why = _WHY.get(kind, "no runtime is known to load it quantized")
        return f"{module}: {why}{_UNSEEN if calibrated and kind is Kind.VISION else ''}"
    return None
