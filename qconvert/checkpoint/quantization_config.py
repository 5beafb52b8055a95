"""Quantization blocks of a config: which compressed-tensors group covers a module, and how
FP8 weights are scaled. Read from the config, never inferred from shapes: dividing rows by scale rows
is silently wrong for hundreds of ragged row counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.checkpoint.layer_schemes import (
    U8,
    LayerSchemes,
    layer_schemes,
    modelopt_weights,
    states_by_layer,
)
from qconvert.core.dtypes import TensorType, ceil_div
from qconvert.core.errors import CheckpointError, PlanError
from qconvert.core.patterns import compiled
from qconvert.core.shown import shortened

MX_BLOCK = (
    32  # columns that share an exponent in MXFP4 and MXFP8 (OCP Microscaling Formats v1.0, 5.2)
)
_MXFP4 = "mxfp4-pack-quantized"


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """FP8 scales as the config states them: in blocks, or (block None) per channel or tensor.
    `u8_exponents` says whether U8 scales are E8M0, `fnuz` that codes are those of AMD's MI300."""

    block: tuple[int, int] | None
    where: str
    u8_exponents: bool
    fnuz: bool = False


def stated_block(configs: Sequence[QuantConfig]) -> tuple[int, int] | None:
    """The `weight_block_size` that the configs state, None if none is stated in a valid form."""
    for config in configs:
        size = config.block.get("weight_block_size")
        if (
            isinstance(size, list)
            and len(size) == 2
            and all(type(n) is int and n > 0 for n in size)
        ):
            return size[0], size[1]
    return None


def grid_fault(weight: TensorType, scale: TensorType, block: tuple[int, int]) -> str | None:
    """Return what is wrong with a block-scale grid, None if it is ceil(shape / block). Per-tensor and
    per-channel scales, which have another form, are not checked."""
    *lead, rows, columns = weight.shape
    grid = (*lead, ceil_div(rows, block[0]), ceil_div(columns, block[1]))
    if scale.shape == grid or len(scale.shape) != len(grid) or scale.numel == 1:
        return None
    if scale.shape in ((*lead, rows, 1), (*lead, 1, 1)):
        return None
    return (
        f"expected a scale grid {list(grid)} for {weight} in blocks of {block[0]}x{block[1]}, found "
        f"{list(scale.shape)}"
    )


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of a list of modules as compressed-tensors matches them (`utils/match.py`): full
    names, `re:` patterns matched from the start of a name, and class names, of which a linear layer
    has two."""

    names: Mapping[str, Any]
    patterns: tuple[tuple[re.Pattern[str], Any], ...]
    of_class: Any

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Entries:
        """Raises PlanError for a pattern that is not a valid regular expression."""
        patterns = []
        for entry in sorted(entries):
            if entry.startswith("re:"):
                try:
                    patterns.append((compiled(entry[3:]), entries[entry]))
                except re.error as error:
                    raise PlanError(
                        f"{entry!r} is not a valid regular expression: {error}"
                    ) from error
        named = next((entries[name] for name in _CLASSES if name in entries), None)
        plain = {entry: one for entry, one in entries.items() if not entry.startswith("re:")}
        return cls(plain, tuple(patterns), named)

    def find(self, module: str) -> Any:
        """The value of the entry that applies to a linear layer, None if none matches: its name comes
        before patterns, of which the alphabetically first applies, and patterns before
        classes (`match_targets`)."""
        if module in self.names:
            return self.names[module]
        for pattern, one in self.patterns:
            if pattern.match(module):
                return one
        return self.of_class


# Classes of a linear layer, as they are sorted.
_CLASSES = ("Linear", "Module")


@dataclass(frozen=True, slots=True)
class Groups:
    """compressed-tensors' groups of one block, by module."""

    config: QuantConfig
    targets: Entries
    ignore: Entries
    every: tuple[Mapping[str, Any], ...]

    def weights(self, module: str) -> Mapping[str, Any] | None:
        """Return what the group that covers a linear layer states about its weights, None if none does
        or the block leaves the layer out. For a target in two groups the last group applies."""
        if self.ignore.find(module) is not None:
            return None
        found: Mapping[str, Any] | None = self.targets.find(module)
        return found


