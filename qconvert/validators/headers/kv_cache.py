"""Scales of a KV cache that is kept in FP8.

QC111 a scale of the KV cache is one that runtimes do not take: of another type, without its partner, or
      beside a config that states no KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.core.names import KV_SCALES
from qconvert.core.shown import count
from qconvert.validation.findings import Finding, Rule
from qconvert.validation.runner import Folder, Need
from qconvert.validators.reading.parts import of_cache

RULES = (
    Rule(
        "QC111",
        "a scale of the KV cache is one that runtimes do not take",
        "sglang 0.5.23 and vLLM 0.33 take one float for the keys of a layer and one for its values; of "
        "values alone they fail, of keys alone they use the one for both. Where a config of "
        "compressed-tensors or modelopt states no KV cache, sglang builds no parameter for either, and "
        "uses 1.",
        "Convert again with --kv-scale, or add kv_cache_scheme to the quantization_config.",
    ),
)
K, V = KV_SCALES
_FLOATS = ("F32", "BF16", "F16")
_STATED = ("kv_cache_scheme", "kv_cache_quant_algo")


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
        for config in checkpoint.quantization_configs:
            silent = not any(config.block.get(key) for key in _STATED)
            if scales and silent and config.method in ("compressed-tensors", "modelopt"):
                message = (
                    f"there are {count(len(scales), 'scale')} of the KV cache, and {config.where} "
                    f"states neither {' nor '.join(_STATED)}: sglang reads none of them"
                )
                yield Finding("QC111", "warning", scales[0], message)


VALIDATOR = KvCache()
