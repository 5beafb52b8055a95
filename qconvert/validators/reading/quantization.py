"""What a folder's quantization blocks say, as runtimes read them: formats, block and group sizes, and
which modules they leave out. It judges nothing; broken blocks say nothing.

Read in sglang 0.5.23 (`layers/quantization/`: fp8 takes `ignored_layers` or else
`modules_to_not_convert`, by dotted segments), vLLM 0.33 and compressed-tensors 0.19 (`re:` patterns,
full names, class names), modelopt's `hf_quant_config.json` (shell patterns).

Not a validator itself: it has no `VALIDATOR`, so discovery passes it by.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from typing import Any

from qconvert.checkpoint.checkpoint import QuantConfig
from qconvert.validators.reading.prepared import blocks_of

_FP8_METHODS = ("fp8", "fbgemm_fp8")
KNOWN_METHODS = (*_FP8_METHODS, "compressed-tensors", "modelopt")
HF_QUANT_CONFIG = "hf_quant_config.json"
# Keys of lists of modules that stay as they are, by method; the first that is there counts.
LISTS: Mapping[str, tuple[str, ...]] = {
    "fp8": ("ignored_layers", "modules_to_not_convert"),
    "fbgemm_fp8": ("ignored_layers", "modules_to_not_convert"),
    "compressed-tensors": ("ignore",),
    "modelopt": ("exclude_modules", "ignore"),
}


def blocks(configs: Iterable[QuantConfig]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every block, those inside it (`linear_fp8_config`), and those of the source that a prepared folder
    keeps, each with where it stands."""
    for config in configs:
        inner = (v for k, v in config.block.items() if k.endswith("_config"))
        for block in (config.block, *inner, *blocks_of(config)):
            if isinstance(block, Mapping):
                yield config.where, block


def weight_groups(block: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What compressed-tensors' config_groups say of weights."""
    groups = block.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights


def _pair(size: Any) -> tuple[int, int] | None:
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    return None


def fp8_blocks(configs: Iterable[QuantConfig]) -> dict[tuple[int, int], str]:
    """Every block of FP8 scales that is stated, and where first."""
    found: dict[tuple[int, int], str] = {}
    for where, block in blocks(configs):
        floats = (
            g.get("block_structure") for g in weight_groups(block) if g.get("type") == "float"
        )
        for size in (block.get("weight_block_size"), *floats):
            pair = _pair(size)
            if pair is not None:
                found.setdefault(pair, where)
    return found


def states_mxfp4(configs: Iterable[QuantConfig]) -> bool:
    """Whether 4-bit floats in groups of 32 are stated (compressed-tensors 0.19,
    `mxfp4-pack-quantized`)."""
    kinds = (
        (g.get("type"), g.get("num_bits"), g.get("group_size"))
        for _, block in blocks(configs)
        for g in weight_groups(block)
    )
    return ("float", 4, 32) in kinds


def states_ue8m0(configs: Iterable[QuantConfig]) -> bool:
    """Whether U8 scales are said to be exponents."""
    return any(block.get("scale_fmt") == "ue8m0" for _, block in blocks(configs))


@dataclass(frozen=True, slots=True)
class Ints:
    """Packed whole numbers of `bits`, a scale for each `group` columns (None: for a row)."""

    bits: int
    group: int | None


def packed_ints(configs: Iterable[QuantConfig]) -> Ints | None:
    """The one form of packed weights that compressed-tensors blocks state, None for none or several."""
    found = {
        Ints(g["num_bits"], g["group_size"] if g.get("strategy") == "group" else None)
        for config in configs
        for g in weight_groups(config.block)
        if g.get("type") == "int"
        and g.get("num_bits") in (2, 4, 8)
        and (g.get("strategy") == "channel" or type(g.get("group_size")) is int)
    }
    return found.pop() if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class PackedInts:
    """How packed integers are stored, by a config: `bits` 4 or 8, a scale for each `group` columns
    (None: for a row), zero points unless `symmetric`; `ordered`: which group a column is of is stored
    beside (g_idx)."""

    bits: int
    group: int | None
    symmetric: bool
    ordered: bool


def ints_of(configs: Iterable[QuantConfig], module: str) -> PackedInts | None:
    """What compressed-tensors blocks (0.19) say of a packed module: the one form that all integer
    groups have, or that of those whose targets name it. None where there is none, or several."""
    found = [(stated, entries) for config in configs for stated, entries in _packed_groups(config)]
    forms = {stated for stated, _ in found}
    if len(forms) > 1:
        forms = {stated for stated, listed in found if listed.names(module)}
    return forms.pop() if len(forms) == 1 else None


def _packed_groups(config: QuantConfig) -> Iterator[tuple[PackedInts, Listed]]:
    groups = config.block.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or weights.get("type") != "int":
            continue
        size, bits = weights.get("group_size"), weights.get("num_bits")
        by_row = weights.get("strategy") == "channel"
        if bits not in (4, 8) or not (by_row or (type(size) is int and size > 0)):
            continue
        named = group.get("targets")
        entries = tuple(n for n in named if isinstance(n, str)) if isinstance(named, list) else ()
        stated = PackedInts(
            bits,
            None if by_row else size,
            weights.get("symmetric", True) is not False,
            weights.get("actorder") == "group",
        )
        yield stated, Listed("compressed-tensors", entries)


def gptq_block(configs: Iterable[QuantConfig]) -> QuantConfig | None:
    """The block of GPTQ's own form."""
    return next((config for config in configs if config.method == "gptq"), None)


def gptq_ints(configs: Iterable[QuantConfig]) -> tuple[PackedInts, int] | None:
    """What a block of GPTQ's own form says (AutoGPTQ 0.7, GPTQModel), and its version: 1 stores zero
    points less one. None where there is none, or one that cannot be meant."""
    config = gptq_block(configs)
    if config is None:
        return None
    block = config.block
    bits, size = block.get("bits"), block.get("group_size")
    version = {"gptq": 1, "gptq_v2": 2}.get(block.get("checkpoint_format", "gptq"))
    if bits not in (4, 8) or type(size) is not int or (size < 1 and size != -1) or version is None:
        return None
    group = None if size == -1 else size
    ordered = bool(block.get("desc_act"))
    return PackedInts(bits, group, block.get("sym", True) is not False, ordered), version


def scheme(config: QuantConfig) -> tuple[Any, ...]:
    """What a block says of the format, comparable with another's."""
    block = config.block
    if config.method == "compressed-tensors":
        keys = ("type", "num_bits", "strategy", "group_size", "block_structure")
        return config.method, *sorted(
            repr([g.get(k) for k in keys]) for g in weight_groups(config.block)
        )
    algorithm = block.get("quant_algo") if config.method == "modelopt" else None
    return config.method, _pair(block.get("weight_block_size")), algorithm


@dataclass(frozen=True)
class Listed:
    """Entries that name modules, as one method matches them."""

    method: str
    entries: tuple[str, ...]

    @cached_property
    def _plain(self) -> frozenset[str]:
        return frozenset(entry for entry in self.entries if not entry.startswith("re:"))

    @cached_property
    def _ends(self) -> frozenset[str]:
        return frozenset(entry.rpartition(".")[2] for entry in self._plain)

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str] | None, dict[str, str]]:
        """All patterns as one, and those that are none, with what is wrong with each."""
        good: list[str] = []
        broken: dict[str, str] = {}
        for entry in self.entries:
            is_shell = self.method == "modelopt"
            if entry.startswith("re:") == is_shell:
                continue
            part = translate(entry) if is_shell else entry[3:]
            try:
                re.compile(part)
                good.append(part)
            except re.error as error:
                broken[entry] = str(error)
        whole = re.compile("|".join(f"(?:{part})" for part in good)) if good else None
        return whole, broken

    @property
    def broken(self) -> dict[str, str]:
        """Entries that are no regular expressions, and why. They name nothing here; loaders fail."""
        return self._patterns[1]

    def pattern_names(self, module: str) -> bool:
        """Whether a pattern fits."""
        pattern = self._patterns[0]
        return pattern is not None and pattern.match(module) is not None

    def literal(self, module: str) -> bool:
        """Whether an entry that is no pattern fits: the name itself, or (but for compressed-tensors) a
        run of its dotted segments."""
        if module in self._plain:
            return True
        if self.method == "compressed-tensors":
            return False
        parts = module.split(".")
        if self._ends.isdisjoint(parts):
            return False
        for stop, part in enumerate(parts, 1):
            if part in self._ends and any(
                ".".join(parts[start:stop]) in self._plain for start in range(stop)
            ):
                return True
        return False

    def names(self, module: str) -> bool:
        return self.literal(module) or self.pattern_names(module)