@lru_cache(maxsize=8)  # asked once for each matrix
def groups_of(checkpoint: Checkpoint) -> tuple[Groups | LayerSchemes, ...]:
    """Each block that states weights by module, in the order of the blocks: compressed-tensors' groups,
    modelopt's table of layers, Quark's configuration. Raises PlanError for a block of
    compressed-tensors without groups or with an invalid pattern."""
    found: list[Groups | LayerSchemes] = []
    for config in checkpoint.quantization_configs:
        if (by_layer := layer_schemes(config)) is not None:
            found.append(by_layer)
        if config.method != "compressed-tensors":
            continue
        groups = list(config_groups(config))
        targets = {t: weights for names, weights in groups for t in texts(names)}
        try:
            ignore = Entries.of(dict.fromkeys(texts(config.block.get("ignore")), True))
            every = tuple(weights for _, weights in groups)
            found.append(Groups(config, Entries.of(targets), ignore, every))
        except PlanError as error:
            raise PlanError(f"{config.where}: {error}") from error
    return tuple(found)


def weights_of(checkpoint: Checkpoint, module: str) -> tuple[Mapping[str, Any], str] | None:
    """Statement of the first block that covers a module about its weight, in compressed-tensors' words,
    and where; None where no block that states weights by module does. Raises PlanError as `groups_of`
    does."""
    for groups in groups_of(checkpoint):
        if (found := groups.weights(module)) is not None:
            return found, groups.config.where
    return None


