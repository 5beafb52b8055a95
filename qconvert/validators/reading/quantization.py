"""Statements of a folder's quantization blocks, as runtimes read them: formats, block and group sizes,
and which modules they leave out. It judges nothing; broken blocks state nothing.

Read in sglang (`layers/quantization/`: fp8 takes `ignored_layers` or else
`modules_to_not_convert`, by dotted segments), vLLM and compressed-tensors (`re:` patterns,
full names, class names), modelopt's `hf_quant_config.json` (shell patterns).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.core.patterns import compiled
from qconvert.validators.reading.forms import specs
from qconvert.validators.reading.prepared import METHOD, blocks_of
from qconvert.validators.reading.stated_schemes import (
    AUTO_ROUND,
    Rules,
    Targets,
    gptq_left_out,
    layer_table,
    pair,
    stated_weights,
)

T = TypeVar("T")

_FP8_METHODS = ("fp8", "fbgemm_fp8")
KNOWN_METHODS = (*_FP8_METHODS, "compressed-tensors", "modelopt", "quark")
_WHOLE_NAMES = ("compressed-tensors", "quark")  # vLLM: `is_equal_or_regex_match`
HF_QUANT_CONFIG = "hf_quant_config.json"
_SHELL = frozenset("*?[")
_OF_DECODERS = ("model", "language_model", "layers")
# Keys of lists of modules that stay unquantized, by method; the first that is present applies.
LISTS: Mapping[str, tuple[str, ...]] = {
    "fp8": ("ignored_layers", "modules_to_not_convert"),
    "fbgemm_fp8": ("ignored_layers", "modules_to_not_convert"),
    "compressed-tensors": ("ignore",),
    "modelopt": ("exclude_modules", "ignore"),
    "quark": ("exclude",),
}


def weight_groups(config: QuantConfig) -> Iterator[Mapping[str, Any]]:
    """Everything that a block states about weights, of any module."""
    for _, weights in stated_weights(config):
        yield weights


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
        """All valid patterns as one, and the invalid ones, with what is wrong with each."""
        good: list[str] = []
        broken: dict[str, str] = {}
        for entry in self.entries:
            is_shell = self.method == "modelopt"
            if entry.startswith("re:") == is_shell or (is_shell and not _SHELL & set(entry)):
                continue
            part = translate(entry) if is_shell else entry[3:]
            try:
                re.compile(part) if is_shell else compiled(part)
                good.append(part)
            except re.error as error:
                broken[entry] = str(error)
        whole = re.compile("|".join(f"(?:{part})" for part in good)) if good else None
        return whole, broken

    @property
    def broken(self) -> dict[str, str]:
        """Entries that are not valid regular expressions, and why. They match nothing here; loaders
        fail."""
        return self._patterns[1]

    def pattern_names(self, module: str) -> bool:
        pattern = self._patterns[0]
        return pattern is not None and pattern.match(module) is not None

    def literal(self, module: str) -> bool:
        """Tell whether an entry that is not a pattern matches: the name itself, or (except for
        compressed-tensors and Quark) a run of its dotted segments."""
        if module in self._plain:
            return True
        if self.method in _WHOLE_NAMES:
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
        if self.literal(module) or self.pattern_names(module):
            return True
        # transformers' lists have the names of its modules in memory, where towers and projectors are
        # below `model` (Ministral 3); runtimes rename the list as they rename tensors.
        if self.method not in _FP8_METHODS or module.partition(".")[0] in _OF_DECODERS:
            return False
        return self.literal(f"model.{module}")


@dataclass(frozen=True)
class LeftByRules(Listed):
    """Modules that an AutoRound block leaves out, which it lists nowhere."""

    rules: Rules

    def pattern_names(self, module: str) -> bool:
        return self.rules(module) is None


def stated_for(
    checkpoint: Checkpoint, module: str, read: Callable[[Mapping[str, Any]], T | None]
) -> T | None:
    """Result of `read` for the group that covers a module; if none does, of all groups, if they
    agree. Blocks that cannot be read state nothing."""
    by_block = _all_stated(checkpoint, read)
    if len(alike := set().union(*by_block)) < 2:
        return next(iter(alike), None)  # whatever the module
    own: set[T] = set()
    every: set[T] = set()
    for block, stated in zip(blocks(checkpoint), by_block, strict=True):
        mine = block.of(module) if len(stated) > 1 else None
        one = None if mine is None else read(mine)
        if one is not None:
            own.add(one)
        else:
            every |= stated
    found = own or every
    return found.pop() if len(found) == 1 else None


@lru_cache(maxsize=32)  # called for each matrix
def _all_stated(
    checkpoint: Checkpoint, read: Callable[[Mapping[str, Any]], T | None]
) -> tuple[frozenset[T], ...]:
    """Return what `read` makes of all that each block states."""
    return tuple(
        frozenset(one for g in block.stated if (one := read(g)) is not None)
        for block in blocks(checkpoint)
    )


@dataclass(frozen=True)
class Block:
    """A quantization block by module: what it leaves out, what its targets state, and all that it states
    about weights, once each."""

    config: QuantConfig
    left: Listed
    targets: Targets
    stated: tuple[Mapping[str, Any], ...]
    # Each module is asked for by several rules.
    _known: dict[str, Mapping[str, Any] | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def of(self, module: str) -> Mapping[str, Any] | None:
        """The statement about one module's weight: None for one that the block leaves out, or does not
        name."""
        if module not in self._known:
            found = None if self.left.names(module) else self.targets.find(module)
            self._known[module] = found
        return self._known[module]


def all_weights(checkpoint: Checkpoint) -> Iterator[Mapping[str, Any]]:
    """Everything that blocks state about weights, of any module."""
    return (weights for block in blocks(checkpoint) for weights in block.stated)


@lru_cache(maxsize=8)  # called for each matrix
def blocks(checkpoint: Checkpoint) -> tuple[Block, ...]:
    """Every block, in the order in which runtimes ask them: modelopt's file last. A prepared folder's
    marker keeps the blocks that hold for the tensors that are not prepared."""
    found: list[Block] = []
    for config in sorted(checkpoint.quantization_configs, key=_comes_last):
        found += [_block(QuantConfig(config.where, kept)) for kept in blocks_of(config)]
        found.append(_block(config))
    return tuple(found)


def _block(config: QuantConfig) -> Block:
    stated = tuple({id(one): one for one in weight_groups(config)}.values())
    return Block(config, ignored(config), Targets.of(config), stated)


def scheme_of(checkpoint: Checkpoint, module: str) -> Mapping[str, Any] | None:
    """Stored form of a module's weight by the first block that covers it, whatever its method, in the
    words of compressed-tensors; None if none does."""
    return next(
        (one for block in blocks(checkpoint) if (one := block.of(module)) is not None), None
    )


def _comes_last(config: QuantConfig) -> bool:
    return config.where == HF_QUANT_CONFIG


def group_names(config: QuantConfig) -> Callable[[str], str | None]:
    """Return which of compressed-tensors' groups covers a module, by name; None: no group does."""
    groups = config.block.get("config_groups")
    by_target: dict[str, str] = {}
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        named = group.get("targets") if isinstance(group, Mapping) else None
        for target in named if isinstance(named, list) else ():
            if isinstance(target, str):
                by_target[target] = name
    names = Targets.among(((t, {"name": name}) for t, name in by_target.items()), below=False)
    left = ignored(config)

    def of(module: str) -> str | None:
        found = None if left.names(module) else names.find(module)
        return None if found is None else str(found["name"])

    return of


