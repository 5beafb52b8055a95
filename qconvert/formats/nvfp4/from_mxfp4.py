"""MXFP4 matrices of a plan under NVFP4's scales, and the config's block for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qconvert.checkpoint.quantization_config import states_mxfp4
from qconvert.core.dtypes import TensorType
from qconvert.core.encodings import Dialect
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply
from qconvert.formats.mxfp4.limits import MX_BLOCK
from qconvert.formats.nvfp4.config import NAMES, group_config
from qconvert.formats.nvfp4.relabel import ExponentRange, RelabelBlocks, RelabelOwn
from qconvert.ops.fp4 import BLOCK
from qconvert.plan.plan import Plan

# Keys of a block that make it one of NVFP4 experts beside block FP8: sglang 0.5.23
# (`configs/model_config.py`, "hybrid NVFP4 moe") and vLLM 0.33 (`models/deepseek_v4/quant_config.py`).
# Both then take NVFP4 of weights and activations.
_HYBRID = {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": BLOCK}


def relabelled(matrices: Mapping[str, Sequence[Output]], dialect: Dialect) -> dict[str, Output]:
    """The tensors of matrices that share a scale, by name, from codes and exponents of each. Raises
    PlanError naming a matrix whose parts do not fit."""
    names = NAMES[dialect]
    ranges = []
    for module, parts in matrices.items():
        try:
            ranges.append(apply(ExponentRange(), *parts)[0])
        except PlanError as error:
            raise PlanError(f"{module}: {error}") from error
    (global_scale,) = apply(RelabelOwn(dialect), *ranges)
    made: dict[str, Output] = {}
    for module, (codes, scale) in matrices.items():
        (blocks,) = apply(RelabelBlocks(dialect), scale, global_scale)
        # DeepSeek-V4 calls the same bytes I8.
        made[f"{module}.{names.weight}"] = Output(TensorType("U8", codes.type.shape), codes.pieces)
        made[f"{module}.{names.scale}"] = blocks
        made[f"{module}.{names.global_scale}"] = global_scale.reshape(names.scalar)
    return made


def hybrid_block(block: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek-V4's own block of its FP8 layers, with experts in modelopt's NVFP4 beside them."""
    return {**block, **_HYBRID}


def relabelled_block(plan: Plan, *, inputs: bool = False) -> dict[str, Any]:
    """The config's block with each MXFP4 group in NVFP4, weights only or with `inputs` too. Raises
    PlanError for a group that is another format."""
    config = next(c for c in plan.checkpoint.quantization_configs if states_mxfp4(c.block))
    groups = config.block.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise PlanError(f"{config.where}: compressed-tensors without config_groups")
    made = {}
    for key, group in groups.items():
        weights = group.get("weights") or {}
        found = weights.get("type"), weights.get("num_bits"), weights.get("group_size")
        if found != ("float", 4, MX_BLOCK):
            raise PlanError(
                f"{config.where}: {key} is {found[1]}-bit {found[0]} in groups of {found[2]}; only "
                "models whose groups are all MXFP4 are relabelled"
            )
        made[key] = group_config(group.get("targets") or [], inputs=inputs)
    return {**config.block, "format": "nvfp4-pack-quantized", "config_groups": made}
