"""MLX's checkpoints, as mlx-lm writes them: words of codes, scales and, of affine ones, biases under the
names of each module, stacks of experts (`switch_mlp`) among them."""

from __future__ import annotations

from qconvert.checkpoint.mlx_config import MLX, mlx_scheme, states_mlx
from qconvert.core.errors import PlanError
from qconvert.core.parameter_names import MLX as PARTS
from qconvert.formats.base import FolderTensors, Format, Read, as_matrix, stored, weights_of_method
from qconvert.plan.plan import Plan

# Families of which mlx-lm stores other numbers than transformers (`models/qwen3_next.py`, `qwen3_5.py`,
# `sanitize`).
_SHIFTED = ("qwen3_next", "qwen3_5")
_GLOBAL_SCALE = "global_scale"


def read(plan: Plan, module: str) -> Read | None:
    """A module with scales, or with a `weight` in U32, where the config states MLX's quantization. A
    stack [E, N, words] is read as its rows, one matrix below another."""
    codes, scales, biases = (f"{module}.{part}" for part in PARTS)
    weight = plan.tensors.get(codes)
    in_words = weight is not None and weight.type.dtype == "U32"
    if not states_mlx(plan.checkpoint) or not (in_words or scales in plan.tensors):
        return None
    from qconvert.formats.mlx.decode import DequantMlx

    if plan.checkpoint.family.name in _SHIFTED:
        raise PlanError(
            f"mlx-lm stores the norms of {plan.checkpoint.family.name} plus 1 and its convolutions "
            "transposed, which is not undone here: start from the model's own release"
        )
    if f"{module}.{_GLOBAL_SCALE}" in plan.tensors:
        raise PlanError(
            f"{module!r} has a {_GLOBAL_SCALE}: experts with scales of their own over "
            "mode nvfp4's are not read here; start from the model's own release"
        )
    scheme = mlx_scheme(plan.checkpoint, module)
    if scheme is None:
        raise PlanError(f"{module!r} has MLX's codes or scales, and the config leaves it in floats")
    if weight is None or not in_words:
        found = "none" if weight is None else weight.type
        raise PlanError(f"{codes!r}: expected MLX's codes in U32 beside {scales!r}, found {found}")
    names = [codes, scales, biases] if scheme.mode == "affine" else [codes, scales]
    if scheme.mode != "affine" and biases in plan.tensors:
        raise PlanError(f"{biases!r} exists, and mode {scheme.mode} has none: one of them is wrong")
    decoder = DequantMlx(scheme.mode, scheme.bits, scheme.group)
    return stored(plan, names, decoder, as_matrix), tuple(names)


def _label(folder: FolderTensors, module: str, parameter: str) -> str | None:
    if parameter != PARTS[0] or not folder.once(states_mlx):
        return None
    try:
        scheme = mlx_scheme(folder.checkpoint, module)
    except PlanError:
        return "MLX"
    if scheme is None:
        return None
    kind = f"INT{scheme.bits}" if scheme.mode == "affine" else scheme.mode.upper()
    return f"MLX {kind} g{scheme.group}"


FORMAT = Format(
    name="mlx", title="MLX", parameters=PARTS, mark=PARTS[1],
    unmixed=weights_of_method(MLX, read), codes=("U32",),
    cut=(1, "group"), order=15,
    equals="mlx 0.32 mlx.core.dequantize", read=read, label=_label,
)  # fmt: skip