def group_of(checkpoint: Checkpoint, module: str) -> Mapping[str, Any] | None:
    """The compressed-tensors group that covers a module, with what it states about activations; None if
    there is none."""
    for block in blocks(checkpoint):
        mine, groups = block.of(module), block.config.block.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            if mine is not None and isinstance(group, Mapping) and group.get("weights") is mine:
                return group
    return None


def taken_block(configs: Sequence[QuantConfig]) -> QuantConfig | None:
    """The block that runtimes take, own forms among them; None if it is of a method that no rule
    reads."""
    methods = [method for spec in specs() for method in spec.methods]
    return judged(configs) or next((one for one in configs if one.method in methods), None)


def read_methods() -> tuple[str, ...]:
    """Methods that some rules read: own forms of GPTQ and AutoAWQ, gpt-oss's stacks, other packages'
    and prepared folders by rules of their own."""
    return (*KNOWN_METHODS, METHOD, *(method for spec in specs() for method in spec.methods))


def scheme(config: QuantConfig) -> tuple[Any, ...]:
    """The format by a block, comparable with another's."""
    block = config.block
    if config.method == "compressed-tensors":
        keys = ("type", "num_bits", "strategy", "group_size", "block_structure")
        return config.method, *sorted(repr([g.get(k) for k in keys]) for g in weight_groups(config))
    if config.method == "mlx":  # it states a scheme a module
        return config.method, *sorted(f"{key} {value}" for key, value in block.items())
    if config.method == "quark":
        return config.method, *sorted({repr(one) for one in weight_groups(config)})
    algorithm = block.get("quant_algo") if config.method == "modelopt" else None
    return config.method, pair(block.get("weight_block_size")), algorithm


