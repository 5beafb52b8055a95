"""Scales of a KV cache that is kept in FP8.

QC111 a scale of the KV cache is one that runtimes do not take: of another type, without its partner, or
      beside a config that states no KV cache; or a layer of attention has none where others do, or where
      qconvert.json says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from qconvert.checkpoint.checkpoint import MANIFEST, Checkpoint, QuantConfig
from qconvert.core.names import KV_SCALES, split_parameter
from qconvert.core.roles import Kind
from qconvert.core.shown import count
from qconvert.validation.findings import Finding
from qconvert.validation.runner import KV_STATED, Folder, Need
from qconvert.validators.reading.quantization_tensors import of_cache
from qconvert.validators.reading.stated_schemes import layer_table

K, V = KV_SCALES
_FLOATS = ("F32", "BF16", "F16")
# What makes keys and values, in a layer.
_MAKERS = (Kind.KEY, Kind.QKV, Kind.KV_UP)


@dataclass(frozen=True)
class KvCache:
    """Names, types and shapes; values: `values` (QC068)."""

    name: str = "kv_cache"
    proves: str = "scales of the KV cache are as runtimes take them"
    needs: frozenset[Need] = frozenset({"model", "kv-cache"})

    def __call__(self, folder: Folder) -> Iterator[Finding]:
        checkpoint = folder.checkpoint
        scales = [n for n in checkpoint if n.endswith(KV_SCALES) and of_cache(checkpoint, n)]
        layers: dict[str, set[str]] = {}
        for name in scales:
            kind = checkpoint[name].type
            if kind.dtype not in _FLOATS or kind.numel != 1:
                message = f"expected one number of F32, found {kind}"
                yield Finding("QC111", "error", name, message)
            end = name[-len(K) :]
            module = name.removesuffix(end).removesuffix(f".{end[1]}_proj")
            layers.setdefault(module, set()).add(end)
        for module, ends in layers.items():
            if len(ends) == 1:
                (only,) = ends
                message = f"it has {only[1:]} and no {(V if only == K else K)[1:]}"
                yield Finding("QC111", "warning" if only == K else "error", module, message)
        yield from _layers_without(checkpoint, layers)
        for config in checkpoint.quantization_configs:
            blocks = [config.block]
            if layer_table(config) is not None:
                # sglang (`weight_utils.py`) reads modelopt's file too where this says nothing.
                blocks += [one.block for one in checkpoint.quantization_configs]
            silent = not any(block.get(key) for block in blocks for key in KV_STATED)
            if not (scales or silent) and _is_static(config):
                message = "states a scaled KV cache, and no scale of one is stored: runtimes use 1"
                yield Finding("QC111", "warning", config.where, message)
            if scales and silent and config.method in ("compressed-tensors", "modelopt"):
                message = (
                    f"there are {count(len(scales), 'scale')} of the KV cache, and {config.where} "
                    f"states neither {' nor '.join(KV_STATED)}: sglang reads none of them"
                )
                yield Finding("QC111", "warning", scales[0], message)


def _layers_without(checkpoint: Checkpoint, having: Collection[str]) -> Iterator[Finding]:
    """Layers of attention that lack the scales which others have, or all are said to have."""
    stated = (checkpoint.manifest or {}).get("kv_scale")
    if not having and stated is None:
        return
    index = checkpoint.role_index
    with_scales = {_place_of(module) for module in having}
    lacking: dict[str, None] = {}
    for name, place in index.places.items():
        draft = index.family.is_mtp(name, index.dims)
        tower = place.role.name.startswith("vision.")
        if place.role.kind in _MAKERS and place.layer is not None and not (draft or tower):
            module = split_parameter(name)[0].rpartition(".")[0]
            if _place_of(module) not in with_scales:
                lacking[module] = None
    if lacking:
        first = next(iter(lacking))
        why = f"{MANIFEST} says that keys and values have the scale {stated}"
        if stated is None:
            why = f"{count(len(having), 'other layer')} of attention have some"
        message = (
            f"{count(len(lacking), 'layer')} of attention have no scales of the KV cache: {why}"
        )
        yield Finding("QC111", "error", first, message)


def _is_static(config: QuantConfig) -> bool:
    scheme = config.block.get("kv_cache_scheme")
    return not (isinstance(scheme, Mapping) and scheme.get("dynamic"))


def _place_of(module: str) -> str:
    """Name before a module's layer, and the layer: runtimes hang scales at attention, at what is in
    it, or at its projections."""
    before, layers, rest = module.partition(".layers.")
    return f"{before}{layers}{rest.partition('.')[0]}"


VALIDATOR = KvCache()
