"""Statements of quantization blocks about weights, whatever their method, in the words of one of them:
compressed-tensors (`quantization/quant_args.py`: type, num_bits, strategy, group_size,
block_structure, symmetric, actorder). `quantization.scheme_of` answers with it for a module.

Read in vLLM (`modelopt.py`: `ModelOptMixedPrecisionConfig`; `utils/gptq_utils.py`), sglang
(`layers/quantization/utils.py`: `get_dynamic_override`) and nvidia-modelopt
(`torch/export/quant_utils.py`).

AMD Quark's block is asked in the order in which vLLM asks it for a module
(`quark/quark.py`, `_find_matched_config`): `layer_quant_config`, then `layer_type_quant_config` of
linear layers, then `global_quant_config`.

Format source: amd-quark 0.13 (`torch/quantization/config/config.py`; `torch/utils/pack.py`; scales:
`torch/export/nn/modules/realquantizer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from typing import Any

from qconvert.checkpoint.checkpoint import QuantConfig
from qconvert.core.patterns import compiled
from qconvert.validators.reading.forms import Spec, Weights, specs

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


# Targets that every linear layer fits, in the order in which compressed-tensors asks for them.
CLASSES = ("Linear", "Module")
MIXED = "MIXED_PRECISION"
_FLOAT8 = {"type": "float", "num_bits": 8}  # quant_method fp8
# Prefixes under which runtimes and exporters name the language model's modules.
_WRAPPERS = ("model.language_model.", "language_model.model.", "model.")
# Modules that runtimes fuse, by the name of the whole, under which a table may have them.
_WHOLES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}


def pair(size: Any) -> tuple[int, int] | None:
    """Rows and columns of a block, None for anything else."""
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    return None


def stated_weights(config: QuantConfig) -> Iterator[tuple[list[str], Weights]]:
    """Targets of a block, and what it states about their weights."""
    block = config.block
    if config.method == "modelopt" and str(block.get("quant_algo") or "") not in ("", "None"):
        yield from _modelopt(block)
    elif config.method == "gptq":
        yield from _gptq(block)
    elif config.method == AUTO_ROUND:
        alike = {repr(w): w for w in map(auto_round_weights, (block, *Rules(block).changed()))}
        yield from (([], weights) for weights in alike.values())
    elif config.method == "quark":
        yield from quark_groups(block, CLASSES[0])
    elif config.method in ("fp8", "fbgemm_fp8"):
        size = block.get("weight_block_size")
        yield [CLASSES[0]], {**_FLOAT8, **({} if size is None else {"block_structure": size})}
    else:
        yield from grouped_weights(block)


def grouped_weights(block: Mapping[str, Any]) -> Iterator[tuple[list[str], Weights]]:
    """Targets of compressed-tensors' groups, and what they state about weights."""
    groups = block.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        names = group.get("targets") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            named = [n for n in names if isinstance(n, str)] if isinstance(names, list) else []
            yield named, weights


# --- modelopt ------------------------------------------------------------------------------------


def layer_table(config: QuantConfig) -> Mapping[str, Mapping[str, Any]] | None:
    """Each quantized module's entry in modelopt's `quantized_layers`, which names all there are, those
    of a fused one by their own names too; None for a block of one algorithm."""
    table = config.block.get("quantized_layers")
    if config.method != "modelopt" or not isinstance(table, Mapping):
        return None
    if config.block.get("quant_algo") != MIXED:
        return None
    found = {name: entry for name, entry in table.items() if isinstance(entry, Mapping)}
    for name, entry in list(found.items()):
        stem, dot, last = name.rpartition(".")
        for part in _WHOLES.get(last, ()):
            found.setdefault(f"{stem}{dot}{part}", entry)
    return found


def _modelopt(block: Mapping[str, Any]) -> Iterator[tuple[list[str], Weights]]:
    table = layer_table(QuantConfig("", block))
    if table is None:
        found = dict(_algorithm(block))
        if (size := block.get("weight_block_size")) is not None:
            found.pop("strategy", None)
            found["block_structure"] = size
        yield [CLASSES[0]], found
        return
    alike: dict[str, tuple[list[str], Weights]] = {}
    for name, entry in table.items():
        alike.setdefault(repr(entry), ([], _algorithm(entry)))[0].append(name)
    yield from alike.values()


def _algorithm(entry: Mapping[str, Any]) -> Weights:
    """The weights that an algorithm of modelopt makes, and whether activations have stored scales
    (`inputs`); no type for one that is not read here."""
    name, size = str(entry.get("quant_algo") or "").upper(), entry.get("group_size")
    found = algorithm(name)
    if found is None:
        return {"quant_algo": name}
    weights = found[1]
    if "block_structure" in weights and type(size) is int and size > 0:
        return {**weights, "block_structure": [size, size]}
    return weights


