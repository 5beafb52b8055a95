"""Statements of modelopt and Quark about the weights of each module, in the words of compressed-tensors
(`quantization/quant_args.py`: type, num_bits, strategy, group_size, block_structure, scale_dtype).

Read in nvidia-modelopt 0.46 (`torch/export/quant_utils.py`), amd-quark 0.13
(`torch/quantization/config/config.py`, `torch/utils/pack.py`), and as vLLM (`modelopt.py`:
`_resolve_quant_algo`; `quark/quark.py`: `_find_matched_config`) and sglang find a module in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from qconvert.checkpoint.auto_round import METHOD as AUTO_ROUND
from qconvert.checkpoint.auto_round import auto_round_block
from qconvert.checkpoint.checkpoint import QuantConfig
from qconvert.core.names import experts_module, with_fused_names

Weights = Mapping[str, Any]

U8 = "torch.uint8"
_FP8: Weights = {"type": "float", "num_bits": 8}
_FP8_BLOCKS: Weights = {**_FP8, "strategy": "block", "block_structure": [128, 128]}
_NVFP4: Weights = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
_MX: Weights = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": U8}
# By modelopt's name of an algorithm; one that is not here is not read.
_ALGORITHMS: Mapping[str, Weights] = {
    "FP8": {**_FP8, "strategy": "tensor"},
    "FP8_PER_CHANNEL_PER_TOKEN": {**_FP8, "strategy": "channel"},
    "FP8_PB_WO": _FP8_BLOCKS,
    "FP8_PB_REAL": _FP8_BLOCKS,
    "FP8_BLOCK_SCALES": _FP8_BLOCKS,
    "MXFP8": {**_MX, "num_bits": 8},
    "NVFP4": _NVFP4,
    "NVFP4_AWQ": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "W4A8_MXFP4_FP8": {**_MX, "num_bits": 4},
}
# Prefixes under which runtimes and exporters name the language model's modules.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_MOST_PATTERNS = 64  # in one regular expression; Python's have 100 groups at most


@dataclass(frozen=True, slots=True)
class LayerSchemes:
    """One block by module: `find` gives what it states about a module's weight, None for nothing;
    `every`: all that it states, once each. What is not read here has no `type`, and its name as
    `algorithm`."""

    config: QuantConfig
    every: tuple[Weights, ...]
    find: Callable[[str], Weights | None]

    def weights(self, module: str) -> Weights | None:
        """Return what the block states about a linear layer's weight, None for nothing."""
        return self.find(module)


def layer_schemes(config: QuantConfig) -> LayerSchemes | None:
    """The block of modelopt's MIXED_PRECISION, of Quark, or of AutoRound, by module; None for any other.
    Raises PlanError for an invalid rule of AutoRound."""
    table = config.block.get("quantized_layers")
    if config.method == "modelopt" and isinstance(table, Mapping):
        return _modelopt(config, table)
    if config.method == AUTO_ROUND:
        block = auto_round_block(config)
        return LayerSchemes(config, block.every, block.weights)
    return _quark(config) if config.method == "quark" else None


def states_by_layer(config: QuantConfig) -> bool:
    """Return whether `layer_schemes` reads the block."""
    return config.method in ("quark", AUTO_ROUND) or (
        config.method == "modelopt" and isinstance(config.block.get("quantized_layers"), Mapping)
    )


def _once(every: Iterable[Weights]) -> tuple[Weights, ...]:
    return tuple({repr(one): one for one in every}.values())


# --- modelopt ------------------------------------------------------------------------------------


def modelopt_weights(entry: Mapping[str, Any]) -> Weights:
    """The weights of an algorithm of modelopt. Blocks of FP8 are squares of `group_size`, or 128."""
    name, size = str(entry.get("quant_algo") or "").upper(), entry.get("group_size")
    found = _ALGORITHMS.get(name, {"algorithm": name or "none"})
    if found is _FP8_BLOCKS and type(size) is int and size > 0:
        return {**found, "block_structure": [size, size]}
    return found


def _modelopt(config: QuantConfig, table: Mapping[str, Any]) -> LayerSchemes:
    """`quantized_layers`: names of modules, of what runtimes fuse them to, or of what they are in, as
    files or as runtimes prefix them, or shell patterns of such names. Stacks of experts have the one
    statement that is made of all experts of their layer."""
    known: dict[str, Weights] = {}
    alike: dict[str, Weights] = {}  # of the many entries of experts few differ
    for name, entry in table.items():
        if isinstance(entry, Mapping):
            known[name] = alike.setdefault(repr(entry), modelopt_weights(entry))
    layers: dict[str, list[Weights]] = {}
    for name, one in known.items():
        if one not in (held := layers.setdefault(experts_module(name) or "", [])):
            held.append(one)
    patterns = _Patterns([(name, one) for name, one in known.items() if set(name) & set("*?[")])

    def find(module: str) -> Weights | None:
        for name in _spelled(module):
            while name:
                if (found := known.get(name)) is not None:
                    return found
                name = name.rpartition(".")[0]
        found = next((one for name in _spelled(module) if (one := patterns.find(name))), None)
        alike = (layers.get(experts_module(name) or "-", ()) for name in _spelled(module))
        return found or next((one[0] for one in alike if len(one) == 1), None)

    return LayerSchemes(config, _once(alike.values()), find)