def ignored(config: QuantConfig) -> Listed:
    """The modules a block leaves out; an empty list if there are none. GPTQ's are patterns in `dynamic`
    that begin with `-:` (GPTQModel; sglang `get_dynamic_override`); if the block names the
    quantized modules instead (`modules_in_block_to_quantize`), others are not checked."""
    if config.method == AUTO_ROUND:
        return LeftByRules(config.method, (), Rules(config.block))
    if config.method == "gptq":
        left = gptq_left_out(config.block)
        if config.block.get("modules_in_block_to_quantize"):
            left = ["re:"]
        return Listed(config.method, tuple(left))
    if config.method == "awq":  # any part of a name, as transformers and vLLM match it
        entries = config.block.get("modules_to_not_convert")
        parts = [n for n in entries if isinstance(n, str)] if isinstance(entries, list) else []
        return Listed(config.method, tuple(f"re:.*{re.escape(part)}" for part in parts))
    for key in LISTS.get(config.method, ()):
        value = config.block.get(key)
        if isinstance(value, list) and value:
            return Listed(config.method, tuple(entry for entry in value if isinstance(entry, str)))
    return Listed(config.method, ())


def named_targets(config: QuantConfig) -> Listed:
    """All that compressed-tensors' groups name, modules and classes; nothing for other methods."""
    found: list[str] = []
    groups = config.block.get("config_groups") if config.method == "compressed-tensors" else None
    for group in groups.values() if isinstance(groups, Mapping) else ():
        named = group.get("targets") if isinstance(group, Mapping) else None
        found += [n for n in named if isinstance(n, str)] if isinstance(named, list) else []
    return Listed(config.method, tuple(found))


def targets(config: QuantConfig) -> Listed | None:
    """The modules that compressed-tensors' groups or modelopt's table of layers name, None if every
    linear layer is one (or the method has no targets)."""
    table = layer_table(config)
    if table is not None:
        return Listed(config.method, tuple(table))
    listed = named_targets(config)
    every = config.method != "compressed-tensors" or "Linear" in listed.entries
    return None if every else listed


def judged(configs: Sequence[QuantConfig]) -> QuantConfig | None:
    """The block that runtimes take: config.json's first, else modelopt's file. None if it is of an
    unknown method."""
    ordered = sorted(configs, key=lambda config: config.where == HF_QUANT_CONFIG)
    return ordered[0] if ordered and ordered[0].method in KNOWN_METHODS else None
