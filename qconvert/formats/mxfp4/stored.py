"""MXFP4 matrices of a plan: E2M1 codes, two a byte, under a power of two for each 32 columns.

Codes stay as they are and scales are relabelled in formats/nvfp4/relabel.py; ops/mx.py decodes them.

Format sources: OCP Microscaling Formats v1.0, 6.2; compressed-tensors 0.19 `mxfp4-pack-quantized`.
"""

from __future__ import annotations

from qconvert.checkpoint.quantization_config import states_mxfp4
from qconvert.plan.plan import Plan


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
