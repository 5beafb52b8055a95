"""The marker of a folder whose experts were prepared for one kernel library (experimental): only that
library reads them, so no other conversion takes such a folder. The layout is described in
contrib/trtllm_gen/layout.py."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qconvert.core.errors import PlanError

if TYPE_CHECKING:
    from qconvert.checkpoint.checkpoint import Checkpoint

# Not a runtime's method: a stock runtime must refuse the folder, because it would shuffle again.
QUANT_METHOD = "qconvert-trtllm-gen"
LAYOUT = "trtllm-gen"
FACT = "trtllm_gen"  # in the metadata of shards, and in qconvert.json
VERSION = 1
# Dialects of NVFP4 that a prepared folder may have been made from.
DIALECTS = ("modelopt", "compressed-tensors")
# Tensors that are computed from the source's scales.
DERIVED = ("g1_alphas", "g2_alphas", "g1_scale_c", "w13_input_scale_quant", "w2_input_scale_quant")


def says_prepared(checkpoint: Checkpoint) -> bool:
    """Return whether anything in a folder says that experts were prepared: its marker, the metadata of
    shards, the manifest, or scalars that only preparing makes. Names of weights do not: others publish
    experts as `experts.w13_weight` too (Inkling)."""
    return (
        any(config.method == QUANT_METHOD for config in checkpoint.quantization_configs)
        or FACT in checkpoint.metadata
        or FACT in (checkpoint.manifest or {})
        or not checkpoint.ends.isdisjoint(f".{name}" for name in DERIVED)
    )


def marked(
    block: Mapping[str, Any], replaced: Sequence[Mapping[str, Any]], files: Mapping[str, str]
) -> dict[str, Any]:
    """The quantization block of a prepared folder. `block` describes the layout, `replaced` are the
    source's own blocks with their places, `files` are texts with the same content."""
    found: dict[str, Any] = {
        "quant_method": QUANT_METHOD,
        "layout": {"name": LAYOUT, "version": VERSION, **block},
        "replaced": [dict(entry) for entry in replaced],
    }
    if files:
        found["files"] = dict(files)
    return found


def layout_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `layout` of a prepared folder's config, None for any other folder. Raises PlanError if
    another version wrote it or it is broken."""
    block = config.get("quantization_config")
    if not isinstance(block, Mapping) or block.get("quant_method") != QUANT_METHOD:
        return None
    layout, replaced = block.get("layout"), block.get("replaced")
    if not isinstance(layout, Mapping) or not isinstance(replaced, list):
        raise PlanError("config.json: the marker of a prepared folder is broken; prepare again")
    if (layout.get("name"), layout.get("version")) != (LAYOUT, VERSION):
        raise PlanError(
            f"config.json: expected layout {LAYOUT} version {VERSION}, found {layout.get('name')} "
            f"version {layout.get('version')}; use the qconvert that prepared it"
        )
    keys = {"gated", "projections", "scalar_shape", "num_experts", "derived_scalars"}
    if not keys <= layout.keys() or layout.get("dialect") not in DIALECTS:
        raise PlanError("config.json: the layout of a prepared folder is broken; prepare again")
    return layout


_AMX = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.\d+\.numa\.\d+\.(?:weight|scale)")
_FUSED = re.compile(r".*\.experts\.(w13|w2)_([a-z0-9_]+)")


def own_role(name: str) -> str | None:
    """The role of a tensor under a name that qconvert gave it and no family knows: experts in AMX tiles,
    experts prepared for trtllm-gen. None for any other."""
    amx = _AMX.fullmatch(name)
    if amx is not None:
        return f"experts.{amx[1]}_proj"
    fused = _FUSED.fullmatch(name)
    if fused is not None:
        return f"experts.{fused[1]}"
    module, _, last = name.rpartition(".")
    return "experts.scalars" if last in DERIVED and module.endswith(".experts") else None
