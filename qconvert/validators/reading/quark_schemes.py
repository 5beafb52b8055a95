"""Statements of AMD Quark's block about weights, in the words of compressed-tensors
(validators/reading/stated_schemes.py), and in the order in which vLLM asks for a module
(`quark/quark.py`, `_find_matched_config`): `layer_quant_config`, then `layer_type_quant_config` of
linear layers, then `global_quant_config`.

Format source: amd-quark 0.13 (`torch/quantization/config/config.py`; `torch/utils/pack.py`; scales:
`torch/export/nn/modules/realquantizer.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import translate
from typing import Any

from qconvert.validators.reading.forms import Weights

_FLOATS = {"fp4": 4, "fp8_e4m3": 8, "fp8_e5m2": 8}
_INTS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
_STRATEGIES = {
    "per_tensor": "tensor", "per_channel": "channel", "per_group": "group", "per_block": "block",
}  # fmt: skip


def quark_groups(block: Mapping[str, Any], every: str) -> Iterator[tuple[list[str], Weights]]:
    """Targets and what is stated about their weights, the first that fits first; `every` is the target
    of all linear layers. Layers without a statement about weights are none."""
    layers, kinds = block.get("layer_quant_config"), block.get("layer_type_quant_config")
    for name, layer in layers.items() if isinstance(layers, Mapping) else ():
        found = quark_weights(layer)
        if found is not None:
            yield [f"re:{translate(name)}" if set(name) & set("*?[") else name], found
    linear = kinds.get("Linear") if isinstance(kinds, Mapping) else None
    found = quark_weights(linear or block.get("global_quant_config"))
    if found is not None:
        yield [every], found


def quark_weights(layer: object) -> Weights | None:
    """Weights by one layer's statement, and whether activations have stored scales (`inputs`); no type
    for those that are not read here; None where it states nothing about weights."""
    if not isinstance(layer, Mapping) or layer.get("weight") is None:
        return None
    steps = _steps(layer["weight"])
    found = {} if steps is None else _weights(steps)
    if not found:
        return {"stated": repr(layer["weight"])[:80]}
    given = _steps(layer.get("input_tensors"))
    return {
        **found,
        "inputs": bool(given) and any(not one.get("is_dynamic") for one in given or ()),
    }


def _steps(stated: object) -> list[Mapping[str, Any]] | None:
    """Quantizations one after another: of NVFP4 the last is that of its block scales."""
    found: list[Any] = stated if isinstance(stated, list) else [stated]
    return found if all(isinstance(one, Mapping) for one in found) else None


def _weights(steps: list[Mapping[str, Any]]) -> dict[str, Any]:
    first, *rest = steps
    kind, size = str(first.get("dtype")), first.get("group_size")
    strategy = _STRATEGIES.get(str(first.get("qscheme")))
    if rest:
        last = [(one.get("dtype"), one.get("qscheme")) for one in rest]
        if (kind, strategy, size, last) != ("fp4", "group", 16, [("fp8_e4m3", "per_tensor")]):
            return {}
        return {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    bits = _FLOATS.get(kind) or _INTS.get(kind)
    if bits is None or strategy is None:
        return {}
    found: dict[str, Any] = {
        "type": "float" if kind in _FLOATS else "int",
        "num_bits": bits,
        "strategy": strategy,
    }
    powers = first.get("scale_format") == "e8m0" or first.get("scale_type") == "float8_e8m0fnu"
    if powers:
        found["scale_dtype"] = "torch.uint8"
    if strategy == "block":
        found["block_structure"] = first.get("block_size")
    if strategy == "group":
        if kind in _FLOATS and not (powers and size == 32):
            return {}
        found["group_size"] = size
    if kind in _INTS:
        found |= {
            "symmetric": first.get("symmetric") is not False,
            "signed": kind.startswith("int"),
        }
    return found
