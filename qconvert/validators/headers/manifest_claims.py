"""qconvert.json against tensors and config: its claims must be true.

QC051 it says that linear attention is fused (or split) in an order that the tensors cannot be in.
QC053 it contradicts tensors or config.
QC054 what it says about a pipeline stage does not match the folder.
QC055 a tensor that it lists as dropped is present.
QC092 it states a tensor-parallel size at which no rank gets whole groups.
QC093 weights were calibrated on synthetic tokens.
QC094 its calibration entry is invalid, or contradicts what it states about the weights.

QC052, in projections, checks whether the model's class takes the stated form and order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from qconvert.checkpoint.checkpoint import MANIFEST, Checkpoint
from qconvert.core.errors import PlanError
from qconvert.core.names import is_scale
from qconvert.core.roles import Cut
from qconvert.validation.findings import Finding
from qconvert.validation.runner import Folder, NotChecked, validator
from qconvert.validators.reading.decode import FP8
from qconvert.validators.reading.matrices import matrices
from qconvert.validators.reading.model import LINEAR_ATTENTION, Stage, forms_in, holds, stage_of
from qconvert.validators.reading.pruned import EXPERTS_RULE, ROWS_RULE

CALIBRATION = "calibration"  # of the manifest
_DIGEST = re.compile(r"[0-9a-f]{32}")
_COUNTS = ("samples", "length", "block_size", "min_tokens")
_CHANNEL_STEP = 64  # of a row under one scale, what a rank has fits kernels in multiples of this


def quantizing_claims(checkpoint: Checkpoint, manifest: Mapping[str, Any]) -> Iterator[Finding]:
    """Each claim on its own."""
    yield from _calibration(manifest)
    if "amx" not in manifest:
        yield from _parallel(checkpoint, manifest)


def _calibration(manifest: Mapping[str, Any]) -> Iterator[Finding]:
    block = manifest.get("amx")
    rounding = block.get("rounding") if isinstance(block, dict) else None
    if CALIBRATION not in manifest:
        if rounding == "gptq":
            message = (
                f"says that AMX codes were calibrated, but has no `{CALIBRATION}`, which states "
                "the data"
            )
            yield Finding("QC094", "error", MANIFEST, message)
        return
    found = manifest[CALIBRATION]
    wrong = _fault(found)
    if wrong:
        yield Finding("QC094", "error", MANIFEST, f"`{CALIBRATION}`: {wrong}")
        return
    if rounding is not None and rounding != "gptq":
        message = f"`{CALIBRATION}` exists, but `amx` says that codes were rounded ({rounding})"
        yield Finding("QC094", "error", MANIFEST, message)
    if found["synthetic"]:
        message = (
            f"calibrated on synthetic tokens ({found['samples']} samples of {found['length']})"
        )
        yield Finding("QC093", "warning", MANIFEST, message)


def _fault(found: Any) -> str:
    if not isinstance(found, dict):
        return f"expected an object, found {found!r}"
    data = found.get("data")
    if not isinstance(data, str) or not _DIGEST.fullmatch(data):
        return f"expected `data` to be a digest of 32 hex digits, found {data!r}"
    if type(found.get("synthetic")) is not bool:
        return f"expected `synthetic` to be true or false, found {found.get('synthetic')!r}"
    for key in _COUNTS:
        if type(found.get(key)) is not int or found[key] < 1:
            return f"expected `{key}` to be 1 or more, found {found.get(key)!r}"
    for key, known in (("experts", ("routed", "all")), ("undersampled", ("all", "rtn"))):
        if found.get(key) not in known:
            return f"expected `{key}` to be {' or '.join(known)}, found {found.get(key)!r}"
    return ""


def _parallel(checkpoint: Checkpoint, manifest: Mapping[str, Any]) -> Iterator[Finding]:
    """For each kind of packed matrix the first that cannot be divided."""
    sizes = [
        tp
        for step in manifest["passes"]
        if step["name"] == "w4a16" and type(tp := step["options"].get("tp")) is int
    ]
    if not sizes or sizes[-1] < 1:
        return
    tp, seen = sizes[-1], set()
    for matrix in matrices(checkpoint).values():
        form = matrix.form
        if form.codes is None or form.grid is None or matrix.role in seen:
            continue
        cut = checkpoint.role_index.kind(matrix.tensor).cut
        if cut is Cut.WHOLE:
            continue
        packed_rows = form.transposed or not form.codes.symmetric
        size, step = form.rows, form.codes.word if packed_rows else 1
        what = "rows"
        if cut is Cut.COLUMNS:
            whole = form.grid.block[1] == form.columns
            size, step, what = (
                form.columns,
                _CHANNEL_STEP if whole else form.grid.block[1],
                "columns",
            )
        if tp > 1 and size % (tp * step):
            seen.add(matrix.role)
            message = (
                f"{MANIFEST} states tensor parallel {tp}: expected {what} in {tp} equal parts "
                f"of whole {step}s, found {size}"
            )
            yield Finding("QC092", "error", matrix.tensor, message)


_GROUPS = "gdn_groups"
# Prefixes of rules that leave a tensor to another folder, or to an adapter's.
_ELSEWHERE = ("elsewhere:", "merge: replaced")


@validator("qconvert.json agrees with tensors and config")
def manifest_claims(folder: Folder) -> Iterator[Finding]:
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
    groups = manifest.get(_GROUPS)
    if groups is None or gdn is None:
        return
    if type(groups) is not int or groups < 0 or (groups and (gdn[0] % groups or gdn[1] % groups)):
        message = f"{_GROUPS} is {groups!r}, which does not divide {gdn[0]} key heads"
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
        if role.vision or (place.layer is None and not draft):
            continue
        if not holds(stage, place.layer, draft=draft):
            span = f"{stage.layers.start} to {stage.layers.stop - 1}"
            message = f"belongs to another stage than {stage.number}, which owns layers {span}"
            yield Finding("QC054", "error", name, message)


# --- The rest ------------------------------------------------------------------------------------


def _dropped(checkpoint: Checkpoint, manifest: dict[str, Any]) -> Iterator[Finding]:
    for rule, names in manifest["dropped"].items():
        if rule.startswith(_ELSEWHERE) or rule in (EXPERTS_RULE, ROWS_RULE):
            continue  # a tensor of the same name was made again, or holds what is left
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
    steps = [step.get("name") for step in manifest["passes"]]
    # A step behind it may have made codes again, of which the config then states something.
    still = steps[-1:] == ["dequant"] or not checkpoint.quantization_configs
    if "dequant" in steps and still:
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
