"""MXFP4, of compressed-tensors or beside FP8 as DeepSeek-V4 has it; and gpt-oss's stacks."""

from __future__ import annotations

from qconvert.checkpoint.quantization_config import states_mxfp4
from qconvert.core.encodings import MXFP4, MXFP4_BESIDE, MXFP4_STACKED
from qconvert.core.errors import PlanError
from qconvert.matrices.stored import Stored, stored
from qconvert.plan.plan import Plan

_EXPONENTS = ("U8", "F8_E8M0")


def read(plan: Plan, module: str) -> tuple[Stored, tuple[str, ...]] | None:
    """A module with a `weight_packed` in U8 where the config states MXFP4, or an I8 `weight` with
    F8_E8M0 scales: DeepSeek-V4's config states nothing about their block."""
    codes, scale = (f"{module}.{part}" for part in MXFP4)
    found = plan.tensors.get(codes)
    if found is not None and found.type.dtype == "U8":
        if not any(states_mxfp4(c.block) for c in plan.checkpoint.quantization_configs):
            raise PlanError(
                f"weight {codes!r} is U8 without a global scale, so no NVFP4, and the config states no "
                "MXFP4: qconvert does not guess"
            )
        return _stored(plan, codes, scale)
    codes, scale = (f"{module}.{part}" for part in MXFP4_BESIDE)
    found, exponents = plan.tensors.get(codes), plan.tensors.get(scale)
    if found is None or exponents is None or exponents.type.dtype != "F8_E8M0":
        return None
    if found.type.dtype not in ("I8", "U8"):
        return None
    return _stored(plan, codes, scale)


def _stored(plan: Plan, codes: str, scale: str) -> tuple[Stored, tuple[str, ...]]:
    from qconvert.ops.mx import DequantMxfp4

    return stored(plan, (codes, scale), DequantMxfp4()), (codes, scale)


def stacks(plan: Plan) -> dict[str, tuple[str, str]]:
    """gpt-oss's stacks: the names of codes U8 [E, N, K/32, 16] and of exponents U8 [E, N, K/32], by the
    name of the stack in numbers. Raises PlanError where a part is missing or does not fit."""
    codes, scales = MXFP4_STACKED
    found = {}
    for name, output in plan.tensors.items():
        if not name.endswith(codes) or output.type.dtype != "U8":
            continue
        stem = name.removesuffix(codes)
        scale = plan.tensors.get(f"{stem}{scales}")
        if scale is None:
            raise PlanError(f"{stem + scales!r} is missing, and {name!r} is there")
        shape = output.type.shape
        if len(shape) != 4 or shape[3] != 16 or scale.type.shape != shape[:3]:
            raise PlanError(
                f"{name!r}: expected [experts, rows, blocks, 16] and exponents [experts, rows, blocks], "
                f"found {output.type} and {scale.type}"
            )
        if scale.type.dtype not in _EXPONENTS:
            raise PlanError(f"{stem + scales!r}: expected exponents in U8, found {scale.type}")
        found[stem] = (name, f"{stem}{scales}")
    return found
