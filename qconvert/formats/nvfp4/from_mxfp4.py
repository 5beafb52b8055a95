"""MXFP4 matrices of a plan, in compressed-tensors' form, under NVFP4's scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.checkpoint.quantization_config import states_mxfp4
from qconvert.core.encodings import Dialect
from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply
from qconvert.formats.mxfp4.limits import MX_BLOCK
from qconvert.formats.nvfp4.config import NAMES, group_config
from qconvert.formats.nvfp4.relabel import ExponentRange, RelabelBlocks, RelabelOwn
from qconvert.plan.plan import Plan


def relabelled(plan: Plan, modules: tuple[str, ...], dialect: Dialect) -> dict[str, Output]:
    """The tensors of matrices that share a scale, by name. Raises PlanError naming a matrix that is not
    MXFP4."""
    names = NAMES[dialect]
    ranges = []
    for module in modules:
        weight, scale = f"{module}.weight_packed", f"{module}.weight_scale"
        if scale not in plan.tensors:
            raise PlanError(f"{scale!r} is missing")
        try:
            ranges.append(apply(ExponentRange(), plan.tensors[weight], plan.tensors[scale])[0])
        except PlanError as error:
            raise PlanError(f"{module}: {error}") from error
    (global_scale,) = apply(RelabelOwn(dialect), *ranges)
    made: dict[str, Output] = {}
    for module in modules:
        blocks = apply(
            RelabelBlocks(dialect), plan.tensors[f"{module}.weight_scale"], global_scale
        )[0]
        made[f"{module}.{names.weight}"] = plan.tensors[f"{module}.weight_packed"]
        made[f"{module}.{names.scale}"] = blocks
        made[f"{module}.{names.global_scale}"] = global_scale.reshape(names.scalar)
    return made


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