def texts(value: Any) -> Iterable[str]:
    """The strings of a list in a config; none of what is no list."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def fp8_scheme(checkpoint: Checkpoint, module: str | None = None) -> Fp8Scheme:
    """The one scheme all quantization blocks agree on; for a module, if groups differ, that of the
    group that covers it. Raises PlanError for none or several."""
    if has_groups(checkpoint):
        return _agreed(checkpoint, module)
    return _of_all(checkpoint)


@lru_cache(maxsize=8)  # asked once for each matrix
def has_groups(checkpoint: Checkpoint) -> bool:
    """Return whether a block may state other weights for one module than for another."""
    return any(
        config.method == "compressed-tensors" or states_by_layer(config)
        for config in checkpoint.quantization_configs
    )


@lru_cache(maxsize=8)  # asked once for each matrix
def _of_all(checkpoint: Checkpoint) -> Fp8Scheme:
    """The scheme where no groups tell modules apart."""
    return _agreed(checkpoint, None)


def _agreed(checkpoint: Checkpoint, module: str | None) -> Fp8Scheme:
    found = [
        (_one_scheme(checkpoint, config, module), config)
        for config in checkpoint.quantization_configs
    ]
    if not found:
        raise PlanError(
            "expected a quantization_config for the FP8 weights, found none in config.json; qconvert "
            "does not guess block sizes: add the block the model was quantized with, or state it (--as "
            "fp8-block:128x128)"
        )
    first, first_config = found[0]
    for scheme, config in found[1:]:
        if scheme.block != first.block:
            raise PlanError(
                f"{first_config.where} and {config.where} disagree on the weight block "
                f"({first.block} and {scheme.block}); remove the stale one"
            )
    return first


def _is_ue8m0(block: Mapping[str, Any]) -> bool:
    return block.get("scale_fmt") == "ue8m0"


def _one_scheme(checkpoint: Checkpoint, config: QuantConfig, module: str | None) -> Fp8Scheme:
    block = config.block
    u8 = _is_ue8m0(block)
    beside = block.get("linear_fp8_config")
    if isinstance(beside, Mapping):  # for linears next to packed experts; see passes/w4a16.py
        size = beside.get("weight_block_size")
        found = None if size is None else _block_size(config, size)
        return Fp8Scheme(found, f"{config.where}.linear_fp8_config", _is_ue8m0(beside))
    own = next((g for g in groups_of(checkpoint) if g.config is config), None)
    if own is not None:
        return _of_groups(own, module)
    if config.method in ("fp8", "fbgemm_fp8", "modelopt"):
        algorithm, size = str(block.get("quant_algo", "FP8")), block.get("weight_block_size")
        stated = modelopt_weights({"quant_algo": algorithm, "group_size": block.get("group_size")})
        if config.method == "modelopt" and size is None and _is_fp8(stated):
            return _fp8_scheme(config, stated)
        # "moe_quant_algo": FP8 but for experts
        if not algorithm.startswith("FP8") and "moe_quant_algo" not in block:
            raise PlanError(f"{config.where}: expected an FP8 quant_algo, found {algorithm!r}")
        found = None if size is None else _block_size(config, size)
        return Fp8Scheme(found, config.where, u8, str(block.get("fmt", "")).endswith("fnuz"))
    raise PlanError(
        f"{config.where}: quant_method {config.method!r} is not an FP8 format qconvert reads "
        "(fp8, fbgemm_fp8, modelopt FP8, compressed-tensors float-quantized, Quark FP8)"
    )


def _of_groups(groups: Groups | LayerSchemes, module: str | None) -> Fp8Scheme:
    """The scheme of the FP8 weights of a block that states them by module."""
    where = groups.config.where
    # Integers are handled in integer_config.py; other floats next to FP8 belong to other modules.
    fp8 = [weights for weights in groups.every if _is_fp8(weights)]
    found = list(dict.fromkeys(_fp8_scheme(groups.config, weights) for weights in fp8))
    own = None
    if module is not None and (len(found) > 1 or isinstance(groups, LayerSchemes)):
        own = groups.weights(module)
    if own is not None and _is_fp8(own):
        return _fp8_scheme(groups.config, own)
    if own is not None and isinstance(groups, LayerSchemes):
        raise PlanError(f"{where}: states {described(own)} for {module!r}, which is FP8")
    if not found:
        said = ", ".join(sorted(map(described, groups.every))) or "none"
        what = "its config_groups" if isinstance(groups, Groups) else "it"
        raise PlanError(f"{where}: expected FP8 weights in {what}, found {said}")
    if len(found) > 1 and module is not None:
        how = "add a target that names it" if isinstance(groups, Groups) else "add an entry for it"
        what = "its config_groups use" if isinstance(groups, Groups) else "it states"
        raise PlanError(
            f"{where}: {what} different FP8 schemes, and none of them covers {module!r}, which is FP8: "
            f"{how}"
        )
    if len(found) > 1:
        what = "its config_groups use" if isinstance(groups, Groups) else "it states"
        raise PlanError(f"{where}: {what} different FP8 schemes")
    return found[0]


def described(weights: Mapping[str, Any]) -> str:
    """Bits and type of weights, or the name of an algorithm that is not read here."""
    if "algorithm" in weights:
        return str(weights["algorithm"])
    return f"{weights.get('num_bits')}-bit {weights.get('type')}"


def is_mxfp4(weights: Mapping[str, Any]) -> bool:
    """Return whether weights are FP4 with an exponent for 32 columns."""
    keys = ("type", "num_bits", "group_size")
    return tuple(map(weights.get, keys)) == ("float", 4, MX_BLOCK)


def states_mxfp4(block: Mapping[str, Any]) -> bool:
    """Return whether a quantization block, or a group in it, is of compressed-tensors' MXFP4 format."""
    groups = block.get("config_groups")
    every = [block, *(groups.values() if isinstance(groups, Mapping) else ())]
    return any(isinstance(one, Mapping) and one.get("format") == _MXFP4 for one in every)


def config_groups(config: QuantConfig) -> Iterator[tuple[list[Any], Mapping[str, Any]]]:
    """Targets and weights of each of compressed-tensors' groups. Raises PlanError if there are none."""
    groups = config.block.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise PlanError(f"{config.where}: compressed-tensors without config_groups")
    for key, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise PlanError(f"{config.where}: {key} states nothing about weights")
        targets = group.get("targets")
        yield targets if isinstance(targets, list) else [], weights


def _is_fp8(weights: Mapping[str, Any]) -> bool:
    return (weights.get("type"), weights.get("num_bits")) == ("float", 8)


