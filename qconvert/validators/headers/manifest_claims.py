"""qconvert.json against tensors and config: its claims must be true.

QC051 it says that linear attention is fused (or split) in an order that the tensors cannot be in.
QC053 it contradicts tensors or config.
QC054 what it says about a pipeline stage does not match the folder.
QC055 a tensor that it lists as dropped is present.
QC092, QC093, QC094: see conversions.

QC052, in projections, checks whether the model's class takes the stated form and order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qconvert.checkpoint.checkpoint import MANIFEST, Checkpoint
from qconvert.core.errors import PlanError
from qconvert.core.names import is_scale
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, Need, NotChecked
from qconvert.validators.headers.conversions import quantizing_claims
from qconvert.validators.reading.decode import FP8
from qconvert.validators.reading.model import (
    LINEAR_ATTENTION,
    Stage,
    forms_in,
    holds,
    stage_of,
)

FACT = "gdn_groups"
_ELSEWHERE = "elsewhere:"  # prefix of rules that leave a tensor to another folder


@dataclass(frozen=True)
class ManifestClaims:
    """Each claim on its own."""

    name: str = "manifest_claims"
    proves: str = "qconvert.json agrees with tensors and config"
    needs: frozenset[Need] = frozenset()

    def __call__(self, folder: Folder) -> Iterator[Finding]:
        checkpoint = folder.checkpoint
        manifest = checkpoint.manifest
        if manifest is None:
            raise NotChecked(f"the folder has no {MANIFEST}")
        yield from _stage(checkpoint)
        yield from _dropped(checkpoint, manifest)
        yield from _other_claims(checkpoint, manifest)
        yield from quantizing_claims(checkpoint, manifest)
        if "amx" not in manifest:
            yield from _fused_order(checkpoint, manifest)


# --- Linear attention ----------------------------------------------------------------------------


def _fused_order(checkpoint: Checkpoint, manifest: dict[str, Any]) -> Iterator[Finding]:
    gdn = checkpoint.role_index.dims.gdn
    fused = split = None
    for where, present in forms_in(checkpoint).items():
        if where.forms is LINEAR_ATTENTION:
            fused = fused or next(iter(present.fused.values()), None)
            split = split or next(iter(present.split.values()), None)
    groups = manifest.get(FACT)
    if groups is None or gdn is None:
        return
    if type(groups) is not int or groups < 0 or (groups and (gdn[0] % groups or gdn[1] % groups)):
        message = f"{FACT} is {groups!r}, which does not divide {gdn[0]} key heads"
        yield Finding("QC051", "error", MANIFEST, message)
        return
    if groups and split is not None and fused is None:
        message = f"is split, but {MANIFEST} says fused in {groups} groups"
        yield Finding("QC051", "error", split, message)
    elif not groups and fused is not None and split is None:
        yield Finding("QC051", "error", fused, f"is fused, but {MANIFEST} says split")


# --- Stages --------------------------------------------------------------------------------------


def _stage(checkpoint: Checkpoint) -> Iterator[Finding]:
    try:
        stage = stage_of(checkpoint)
    except PlanError as error:
        yield Finding("QC054", "error", MANIFEST, str(error))
        return
    if stage is None:
        return
    dims = checkpoint.role_index.dims
    if sum(stage.partition) != dims.num_layers:
        message = (
            f"the partition {list(stage.partition)} adds up to {sum(stage.partition)} layers, but "
            f"config.json counts {dims.num_layers}"
        )
        yield Finding("QC054", "error", MANIFEST, message)
    wanted = ",".join(map(str, stage.partition))
    for variable, value in stage.environment.items():
        if value != wanted:
            message = f"{variable} is said to be {value!r}, but the partition is {wanted}"
            yield Finding("QC054", "error", MANIFEST, message)
    yield from _of_other_stages(checkpoint, stage)


def _of_other_stages(checkpoint: Checkpoint, stage: Stage) -> Iterator[Finding]:
    """Layers of the model that another stage owns. Modules without a layer may be in several stages."""
    role_index = checkpoint.role_index
    for name, place in role_index.places.items():
        role = place.role
        draft = role.name.startswith("mtp.")
        if role.name.startswith("vision.") or (place.layer is None and not draft):
            continue
        if not holds(stage, place.layer, draft=draft):
            span = f"{stage.layers.start} to {stage.layers.stop - 1}"
            message = f"belongs to another stage than {stage.number}, which owns layers {span}"
            yield Finding("QC054", "error", name, message)


# --- The rest ------------------------------------------------------------------------------------


def _dropped(checkpoint: Checkpoint, manifest: dict[str, Any]) -> Iterator[Finding]:
    for rule, names in manifest["dropped"].items():
        if rule.startswith(_ELSEWHERE):
            continue  # a tensor of the same name was made again
        for name in names:
            if isinstance(name, str) and name in checkpoint:
                message = f"is present, but {MANIFEST} says it was dropped ({rule})"
                yield Finding("QC055", "error", name, message)


def _other_claims(checkpoint: Checkpoint, manifest: dict[str, Any]) -> Iterator[Finding]:
    dims = checkpoint.role_index.dims
    layers = manifest.get("layers")
    if type(layers) is int and layers != dims.num_layers:
        message = f"config.json counts {dims.num_layers} layers, but {MANIFEST} {layers}"
        yield Finding("QC053", "error", "config.json", message)
    if any(step.get("name") == "dequant" for step in manifest["passes"]):
        for name, source in checkpoint.items():
            if source.type.dtype in FP8 and not is_scale(name):
                message = f"is {source.type}, but {MANIFEST} says it was dequantized"
                yield Finding("QC053", "error", name, message)
    yield from _draft_count(checkpoint, manifest)
    yield from _reading(checkpoint, manifest)
    pair = manifest.get("pair")
    if pair is not None:
        yield from _pair(checkpoint, manifest, pair)


def _reading(checkpoint: Checkpoint, manifest: dict[str, Any]) -> Iterator[Finding]:
    """The class or the file that the folder is read by now must be the one that it was made by."""
    made, now = manifest.get("reading"), checkpoint.reading
    if made is not None and now is not None and now.fact != made:
        message = f"says it was made {_as_stated(made)}, and it is read {_as_stated(now.fact)}"
        yield Finding("QC053", "warning", MANIFEST, message)


def _as_stated(reading: Mapping[str, str]) -> str:
    if "architecture" in reading:
        return f"with --architecture {reading['architecture']}"
    return f"with --family {reading['family_file']} (sha256 {reading['sha256'][:12]})"


def _draft_count(checkpoint: Checkpoint, manifest: dict[str, Any]) -> Iterator[Finding]:
    """Draft layers that were all dropped must not be counted: runtimes would look for them. Another
    folder may hold those of a stage or of a pair."""
    dims, family = checkpoint.role_index.dims, checkpoint.family
    if "stage" in manifest or "amx" in manifest or not dims.mtp_layers:
        return
    gone = [
        name
        for rule, names in manifest["dropped"].items()
        if not rule.startswith(_ELSEWHERE)
        for name in names
        if isinstance(name, str) and family.is_mtp(name, dims) and name.endswith(".weight")
    ]
    if gone and not any(family.is_mtp(name, dims) for name in checkpoint):
        message = (
            f"counts {dims.mtp_layers} draft layers, but {MANIFEST} says they were dropped, "
            f"{gone[0]!r} among them"
        )
        yield Finding("QC053", "error", "config.json", message)


def _pair(checkpoint: Checkpoint, manifest: dict[str, Any], pair: Any) -> Iterator[Finding]:
    side = pair.get("side") if isinstance(pair, dict) else None
    if side not in ("cpu", "gpu"):
        message = f"expected `pair` to say which side this is, cpu or gpu, found {pair!r}"
        yield Finding("QC053", "error", MANIFEST, message)
    elif (side == "cpu") != ("amx" in manifest):
        message = f"says this is the {side} side, but the folder is the other one"
        yield Finding("QC053", "error", MANIFEST, message)
    elif side == "gpu" and not any(
        name.endswith((".weight_packed", ".qweight")) for name in checkpoint
    ):
        message = "says this is the gpu side, but no expert is packed"
        yield Finding("QC053", "error", MANIFEST, message)


VALIDATOR = ManifestClaims()
