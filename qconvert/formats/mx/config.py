"""The group of compressed-tensors' config for MXFP4 and MXFP8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from qconvert.checkpoint.quantization_config import states_mxfp4
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import PlanError
from qconvert.plan.plan import Plan

# --- Limits of MXFP4 ------------------------------------------------------------------------------


MX_BLOCK = 32  # columns that share a scale


_CODES = ("U8", "I8")
EXPONENTS = ("U8", "F8_E8M0")


def check_mxfp4(packed: TensorType, scale: TensorType) -> None:
    """Raise PlanError where two tensors are no MXFP4 matrix."""
    if packed.dtype not in _CODES or len(packed.shape) != 2:
        raise PlanError(f"expected packed E2M1 codes in a U8 or I8 matrix, found {packed}")
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    shape = rows, columns // MX_BLOCK
    if columns % MX_BLOCK or scale.shape != shape or scale.dtype not in EXPONENTS:
        raise PlanError(
            f"expected exponents U8 or F8_E8M0 [{rows}, {columns} / {MX_BLOCK}] for {packed}, found "
            f"{scale}"
        )


# --- MXFP4 matrices of a plan ---------------------------------------------------------------------


def mxfp4_modules(plan: Plan) -> list[str]:
    """Modules whose weights are MXFP4 in compressed-tensors' form, [] where the config states none."""
    if not any(states_mxfp4(config.block) for config in plan.checkpoint.quantization_configs):
        return []
    suffix = ".weight_packed"
    return [
        name.removesuffix(suffix)
        for name, output in plan.tensors.items()
        if name.endswith(suffix) and output.type.dtype == "U8"
    ]


Format = Literal["mxfp4", "mxfp8"]

FORMATS: Mapping[Format, str] = {"mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}


def mx_group_config(form: Format, targets: Iterable[str]) -> dict[str, Any]:
    """An entry of compressed-tensors' `config_groups` (0.19, `quantization/quant_scheme.py`: MXFP4A16
    and MXFP8). Runtimes decide for themselves how they compute with MXFP4 weights; with MXFP8 ones vLLM
    0.33 (`schemes/compressed_tensors_w8a8_mxfp8.py`) scales activations alike."""
    common = {
        "num_bits": 4 if form == "mxfp4" else 8, "type": "float", "symmetric": True,
        "strategy": "group", "group_size": MX_BLOCK, "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }  # fmt: skip
    return {
        "targets": list(targets),
        "format": FORMATS[form],
        "weights": {**common, "dynamic": False},
        "input_activations": None if form == "mxfp4" else {**common, "dynamic": True},
        "output_activations": None,
    }
