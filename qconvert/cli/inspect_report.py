"""A checkpoint as text for people (one screen) and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.prepared import own_role
from qconvert.cli.plan_report import MOST_ROWS, some, unknown_names
from qconvert.core.shown import count, format_size
from qconvert.formats.base import FolderTensors
from qconvert.formats.registry import label as label_of
from qconvert.hub.card.front import base_model_of
from qconvert.hub.readme import source_front
from qconvert.plan.pass_options import recipe_line
from qconvert.validators.headers.structure import in_no_form


def quantization_lines(checkpoint: Checkpoint) -> list[str]:
    """One line for each quantization block."""
    lines = []
    for found in checkpoint.quantization_configs:
        block = found.block.get("weight_block_size")
        size = f", blocks of {'x'.join(map(str, block))}" if isinstance(block, list) else ""
        fmt = found.block.get("fmt") or found.block.get("format") or found.block.get("quant_algo")
        lines.append(f"{found.where}: {found.method or '?'}{f' {fmt}' if fmt else ''}{size}")
    return lines


def inspect_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint as its headers and config describe it."""
    dims = checkpoint.role_index.dims
    dtypes: dict[str, dict[str, int]] = {}
    for source in checkpoint.values():
        entry = dtypes.setdefault(source.type.dtype, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += source.type.nbytes
    folder, known = FolderTensors.of(checkpoint), checkpoint.role_index.places
    stored: dict[str, dict[str, int]] = {}
    roles: dict[str, dict[str, int]] = {}
    for name, source in checkpoint.items():
        role = known[name].role.name if name in known else own_role(name)
        for table, key in ((stored, label_of(folder, name, source.type.dtype)), (roles, role)):
            if key is not None:
                entry = table.setdefault(key, {"tensors": 0, "bytes": 0})
                entry["tensors"] += 1
                entry["bytes"] += source.type.nbytes
    return {
        "path": checkpoint.name,
        "model_type": checkpoint.config.get("model_type"),
        "family": checkpoint.family.name,
        "layers": dims.num_layers,
        "experts": dims.num_experts,
        "mtp_layers": dims.mtp_layers,
        "files": len(checkpoint.shards),
        "tensors": len(checkpoint),
        "bytes": checkpoint.nbytes,
        "dtypes": dtypes,
        "formats": stored,
        "roles": roles,
        "unknown": unknown_names(checkpoint),
        "missing": in_no_form(checkpoint, checkpoint.absent()),
        "quantization": quantization_lines(checkpoint),
        "side_files": list(checkpoint.side_files),
        "denied_files": list(checkpoint.denied_files),
        "warnings": list(checkpoint.warnings),
        "made_by": checkpoint.manifest,
        "made_from": _base(checkpoint),
    }


def _base(checkpoint: Checkpoint) -> str | None:
    """The repo of the source that qconvert made the folder from, as its card names it."""
    return None if checkpoint.manifest is None else base_model_of(source_front(checkpoint))


def inspect_stages(whole: Checkpoint, folders: Sequence[Path]) -> dict[str, Any]:
    """`inspect_json` of all stages of a split as one checkpoint, with an entry for each stage. Raises
    CheckpointError."""
    opened = [Checkpoint.open(folder, follow_links=whole.follow_links) for folder in folders]
    manifests = [checkpoint.manifest or {} for checkpoint in opened]
    losses: dict[str, int] = {}
    for manifest in manifests:
        for what, number in manifest.get("lossy_steps", {}).items():
            losses[what] = losses.get(what, 0) + number
    made = {key: value for key, value in manifests[0].items() if key != "stage"}
    return {
        **inspect_json(whole),
        "path": str(folders[0].parent),
        "missing": in_no_form(whole, whole.role_index.absent()),
        "made_by": {**made, "lossy_steps": losses},
        "stages": [
            {
                "folder": checkpoint.root.name,
                "number": manifest["stage"]["number"],
                "layers": manifest["stage"].get("layers"),
                "tensors": len(checkpoint),
                "bytes": checkpoint.nbytes,
            }
            for checkpoint, manifest in zip(opened, manifests, strict=True)
        ],
    }


def inspect_lines(model_line: str, found: Mapping[str, Any]) -> list[str]:
    """`inspect_json` as text."""
    lines = [
        model_line,
        (
            f"{found['path']}: {count(found['files'], 'file')}, "
            f"{count(found['tensors'], 'tensor')}, "
            f"{format_size(found['bytes'])}"
        ),
        *(
            f"stage {s['number']}  {s['folder']}: layers {_range(s['layers'])}, "
            f"{count(s['tensors'], 'tensor')}, {format_size(s['bytes'])}"
            for s in found.get("stages", ())
        ),
        *(f"quantized  {line}" for line in found["quantization"]),
        *_counted("dtype", found["formats"]),
        *_counted("role", found["roles"]),
    ]
    for label, names in (
        ("unknown", found["unknown"]),
        ("missing", found["missing"]),
        ("side files", found["side_files"]),
        ("not copied", found["denied_files"]),
    ):
        if names:
            lines.append(f"{label}: {len(names)}: {some(names)}")
    lines += [f"warning: {text}" for text in found["warnings"]]
    if found["made_by"] is not None:
        lines += provenance_lines(found["made_by"], found["made_from"])
    return lines


def _range(layers: Any) -> str:
    """`0-14` of [0, 15]."""
    return f"{layers[0]}-{layers[1] - 1}" if isinstance(layers, list) and len(layers) == 2 else "?"


def _counted(label: str, table: Mapping[str, Mapping[str, int]]) -> list[str]:
    rows = sorted(table.items(), key=lambda item: -item[1]["bytes"])
    shown, rest = rows[:MOST_ROWS], rows[MOST_ROWS:]
    lines = [
        f"{label:<5} {name:<32} {entry['tensors']:>7} {format_size(entry['bytes']):>10}"
        for name, entry in shown
    ]
    if rest:
        lines.append(
            f"{label:<5} {len(rest)} more with {format_size(sum(e['bytes'] for _, e in rest))}"
        )
    return lines


# --- qconvert.json in words: what is not as qconvert writes it is omitted -------------------------

_MOST_FACTS = 6


def provenance_lines(manifest: Mapping[str, Any], base: str | None) -> Iterator[str]:
    """Return which conversion made a folder, from what, and what a user must know about the result.
    `base` is the source's repo, if the folder's card names it."""
    identity = _map(manifest, "identity")
    steps = [step for step in _list(manifest, "passes") if isinstance(step, Mapping)]
    specs = "; ".join(map(recipe_line, steps)) or "none: copied unchanged"
    yield f"made by qconvert {identity.get('qconvert')}, passes: {specs}"
    digest = str(identity.get("source", "?"))[:16]
    yield f"made from {base or 'a source without a known repo'} (headers {digest})"
    losses = _map(manifest, "lossy_steps")
    for what, number in list(losses.items())[:_MOST_FACTS]:
        yield f"lossy: {what} ({count(number, 'time') if isinstance(number, int) else number})"
    if not losses:
        yield "lossy: no step"
    for rule, names in list(_map(manifest, "dropped").items())[:_MOST_FACTS]:
        if isinstance(names, list):
            yield f"dropped: {count(len(names), 'tensor')} by {rule!r}"
    yield from _facts(manifest)


def _facts(manifest: Mapping[str, Any]) -> Iterator[str]:
    groups = manifest.get("gdn_groups")
    if isinstance(groups, int):
        order = "split" if groups == 0 else f"fused in {count(groups, 'group')}"
        yield f"linear-attention projections: {order}"
    amx = _map(manifest, "amx")
    if amx:
        nodes = amx.get("numa")
        where = count(nodes, "NUMA node") if isinstance(nodes, int) else "NUMA nodes"
        yield (
            f"experts for CPU kernels: {amx.get('method')} for {where}, "
            f"{amx.get('rounding')} rounding; other layers are read from the GPU side"
        )
    pair = _map(manifest, "pair")
    if pair:
        yield f"{pair.get('side')} side of the pair {pair.get('id')}"
    stage = _map(manifest, "stage")
    layers = _list(stage, "layers")
    if len(layers) == 2 and all(isinstance(n, int) for n in layers):
        number, of, (first, stop) = stage.get("number"), stage.get("of"), layers
        cut = ",".join(map(str, _list(stage, "partition")))
        yield (
            f"pipeline stage {number} of {of}, counted from 0: layers {first} to {stop - 1} "
            f"(partition {cut})"
        )
    calibration = _map(manifest, "calibration")
    if calibration:
        data = f"data {str(calibration.get('data'))[:16]}"
        if calibration.get("synthetic"):
            data = "random tokens, not for serving"
        samples, length = calibration.get("samples"), calibration.get("length")
        number = count(samples, "sample") if isinstance(samples, int) else "samples"
        yield f"calibrated on at most {number} of up to {length} tokens, {data}"
    prepared = _map(manifest, "trtllm_gen")
    if prepared:
        sizes = ", ".join(map(str, _list(prepared, "tp_sizes")))
        yield (
            f"experts prepared for trtllm-gen ({prepared.get('dialect')}), for tensor parallel {sizes}; "
            "qconvert unprepare restores the source"
        )


def _map(of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = of.get(key)
    return found if isinstance(found, Mapping) else {}


def _list(of: Mapping[str, Any], key: str) -> list[Any]:
    found = of.get(key)
    return found if isinstance(found, list) else []
