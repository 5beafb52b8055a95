"""MXFP4 matrices of a plan, in compressed-tensors' form, under NVFP4's scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, apply
from qconvert.formats.mxfp4 import MX_BLOCK, ExponentRange, RelabelBlocks, RelabelOwn
from qconvert.formats.nvfp4.config import NAMES, group_config
from qconvert.ops.fp4 import Dialect
from qconvert.plan.plan import Plan

_FORMAT = "mxfp4-pack-quantized"


def mxfp4_modules(plan: Plan) -> list[str]:
    """Modules whose weights are MXFP4 in compressed-tensors' form, [] where the config states none."""
    if not any(_formats(c.block) & {_FORMAT} for c in plan.checkpoint.quantization_configs):
        return []
    suffix = ".weight_packed"
    return [
        name.removesuffix(suffix)
        for name, output in plan.tensors.items()
        if name.endswith(suffix) and output.type.dtype == "U8"
    ]


def _formats(block: Mapping[str, Any]) -> set[Any]:
    groups = block.get("config_groups")
    found = [block.get("format")]
    if isinstance(groups, Mapping):
        found += [g.get("format") for g in groups.values() if isinstance(g, Mapping)]
    return {entry for entry in found if isinstance(entry, str)}


def relabelled(plan: Plan, modules: tuple[str, ...], dialect: Dialect) -> dict[str, Output]:
    """The tensors of matrices that share a scale, by name. Raises PlanError naming one that is none."""
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
    (own,) = apply(RelabelOwn(dialect), *ranges)
    made: dict[str, Output] = {}
    for module in modules:
        blocks = apply(RelabelBlocks(dialect), plan.tensors[f"{module}.weight_scale"], own)[0]
        made[f"{module}.{names.weight}"] = plan.tensors[f"{module}.weight_packed"]
        made[f"{module}.{names.scale}"] = blocks
        made[f"{module}.{names.global_scale}"] = own.reshape(names.scalar)
    return made


def relabelled_block(plan: Plan) -> dict[str, Any]:
    """The config's block with each MXFP4 group in NVFP4, weights only. Raises PlanError for a group
    that is another format."""
    (config,) = [c for c in plan.checkpoint.quantization_configs if _formats(c.block) & {_FORMAT}][
        :1
    ]
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
                f"models whose groups are all MXFP4 are relabelled"
            )
        made[key] = group_config(group.get("targets") or [], inputs=False)
    return {**config.block, "format": "nvfp4-pack-quantized", "config_groups": made}
