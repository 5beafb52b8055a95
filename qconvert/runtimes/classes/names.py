"""Names of a checkpoint and the parameters of a rank that they go to, by the table of a class.

A tensor goes where the table puts its module, under its own last name: `q_proj.weight_scale` is a part
of `qkv_proj.weight_scale` because `q_proj.weight` is one of `qkv_proj.weight`. What a class does where
there is no such parameter was tried in it, too (`Record.outcome`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from qconvert.core.dtypes import Shape, TensorType
from qconvert.runtimes.classes.build import Built, captured, filled, pattern_of
from qconvert.runtimes.classes.record import Module, Name, Place, Record
from qconvert.runtimes.loading.building import Config
from qconvert.runtimes.loading.load_weights import PASSED, Found, Target
from qconvert.runtimes.loading.parameters import Expert, Linear, Shard
from qconvert.runtimes.loading.setting import LoadRefused, NotSimulated

# The parameters of all experts that hold their three matrices, gate and up in one.
_HELD = {"w1": "w13_", "w3": "w13_", "w13": "w13_", "w2": "w2_"}
_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.")
_CACHE = ("k_scale", "v_scale", "q_scale")
_FLOATS = ("BF16", "F16", "F32")


@dataclass
class RecordedNames:
    """Names of one class on one rank. `skipped`: last names that the runtime passes over whatever the
    class; `waiting`: tensors that are concatenated with another, by the parameter."""

    built: Built
    skipped: tuple[str, ...] = ()
    missing: list[str] = field(default_factory=list)
    waiting: dict[str, tuple[str, TensorType]] = field(default_factory=dict)
    stacked: bool = False
    experts: int = field(init=False)
    record: Record = field(init=False)

    def __post_init__(self) -> None:
        self.experts = self.built.experts
        self.record = self.built.record

    def find(self, tensor: str, stored: TensorType) -> Found:
        pattern, parts = pattern_of(tensor), tensor.split(".")
        if parts[-1] in self.skipped:
            return PASSED
        found = self._name(pattern, parts)
        if found is not None:
            return self._whole(*found, tensor, stored)
        found = self._name(pattern.rpartition(".")[0], parts[:-1])
        if found is not None:
            return self._of_module(*found, tensor, stored)
        if pattern in self._passed or pattern.startswith(self._starts):
            return PASSED
        if not {pattern, pattern.rpartition(".")[0]}.isdisjoint(self.record.refused):
            raise LoadRefused("", "", tensor, "the class does not load experts in this form")
        place = self._beside(tensor, pattern)
        if place is None:
            raise NotSimulated(f"{tensor} is not among the names that its class was recorded with")
        return self._nowhere(tensor, tensor, parts[-1], place)

    def _beside(self, tensor: str, pattern: str) -> Place | None:
        """The kind of tensors of checkpoints that most classes have no parameter for, and that were
        offered to each; None for another."""
        if tensor.startswith("mtp."):
            return "draft"
        if pattern.endswith("rotary_emb.inv_freq"):
            return "rotary"
        if tensor == "lm_head.weight":
            return "head"
        for container, count in self.built.layers.counts.items():
            number = tensor.removeprefix(f"{container}.").partition(".")[0]
            if tensor.startswith(f"{container}.") and number.isdecimal() and int(number) >= count:
                return "next_layer"
        return None

    @cached_property
    def _sources(self) -> Mapping[str, Sequence[Name]]:
        found: dict[str, list[Name]] = {}
        for name in self.record.names:
            found.setdefault(pattern_of(name.source), []).append(name)
        return found

    @cached_property
    def _passed(self) -> frozenset[str]:
        return frozenset(one for one in self.record.passed if not one.endswith(".*"))

    @cached_property
    def _starts(self) -> tuple[str, ...]:
        return tuple(one[:-1] for one in self.record.passed if one.endswith(".*")) or ("\0",)

    def _name(self, pattern: str, parts: Sequence[str]) -> tuple[Name, list[int]] | None:
        """The destination of a pattern, in the kind of layer that it is of, and the numbers in it."""
        for one in self._sources.get(pattern, ()):
            numbers = captured(one.source, parts)
            if numbers is None:
                continue
            at = self.built.layers.container(one.to)
            layer = numbers[0] if at else None
            if layer is not None and layer >= self.built.layers.counts[at]:
                return None
            if layer is not None and layer not in self.built.layers.owns[at]:
                return one, numbers
            if self.built.layers.has(at, layer, one.variants):
                return one, numbers
        return None

    def _elsewhere(self, name: Name, numbers: Sequence[int], parameter: str) -> bool:
        """Tell whether a tensor is of a module that another stage builds."""
        layers = self.built.layers
        at = layers.container(name.to)
        if at:
            return numbers[0] not in layers.owns[at]
        here = self.built.modules
        return parameter not in here and filled(name.to, numbers) not in here

    def _of_module(
        self, name: Name, numbers: Sequence[int], tensor: str, stored: TensorType
    ) -> Found:
        to, leaf = filled(name.to, numbers), tensor.rpartition(".")[2]
        parameter = f"{to}.{leaf}"
        if self._elsewhere(name, numbers, parameter):
            return PASSED
        if leaf in _CACHE:
            held = f"{to.rpartition('.')[0]}.attn.{leaf}"
            return (Target(held),) if held in self.built.build.parameters else PASSED
        module = self.built.modules.get(to)
        if module is not None and module.kind == "experts":
            return self._expert(name, tensor, numbers, leaf)
        if (
            name.rows
            and stored.dtype not in _FLOATS
            and not self._keeps_blocks(name, module, parameter)
        ):
            raise NotSimulated(
                f"{name.source}: its class moves rows, and of codes that was not seen"
            )
        place: Place = "linear" if module is not None else "parameter"
        if module is not None and module.kind in ("qkv", "merged", "merged_replicated"):
            place = "fused"
        if module is not None and module.kind == "replicated" and module.parts:
            return self._joined(name, parameter, tensor, leaf, stored)
        return self._there(parameter, tensor, leaf, place, _part(name), _turned(name, stored))

    def _keeps_blocks(self, name: Name, module: Module | None, parameter: str) -> bool:
        """Tell whether rows of codes are moved within the blocks that share a scale."""
        if name.rows != "moved in heads" or module is None or not parameter.endswith(".weight"):
            return False
        scales = self.built.build.parameters.get(f"{parameter}_scale_inv")
        block = scales.slot.block if scales is not None and isinstance(scales.slot, Linear) else 0
        return bool(block) and block % self.built.sizes.of(module.sizes[3]) == 0

    def _joined(
        self, name: Name, parameter: str, tensor: str, leaf: str, stored: TensorType
    ) -> Found:
        """Nothing for the first of two tensors that a class concatenates, both for the second."""
        other = self.waiting.pop(parameter, None)
        if other is None:
            self.waiting[parameter] = tensor, stored
            return PASSED
        beside, first = other
        if not stored.shape and not first.shape:
            joined: Shape = ()
        elif stored.shape[1:] != first.shape[1:] or not stored.shape or not first.shape:
            raise LoadRefused(
                "RuntimeError", "", tensor, f"{stored} and {first} cannot be concatenated"
            )
        else:
            joined = stored.shape[0] + first.shape[0], *stored.shape[1:]
        found = self._there(parameter, tensor, leaf, "linear", None, joined)
        return [replace(target, beside=beside) for target in found]

    def _there(
        self,
        parameter: str,
        tensor: str,
        leaf: str,
        place: Place,
        shard: Shard,
        part: Shape | None = None,
    ) -> Found:
        """The target, if it is there; a parameter that is another one is passed over."""
        if parameter in self.built.build.parameters:
            return (Target(parameter, shard, part),)
        if parameter in self.built.build.aliases:
            return PASSED
        return self._nowhere(parameter, tensor, leaf, place)

    def _nowhere(self, parameter: str, tensor: str, leaf: str, place: Place) -> Found:
        outcome = self.record.outcome(place, leaf)
        if outcome == "error":
            raise LoadRefused(
                "", "", tensor,
                f"the class builds no parameter {parameter}: it is built as if stored in another form",
            )  # fmt: skip
        if outcome == "warn":
            self.missing.append(parameter)
        return PASSED

    def _expert(self, name: Name, tensor: str, numbers: Sequence[int], leaf: str) -> Found:
        """A matrix of one expert, or its scales."""
        number = numbers[-1] if len(numbers) > name.to.count("*") else self.experts
        if number >= self.experts:
            raise NotSimulated(f"{tensor}: the config counts {self.experts} experts")
        shard, held = _matrix(number, name.shard), _HELD[str(name.shard)]
        parameter = f"{filled(name.to, numbers)}.{held}{leaf}"
        return self._there(parameter, tensor, leaf, "experts", shard)

    def _whole(self, name: Name, numbers: Sequence[int], tensor: str, stored: TensorType) -> Found:
        """A tensor that the table names itself: a plain parameter, or a stack of all experts."""
        to = filled(name.to, numbers)
        if self._elsewhere(name, numbers, to):
            return PASSED
        if name.stack:
            self.stacked = True
            parameter = f"{to}.{name.leaf or _HELD[str(name.shard)] + 'weight'}"
            if parameter not in self.built.build.parameters:
                return self._there(parameter, tensor, "weight", "experts", None)
            return self._stack(name, parameter, tensor, stored)
        parameter = f"{to}.{name.leaf}" if name.leaf else to
        leaf = parameter.rpartition(".")[2]
        return self._there(parameter, tensor, leaf, "parameter", _part(name), _turned(name, stored))

    def _stack(self, name: Name, parameter: str, tensor: str, stored: TensorType) -> Found:
        """The matrices of all experts, gate and up in halves."""
        if len(stored.shape) != 3 or stored.shape[0] != self.experts:
            raise LoadRefused(
                "", "", tensor, f"expected {self.experts} experts in 3 dimensions, found {stored}"
            )
        rows, columns = stored.shape[1:]
        if name.transposed:
            rows, columns = columns, rows
        if name.shard != "w13":
            part = rows, columns
            return [Target(parameter, _matrix(i, name.shard), part) for i in range(self.experts)]
        half = rows // 2, columns
        return [
            Target(parameter, _matrix(i, which), half)
            for which in ("w1", "w3")
            for i in range(self.experts)
        ]


def check_draft(config: Config, tensors: Iterable[str]) -> None:
    """Raise NotSimulated for a folder with a draft: of a class without a draft's table, nothing is known
    of it."""
    layers = config.get("num_hidden_layers")
    for name in tensors:
        match = _LAYER.match(name)
        behind = match is not None and type(layers) is int and int(match[1]) >= layers
        if behind or name.startswith("mtp."):
            raise NotSimulated("its class of drafts was not recorded")


def _matrix(number: int, shard: object) -> Expert:
    """One of the three matrices of an expert."""
    return number, "w1" if shard == "w1" else "w3" if shard == "w3" else "w2"


def _part(name: Name) -> Shard:
    """The part of a fused module, None for all of it."""
    if name.shard == "across":
        raise NotSimulated(f"{name.source}: it fills a part of a part, which there is no rule for")
    return None if name.shard == "all" else name.shard


def _turned(name: Name, stored: TensorType) -> Shape | None:
    """The shape of a tensor that the class transposes, or takes dimensions of 1 from."""
    if name.rows == "squeezed":
        return tuple(size for size in stored.shape if size != 1)
    return stored.shape[::-1] if name.rows == "transposed" else None