def _spelled(module: str) -> Iterator[str]:
    """The names that a table may have for a module, its own first."""
    names = with_fused_names([module])
    yield from names
    if module.endswith(".lm_head"):
        yield "lm_head"
    prefix = next((one for one in _PREFIXES if module.startswith(one)), None)
    for other in _PREFIXES if prefix is not None else ():
        if other != prefix and prefix is not None:
            yield from (other + name.removeprefix(prefix) for name in names)


# --- Quark ---------------------------------------------------------------------------------------


def _quark(config: QuantConfig) -> LayerSchemes:
    """`layer_quant_config`, in the order of its names and shell patterns, before
    `layer_type_quant_config` of linear layers, before `global_quant_config`."""
    block = config.block
    layers, export = block.get("layer_quant_config"), block.get("export")
    reorder = not isinstance(export, Mapping) or export.get("pack_method") != "order"
    named = [
        (name, quark_weights(one, reorder=reorder))
        for name, one in (layers if isinstance(layers, Mapping) else {}).items()
    ]
    kinds = block.get("layer_type_quant_config")
    linear = kinds.get("Linear") if isinstance(kinds, Mapping) else None
    rest = quark_weights(linear or block.get("global_quant_config"), reorder=reorder)
    patterns = _Patterns([(name, one) for name, one in named if one])
    every = _once(one for one in (*(one for _, one in named), rest) if one)
    return LayerSchemes(config, every, lambda module: patterns.find(module) or rest or None)


def quark_weights(layer: object, *, reorder: bool) -> Weights:
    """Weights of one of Quark's layer configs, {} for none. `reorder`: INT4 words hold outputs in
    AutoAWQ's order."""
    stated = layer.get("weight") if isinstance(layer, Mapping) else None
    steps = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not steps or not all(isinstance(one, Mapping) for one in steps):
        return {} if not steps else {"algorithm": repr(stated)}
    found = _quark_weights(steps) or {"algorithm": _described(steps)}
    return {**found, "reorder": reorder} if found.get("type") == "int" else found


def _quark_weights(steps: list[Mapping[str, Any]]) -> Weights | None:
    first = steps[0]
    kind, scheme, size = (first.get(key) for key in ("dtype", "qscheme", "group_size"))
    exponents = first.get("scale_format") == "e8m0" or first.get("scale_type") == "float8_e8m0fnu"
    if len(steps) == 2:
        last = (steps[1].get("dtype"), steps[1].get("qscheme"))
        two = (kind, scheme, size) == ("fp4", "per_group", 16)
        return _NVFP4 if two and last == ("fp8_e4m3", "per_tensor") else None
    if len(steps) > 1:
        return None
    bits = {"fp4": 4, "fp8_e4m3": 8, "fp8_e5m2": 8}.get(str(kind))
    if bits is not None and scheme == "per_group" and exponents and size == 32:
        return {**_MX, "num_bits": bits}
    if bits == 8:
        strategy = {"per_tensor": "tensor", "per_channel": "channel", "per_block": "block"}
        found = {**_FP8, "strategy": strategy.get(str(scheme), scheme)}
        if scheme == "per_block":
            found["block_structure"] = first.get("block_size")
        return {**found, "scale_dtype": U8} if exponents else found
    if kind in ("int4", "uint4", "int8", "uint8"):
        strategy = {"per_tensor": "tensor", "per_channel": "channel", "per_group": "group"}
        return {
            "type": "int", "num_bits": 4 if "4" in kind else 8, "strategy": strategy.get(str(scheme)),
            "group_size": size if scheme == "per_group" else None, "signed": kind.startswith("int"),
            "symmetric": first.get("symmetric") is not False,
        }  # fmt: skip
    return None


def _described(steps: list[Mapping[str, Any]]) -> str:
    parts = ("dtype", "qscheme", "group_size")
    every = (" ".join(str(s[key]) for key in parts if s.get(key) is not None) for s in steps)
    return " and ".join(every)


class _Patterns:
    """Names and shell patterns of names, of which the first that matches applies."""

    def __init__(self, entries: list[tuple[str, Weights]]) -> None:
        self._parts: list[tuple[re.Pattern[str], list[Weights]]] = []
        for start in range(0, len(entries), _MOST_PATTERNS):
            part = entries[start : start + _MOST_PATTERNS]
            whole = re.compile("|".join(f"({translate(name)})" for name, _ in part))
            self._parts.append((whole, [weights for _, weights in part]))

    def find(self, module: str) -> Weights | None:
        for pattern, weights in self._parts:
            found = pattern.match(module)
            if found is not None and found.lastindex is not None:
                return weights[found.lastindex - 1]
        return None