def ignored(config: QuantConfig) -> Listed:
    """The modules a block leaves out; an empty list where it has none. GPTQ's are patterns in `dynamic`
    that begin with `-:` (GPTQModel; sglang 0.5.23 `get_dynamic_override`); where the block names what is
    quantized instead (`modules_in_block_to_quantize`), nothing is asked of others."""
    if config.method == "gptq":
        dynamic = config.block.get("dynamic")
        names = [name for name in dynamic or () if isinstance(name, str)]
        left = [f"re:{name.removeprefix('-:')}" for name in names if name.startswith("-:")]
        if config.block.get("modules_in_block_to_quantize"):
            left = ["re:"]
        return Listed(config.method, tuple(left))
    for key in LISTS.get(config.method, ()):
        value = config.block.get(key)
        if isinstance(value, list) and value:
            return Listed(config.method, tuple(entry for entry in value if isinstance(entry, str)))
    return Listed(config.method, ())


def named_targets(config: QuantConfig) -> Listed:
    """All that compressed-tensors' groups name, modules and classes; nothing of other methods."""
    found: list[str] = []
    groups = config.block.get("config_groups") if config.method == "compressed-tensors" else None
    for group in groups.values() if isinstance(groups, Mapping) else ():
        named = group.get("targets") if isinstance(group, Mapping) else None
        found += [n for n in named if isinstance(n, str)] if isinstance(named, list) else []
    return Listed(config.method, tuple(found))


def targets(config: QuantConfig) -> Listed | None:
    """The modules that compressed-tensors' groups name, None where every linear layer is one (or the
    method has no targets)."""
    listed = named_targets(config)
    every = config.method != "compressed-tensors" or "Linear" in listed.entries
    return None if every else listed


def judged(configs: Sequence[QuantConfig]) -> QuantConfig | None:
    """The block that runtimes take: config.json's first, else modelopt's file. None where it is of a
    method not known here."""
    ordered = sorted(configs, key=lambda config: config.where == HF_QUANT_CONFIG)
    return ordered[0] if ordered and ordered[0].method in KNOWN_METHODS else None