def _fp8_scheme(config: QuantConfig, weights: Mapping[str, Any]) -> Fp8Scheme:
    strategy, block = weights.get("strategy"), None
    exponents = weights.get("scale_dtype") == U8
    if strategy == "block":
        block = _block_size(config, weights.get("block_structure"))
    elif strategy == "group" and exponents:
        block = 1, MX_BLOCK  # mxfp8-quantized, compressed-tensors
    elif strategy not in ("tensor", "channel"):
        raise PlanError(f"{config.where}: unknown FP8 weight strategy {strategy!r}")
    return Fp8Scheme(block, config.where, exponents or _is_ue8m0(config.block))


def _block_size(config: QuantConfig, size: Any) -> tuple[int, int]:
    sides = list(size) if isinstance(size, list | tuple) else []
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise PlanError(f"{config.where}: expected a weight block of two sizes, found {size!r}")
    return sides[0], sides[1]


# Ignore lists: which modules a quantization config leaves unquantized, in names every runtime matches.
# Runtimes look for a module under the name they use, fused or split: vLLM and sglang fuse at load and
# ask whether the parts are ignored, others ask for the fused name. An entry for only the fused name is
# ignored by one or the other, so all names of a set are listed together. sglang takes `ignored_layers`
# or else `modules_to_not_convert`, never both: one key is written. Which modules a conversion leaves
# unquantized is decided in matrices/unquantized.py.

_KEY = "modules_to_not_convert"
_OTHER_KEYS = ("ignored_layers", "ignore")
_SETS = (
    ("in_proj_b", "in_proj_a", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_qkvz"),
)


def complete_ignore_lists(config: Mapping[str, Any], unquantized: Iterable[str]) -> dict[str, Any]:
    """The config with the ignore list of every quantization block completed: wherever one name of a
    set is listed all are, and so are the sets of the `unquantized` modules. Order is kept; new names
    follow the first of their set. Configs without a quantization block are returned as they are."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("quantization_config", "compression_config") and isinstance(value, Mapping):
            changed[key] = _block(value, list(unquantized))
        elif isinstance(value, Mapping) and key.endswith("_config"):
            changed[key] = complete_ignore_lists(value, unquantized)
        else:
            changed[key] = value
    return changed


def _block(block: Mapping[str, Any], unquantized: list[str]) -> dict[str, Any]:
    """compressed-tensors' and modelopt's key is `ignore`; the fp8 dialects get
    `modules_to_not_convert`."""
    key = "ignore" if block.get("quant_method") in ("compressed-tensors", "modelopt") else _KEY
    listed: list[Any] = []
    for name in (key, *(k for k in (_KEY, *_OTHER_KEYS) if k != key)):
        value = block.get(name)
        listed += value if isinstance(value, list) else []
    kept = {k: v for k, v in block.items() if k not in (_KEY, *_OTHER_KEYS)}
    names = _completed([*listed, *unquantized])
    return {**kept, key: names} if names or key in block else kept


def _completed(names: list[Any]) -> list[Any]:
    found: dict[Any, None] = {}
    for name in names:
        if not isinstance(name, str):
            raise CheckpointError(
                f"config.json: expected names of modules in the ignore list, found "
                f"{shortened(repr(name), 80)}; fix or remove the entry"
            )
        found[name] = None
        # A pattern of compressed-tensors ends in `$` or not; its siblings end alike.
        body, dollar = (name[:-1], "$") if name.endswith("$") else (name, "")
        for members in _SETS:
            fitting = [member for member in members if _ends(body, member)]
            if fitting:
                stem = body.removesuffix(max(fitting, key=len))
                found.update(dict.fromkeys(f"{stem}{member}{dollar}" for member in members))
    return list(found)


def _ends(name: str, member: str) -> bool:
    """Return whether the last component of a dotted name or pattern is `member`."""
    return name == member or name.endswith(("." + member, "*" + member))


def renamed_modules(config: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """The config with module names that begin with `old` renamed to begin with `new`: lists follow their
    tensors."""
    return {key: _renamed(value, old, new) for key, value in config.items()}


def _renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, Mapping):
        return renamed_modules(value, old, new)
    if isinstance(value, list):
        return [_renamed(inner, old, new) for inner in value]
    if isinstance(value, str) and value.startswith(old):
        return new + value.removeprefix(old)
    return value
