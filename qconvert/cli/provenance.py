"""qconvert.json in words. The file may be anyone's: what is not as qconvert writes it is omitted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qconvert.core.shown import count
from qconvert.plan.pass_options import recipe_line

_MOST = 6


def provenance_lines(manifest: Mapping[str, Any], base: str | None) -> Iterator[str]:
    """Return which conversion made a folder, from what, and what a user must know about the result.
    `base` is the source's repo, if the folder's card names it."""
    identity = _map(manifest, "identity")
    steps = [step for step in _list(manifest, "passes") if isinstance(step, Mapping)]
    specs = "; ".join(map(recipe_line, steps)) or "none: a plain copy"
    yield f"made by qconvert {identity.get('qconvert')}, passes: {specs}"
    digest = str(identity.get("source", "?"))[:16]
    yield f"made from {base or 'a source without a known repo'} (headers {digest})"
    losses = _map(manifest, "lossy_steps")
    for what, number in list(losses.items())[:_MOST]:
        yield f"lossy: {what} ({count(number, 'time') if isinstance(number, int) else number})"
    if not losses:
        yield "lossy: no step"
    for rule, names in list(_map(manifest, "dropped").items())[:_MOST]:
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
        yield f"calibrated on {number} of up to {length} tokens, {data}"
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
