"""MXFP4 matrices of a plan: E2M1 codes, two a byte, under a power of two for each 32 columns.

Nothing is decoded here: codes stay as they are and scales are relabelled in formats/nvfp4/relabel.py; as
numbers they are read in validators/reading/decode.py alone.

Format sources: OCP Microscaling Formats v1.0, 6.2; compressed-tensors 0.19 `mxfp4-pack-quantized`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.plan.plan import Plan

_FORMAT = "mxfp4-pack-quantized"


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


def states_mxfp4(block: Mapping[str, Any]) -> bool:
    """Whether a quantization block, or a group in it, is of compressed-tensors' MXFP4 format."""
    groups = block.get("config_groups")
    every = [block, *(groups.values() if isinstance(groups, Mapping) else ())]
    return any(isinstance(one, Mapping) and one.get("format") == _FORMAT for one in every)