def algorithm(name: str) -> tuple[Spec, Weights] | None:
    """The format of an algorithm of modelopt, by the longest name that its name begins with, and its
    weights; None for one that is not read here."""
    found = [
        (known, spec, weights)
        for spec in specs()
        for known, weights in spec.algorithms.items()
        if name == known or name.startswith(f"{known}_")
    ]
    return max(found, key=lambda one: len(one[0]))[1:] if found else None


# --- GPTQ ----------------------------------------------------------------------------------------


def gptq_weights(block: Mapping[str, Any]) -> Weights:
    """Statements of a block of GPTQ's own form, or of a rule of its `dynamic` over it."""
    size = block.get("group_size")
    return {
        "type": "int",
        "num_bits": block.get("bits"),
        "strategy": "channel" if size == -1 else "group",
        "group_size": size,
        "symmetric": block.get("sym", True) is not False,
        "actorder": "group" if block.get("desc_act") else None,
    }


def gptq_rules(block: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """Patterns of `dynamic` and what each changes (None: it leaves modules out), in order: the first one
    that matches the beginning of a module's name applies."""
    dynamic = block.get("dynamic")
    for pattern, change in dynamic.items() if isinstance(dynamic, Mapping) else ():
        if isinstance(pattern, str) and pattern.startswith("-:"):
            yield pattern.removeprefix("-:"), None
        elif isinstance(pattern, str) and isinstance(change, Mapping):
            yield pattern.removeprefix("+:"), change


def gptq_left_out(block: Mapping[str, Any]) -> list[str]:
    """The patterns that leave modules out, each without what a rule before it takes."""
    left: list[str] = []
    before: list[str] = []
    for pattern, change in gptq_rules(block):
        if change is None:
            first = f"(?!{'|'.join(f'(?:{one})' for one in before)})" if before else ""
            left.append(f"re:{first}(?:{pattern})" if first else f"re:{pattern}")
        elif _valid(pattern):
            before.append(pattern)
    return left


def _valid(pattern: str) -> bool:
    try:
        compiled(pattern)
    except re.error:
        return False
    return True


def _gptq(block: Mapping[str, Any]) -> Iterator[tuple[list[str], Weights]]:
    for pattern, change in gptq_rules(block):
        if change is not None:
            yield [f"re:{pattern}"], gptq_weights({**block, **change})
    yield [CLASSES[0]], gptq_weights(block)


# --- AutoAWQ -------------------------------------------------------------------------------------


def awq_weights(block: Mapping[str, Any]) -> Weights:
    """Statements of a block of AutoAWQ's own form."""
    size = block.get("group_size", block.get("q_group_size"))
    return {
        "type": "int",
        "num_bits": block.get("bits", block.get("w_bit")),
        "strategy": "channel" if size == -1 else "group",
        "group_size": size,
        "symmetric": block.get("zero_point", True) is False,
    }


# --- AutoRound -----------------------------------------------------------------------------------

AUTO_ROUND = "auto-round"


def auto_round_form(block: Mapping[str, Any]) -> str:
    """The form of a block's integers by its `packing_format`: gptq, gptq_v2 or awq, "" for another. Of
    GPTQ's form, zero points are stored as they are, but by auto_gptq."""
    packing = block.get("packing_format", "auto_round:auto_gptq")
    forms = {"auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2"}
    for end in ("gptq", "gptq:exllamav2", "auto_gptq", "auto_gptq:exllamav2"):
        forms[f"auto_round:{end}"] = "gptq"
    for end in ("awq", "auto_awq"):
        forms[f"auto_round:{end}"] = "awq"
    return forms.get(str(packing), "")


def auto_round_weights(block: Mapping[str, Any]) -> Weights:
    """Statements of an AutoRound block, or of a change of its `extra_config` over it."""
    kind, size, bits = (
        str(block.get("data_type") or "int"),
        block.get("group_size"),
        block.get("bits"),
    )
    if "mx_fp" in kind:
        shared = {"type": "float", "num_bits": bits, "strategy": "group", "group_size": 32}
        return {**shared, "symmetric": True, "scale_dtype": "torch.uint8"}
    if "nv_fp" in kind:
        shared = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
        return {**shared, "symmetric": True}
    if "fp" in kind:
        if isinstance(size, list):
            return {**_FLOAT8, "strategy": "block", "block_structure": size}
        return {**_FLOAT8, "strategy": "channel" if size == -1 else "tensor"}
    return {
        "type": kind, "num_bits": bits, "strategy": "channel" if size == -1 else "group",
        "group_size": size, "symmetric": block.get("sym") is not False, "actorder": None,
    }  # fmt: skip


@dataclass(frozen=True)
class Rules:
    """`extra_config` of an AutoRound block (auto-round 0.15; vLLM `inc/config_parser.py`): changes for
    a module's name, or the end of one, then those of the first pattern found in it; 16 bits leave a
    module out, and so does a name outside of the blocks."""

    block: Mapping[str, Any]

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Mapping[str, Any]]]:
        return [
            (compiled(name), change)
            for name, change in self._extra.items()
            if set(name) & set("*+?^$()[]{}|\\") and _valid(name)
        ]

    @cached_property
    def _extra(self) -> Mapping[str, Mapping[str, Any]]:
        extra = self.block.get("extra_config")
        pairs = extra.items() if isinstance(extra, Mapping) else ()
        return {name: change for name, change in pairs if isinstance(change, Mapping)}

    @cached_property
    def _blocks(self) -> tuple[str, ...]:
        names = self.block.get("block_name_to_quantize") or self.block.get("to_quant_block_names")
        pending, found = [names], list[str]()
        while pending:
            one = pending.pop()
            pending += one if isinstance(one, list) else ()
            found += [part.strip() for part in one.split(",")] if isinstance(one, str) else ()
        return tuple(name for name in found if name)

    def __call__(self, module: str) -> Mapping[str, Any] | None:
        """The block with the changes for a module; None where it leaves the module out."""
        parts = module.split(".")
        named = [*spelled(module), *(".".join(parts[at:]) for at in range(1, len(parts)))]
        change = next((self._extra[name] for name in named if name in self._extra), None)
        inside = change is not None or parts[-1] != "lm_head"
        if change is None:
            change = next((c for pattern, c in self._patterns if pattern.search(module)), {})
            inside &= not self._blocks or any(n.startswith(self._blocks) for n in spelled(module))
        bits = change.get("bits", self.block.get("bits") if inside else 16)
        if isinstance(bits, int) and bits >= 16:
            return None
        return {**self.block, **change, "bits": bits}

    def changed(self) -> Iterator[Mapping[str, Any]]:
        """The block with each change that quantizes."""
        for change in self._extra.values():
            one = {**self.block, **change}
            if not isinstance(one.get("bits"), int) or one["bits"] < 16:
                yield one


# --- Which applies -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Targets:
    """Statements of a block's targets, by module: `named` ones; `patterns` in the order in which they
    are asked; `every` linear layer that neither names. With `below`, a name holds for all modules below
    it too. AutoRound's are asked by `rules` of their own."""

    named: Mapping[str, Weights]
    patterns: tuple[tuple[re.Pattern[str], Weights], ...]
    every: Weights | None
    below: bool
    rules: Rules | None = None

    @classmethod
    def of(cls, config: QuantConfig) -> Targets:
        """Those of a block. GPTQ's rules are in an order of their own."""
        if config.method == AUTO_ROUND:
            return cls({}, (), None, below=False, rules=Rules(config.block))
        """Those of a block. Rules of GPTQ and of Quark are in an order of their own."""
        entries = [(t, weights) for targets, weights in stated_weights(config) for t in targets]
        below = config.method == "modelopt"
        if below:
            entries = [(f"re:{translate(t)}" if set(t) & set("*?[") else t, w) for t, w in entries]
        return cls.among(entries, below=below, ordered=config.method in ("gptq", "quark"))

    @classmethod
    def among(
        cls, entries: Iterable[tuple[str, Weights]], *, below: bool, ordered: bool = False
    ) -> Targets:
        """Of a target in two groups the last group applies. compressed-tensors asks names before
        patterns, those before classes, and patterns in the order of their letters (`utils/match.py`,
        `match_targets`)."""
        each = list(entries) if ordered else sorted(dict(entries).items())
        plain = {target: weights for target, weights in each if not target.startswith("re:")}
        every = next((plain[name] for name in CLASSES if name in plain), None)
        patterns = [
            (compiled(target[3:]), weights)
            for target, weights in each
            if target.startswith("re:") and _valid(target[3:])
        ]
        return cls(plain, tuple(patterns), every, below)

    def find(self, module: str) -> Weights | None:
        """None where nothing names a module. Entries that are no valid pattern name nothing."""
        if self.rules is not None:
            stated = self.rules(module)
            return None if stated is None else auto_round_weights(stated)
        for name in spelled(module) if self.below else (module,):
            found = self.named.get(name)
            while found is None and self.below and "." in name:
                name = name.rpartition(".")[0]
                found = self.named.get(name)
            if found is not None:
                return found
        for pattern, weights in self.patterns:
            if pattern.match(module):
                return weights
        if self.below and ".experts." in module:
            return self._of_all_experts(module)
        return self.every

    def _of_all_experts(self, stack: str) -> Weights | None:
        """Statement about each expert of a layer, where it is one."""
        begins = tuple(f"{n.partition('.experts.')[0]}.experts." for n in spelled(stack))
        found = {repr(one): one for name, one in self.named.items() if name.startswith(begins)}
        return found.popitem()[1] if len(found) == 1 else self.every


def spelled(module: str) -> Iterable[str]:
    """The names that modelopt's table may have for a module (sglang `modelopt_quant.py`,
    `_quantized_layer_prefix_candidates`)."""
    yield module
    if module.endswith(".lm_head"):
        yield "lm_head"
    own = next((one for one in _WRAPPERS if module.startswith(one)), None)
    if own is not None:
        yield from (other + module.removeprefix(own) for other in _WRAPPERS if other != own)
