"""Names of a checkpoint and the parameters of a rank that they go to, by the table of a class.

A tensor goes where the table puts its module, under its own last name: `q_proj.weight_scale` is a part
of `qkv_proj.weight_scale` because `q_proj.weight` is one of `qkv_proj.weight`. What a class does where
there is no such parameter was tried in it, too (`Record.outcome`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from qconvert.core.dtypes import Shape, TensorType
from qconvert.runtimes.classes.build import Built, captured, filled, numbers_of, pattern_of
from qconvert.runtimes.classes.record import Module, Name, Place, Record
from qconvert.runtimes.loading.building import Config
from qconvert.runtimes.loading.load_weights import PASSED, Found, Target
from qconvert.runtimes.loading.mxfp4 import PARAMETERS, Stack
from qconvert.runtimes.loading.parameters import Expert, Linear, Shard
from qconvert.runtimes.loading.setting import LoadRefused, NotSimulated

# The parameters of all experts that hold their three matrices, gate and up in one.
_HELD = {"w1": "w13_", "w3": "w13_", "w13": "w13_", "w2": "w2_"}
_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.")
_CACHE = ("k_scale", "v_scale", "q_scale")
# Places where a class that finds nothing has looked for a parameter.
_LOOKED_FOR = ("fused", "linear", "experts", "parameter", "module")
_OF_BLOCKS = tuple(f"proj{end}" for end in PARAMETERS)
# What vLLM's classes of DeepSeek's sparse attention dequantize.
_DEQUANTIZED = ".indexer.wk"
_FLOATS = ("BF16", "F16", "F32")


@dataclass
class RecordedNames:
    """Names of one class on one rank. `skipped`: last names that the runtime passes over whatever the
    class, `spare`: those that it passes over where they lead nowhere; `waiting`: tensors that are
    concatenated with another, by the parameter."""

    built: Built
    skipped: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
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
        if parts[-1] in self.skipped or self._is_of_model(tensor):
            return PASSED
        if self.built.build.quantization.name == "mxfp4" and parts[-1].endswith(_OF_BLOCKS):
            return self._in_blocks(pattern, parts, tensor)
        found = self._name(pattern, parts)
        if found is not None:
            return self._whole(*found, tensor, stored)
        base, _, leaf = pattern.rpartition(".")
        if places := [*self._named(base, parts[:-1])]:
            return tuple(t for one in places for t in self._of_module(*one, tensor, stored))
        if pattern in self._passed or pattern.startswith(self._starts):
            return PASSED
        if self._is_of_another_stage(tensor):
            return PASSED
        if leaf in _CACHE and (attention := self._attention(tensor)) is not None:
            return self._of_cache(attention, tensor, leaf, "fused")
        if self.record.refused.intersection((pattern, base, f"{base}.weight")):
            raise LoadRefused(
                "", "", tensor, "the class has no parameter for it, and ends the load"
            )
        place = self._beside(tensor, pattern)
        if place is None and self.record.alone:
            self.missing.append(tensor)
        if place is None and self.record.draft:
            return PASSED
        if place is None:
            raise NotSimulated(f"{tensor} is not among the names that its class was recorded with")
        return self._nowhere(tensor, tensor, leaf, place)

    def _is_of_model(self, tensor: str) -> bool:
        """Tell whether a tensor is of a layer of the model, where a draft is loaded."""
        beside = self.record.draft and not self.record.alone
        return beside and ".layers." in tensor and not self._is_own(tensor)

    def _is_own(self, tensor: str) -> bool:
        layers = self.built.sizes.flag("num_hidden_layers")
        return is_of_draft(tensor, layers if type(layers) is int else 0)

    @cached_property
    def _places(self) -> Mapping[str, str]:
        """Beginnings of names of layers in a checkpoint, and the container of each."""
        return {
            one.source.partition(".*")[0]: self.built.layers.container(one.to)
            for one in self.record.names if "*" in one.to and "*" in one.source
        }  # fmt: skip

    def _layer(self, tensor: str) -> tuple[str, int] | None:
        """The container of the layer that a tensor is of, and its number."""
        for place, container in self._places.items():
            number = tensor.removeprefix(f"{place}.").partition(".")[0]
            if container and tensor.startswith(f"{place}.") and number.isdecimal():
                return container, int(number)
        return None

    def _is_of_another_stage(self, tensor: str) -> bool:
        layers, at = self.built.layers, self._layer(tensor)
        return at is not None and at[1] in layers.numbers[at[0]] and at[1] not in layers.owns[at[0]]

    def _beside(self, tensor: str, pattern: str) -> Place | None:
        """The kind of tensors of checkpoints that most classes have no parameter for, and that were
        offered to each; None for another."""
        if self.record.draft:
            return "module" if self._is_own(tensor) else None
        if tensor.startswith("mtp."):
            return "draft"
        if pattern.endswith("rotary_emb.inv_freq"):
            return "rotary"
        if tensor == "lm_head.weight":
            return "head"
        layers, at = self.built.layers, self._layer(tensor)
        if at is None:
            return None
        numbers = layers.numbers[at[0]]
        if at[1] in numbers:
            block = pattern.removesuffix(".bias")
            if block != pattern and any(name.startswith(f"{block}.") for name in self._sources):
                raise NotSimulated(f"{tensor}: a bias of a module that has none itself")
            tried = "module" in self.record.unknown and ".experts" not in tensor
            return "module" if tried else None
        counted = at[1] < numbers.stop + layers.drafts
        return "next_layer" if counted or "behind" not in self.record.unknown else "behind"

    def _attention(self, tensor: str) -> str | None:
        """The attention module beside a linear whose tensor has scales of a cache."""
        block = tensor.rpartition(".")[0].rpartition(".")[0]
        pattern = pattern_of(block)
        inside = next((n for n in self.record.names if n.source.startswith(f"{pattern}.")), None)
        if inside is None:
            return None
        numbers = self._numbered(inside, numbers_of(block))
        held = filled(inside.to.rpartition(".")[0], numbers)
        return next((
            name for name, one in self.built.modules.items()
            if one.kind == "attention" and name.rpartition(".")[0] == held
        ), None)  # fmt: skip

    def _of_cache(self, attention: str | None, tensor: str, leaf: str, place: Place) -> Found:
        parameter = f"{attention}.{leaf}"
        if parameter in self.built.build.parameters and self.record.caches:
            return (Target(parameter),)
        return self._nowhere(parameter, tensor, leaf, place)

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
        """The first destination of a pattern."""
        return next(self._named(pattern, parts), None)

    def _named(self, pattern: str, parts: Sequence[str]) -> Iterator[tuple[Name, list[int]]]:
        """The destinations of a pattern, in the kind of layer that it is of, and the numbers in it: a
        class may copy its embeddings to a head."""
        met = set[str]()
        for one in self._sources.get(pattern, ()):
            numbers = captured(one.source, parts)
            if numbers is None or one.to in met:
                continue
            at, numbers = self.built.layers.container(one.to), self._numbered(one, numbers)
            layer = numbers[0] if at else None
            if layer is not None and layer not in self.built.layers.numbers[at]:
                return
            if layer is not None and layer not in self.built.layers.owns[at]:
                yield one, numbers
                return
            if self.built.layers.has(at, layer, one.variants):
                met.add(one.to)
                yield one, numbers

    def _numbered(self, name: Name, numbers: list[int]) -> list[int]:
        """The numbers of a destination; of a name without any that of the first layer, which a draft's
        class knows by words."""
        at = self.built.layers.container(name.to)
        return numbers or ([self.built.layers.numbers[at].start] if at else [])

    def _elsewhere(self, name: Name, numbers: Sequence[int], parameter: str) -> bool:
        """Tell whether a tensor is of a module that another stage builds."""
        if self.record.alone:
            return False
        layers = self.built.layers
        at, here = layers.container(name.to), self.built.modules
        if at and numbers[0] not in layers.owns[at]:
            return True
        return parameter not in here and filled(name.to, numbers) not in here

    def _of_module(
        self, name: Name, numbers: Sequence[int], tensor: str, stored: TensorType
    ) -> Found:
        to, leaf = filled(name.to, numbers), self.record.leaf(tensor)
        parameter = f"{to}.{leaf}"
        if self._elsewhere(name, numbers, parameter):
            return PASSED
        module = self.built.modules.get(to)
        if leaf in _CACHE:
            fused = module is not None and module.kind in ("qkv", "merged", "merged_replicated")
            return self._of_cache(
                self._attention(tensor), tensor, leaf, "fused" if fused else "linear"
            )
        if name.stack and leaf == "weight":
            return self._whole(name, numbers, tensor, stored)
        if module is not None and module.kind == "experts":
            return self._expert(name, tensor, numbers, leaf)
        if (
            name.rows not in ("", "twice")
            and stored.dtype not in _FLOATS
            and not self._keeps_blocks(name, module, parameter)
        ):
            raise NotSimulated(
                f"{name.source}: its class moves rows, and of codes that was not seen"
            )
        coded = leaf.startswith("weight_scale") or stored.dtype not in _FLOATS
        if coded and self.record.runtime == "vllm" and name.source.endswith(_DEQUANTIZED):
            return self._dequantized(f"{to}.weight", _part(name), tensor, stored)
        place: Place = "linear" if module is not None else "parameter"
        if module is not None and module.kind in ("qkv", "merged", "merged_replicated"):
            place = "fused"
        if name.rows == "twice" and isinstance(name.shard, tuple):
            return [
                target
                for shard in name.shard
                for target in self._there(parameter, tensor, leaf, place, shard)
            ]
        if module is not None and module.kind == "replicated" and module.parts:
            return self._joined(parameter, tensor, leaf, stored)
        return self._there(parameter, tensor, leaf, place, _part(name), _turned(name, stored))

    def _keeps_blocks(self, name: Name, module: Module | None, parameter: str) -> bool:
        """Tell whether rows of codes are moved within the blocks that share a scale."""
        if name.rows != "moved in heads" or module is None or not parameter.endswith(".weight"):
            return False
        scales = self.built.build.parameters.get(f"{parameter}_scale_inv")
        block = scales.slot.block if scales is not None and isinstance(scales.slot, Linear) else 0
        return bool(block) and block % self.built.sizes.of(module.sizes[3]) == 0

    def _in_blocks(self, pattern: str, parts: Sequence[str], tensor: str) -> Found:
        """A stack of MXFP4 blocks, of their scales or of biases, by the name of the stack in BF16."""
        end = next(end for end in PARAMETERS if pattern.endswith(end))
        last = parts[-1].removesuffix(end)
        found = self._name(pattern.removesuffix(end), [*parts[:-1], last])
        if found is None:
            raise NotSimulated(f"{tensor} is not among the names that its class was recorded with")
        name, numbers = found
        to, which = filled(name.to, numbers), _HELD[str(name.shard)]
        names = [f"{to}.{which}{one}{PARAMETERS[end]}" for one in ("", "weight_")]
        held = next((one for one in names if one in self.built.build.parameters), None)
        if held is None:
            return PASSED if self._elsewhere(name, numbers, names[0]) else self._nowhere(
                names[0], tensor, parts[-1], "experts"
            )  # fmt: skip
        return PASSED if self.built.build.parameters[held].default else (Target(held),)

    def _dequantized(self, parameter: str, shard: Shard, tensor: str, stored: TensorType) -> Found:
        """Nothing for the first of FP8 codes and their scales, both for the second: the class makes a
        part of an unquantized module of them (models/deepseek_v2.py, _try_load_fp8_indexer_wk)."""
        other = self.waiting.pop(parameter, None)
        if other is None:
            self.waiting[parameter] = tensor, stored
            return PASSED
        codes = max((stored, other[1]), key=lambda one: one.numel)
        found = self._there(parameter, tensor, "weight", "fused", shard, codes.shape)
        return [replace(target, beside=other[0]) for target in found]

    def _joined(self, parameter: str, tensor: str, leaf: str, stored: TensorType) -> Found:
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
        outcome = "silent" if leaf in self.spare else self.record.outcome(place, leaf)
        by_rule = (leaf == "bias" and not self.record.alone) or leaf in _CACHE
        by_rule = by_rule or place not in _LOOKED_FOR
        by_rule = by_rule or leaf in {*self.spare, *self.record.unknown.get(place, ())}
        if outcome is None:
            raise NotSimulated(f"{tensor}: its class was offered no name that leads nowhere there")
        if outcome == "error":
            raise LoadRefused(
                "", "", tensor,
                f"the class builds no parameter {parameter}: it is built as if stored in another form",
            )  # fmt: skip
        if outcome == "tied":
            held = self.built.build.aliases.get(parameter)
            if held is None:
                raise NotSimulated(f"{tensor}: its class writes it into embeddings of another name")
            return (Target(held),)
        if outcome == "warn" or (outcome == "silent" and not by_rule):
            self.missing.append(parameter)
        return PASSED

    def _expert(self, name: Name, tensor: str, numbers: Sequence[int], leaf: str) -> Found:
        """A matrix of one expert, or its scales."""
        number = (
            numbers[-1] if len(numbers) > name.to.count("*") and not name.shared else self.experts
        )
        if number >= self.experts and not name.shared and "module" in self.record.unknown:
            return self._nowhere(tensor, tensor, leaf, "module")
        if number >= self.experts and not name.shared:
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
            held = self.built.build.parameters.get(parameter)
            if held is None:
                return self._there(parameter, tensor, "weight", "experts", None)
            if isinstance(held.slot, Stack):
                return (Target(parameter),)
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


def is_of_draft(tensor: str, layers: object) -> bool:
    """Tell whether a tensor is of the draft of a model of so many layers."""
    match = _LAYER.match(tensor)
    behind = match is not None and type(layers) is int and int(match[1]) >= layers
    return behind or tensor.startswith("mtp.")


def of_draft(
    record: Record | None, config: Config, tensors: Mapping[str, TensorType]
) -> dict[str, TensorType]:
    """The tensors that the class of a draft may read: its layers, embeddings and head, or all of a draft
    that stands alone; none for a folder without such layers. Raises NotSimulated for a draft of whose
    class there is no table."""
    if record is not None and record.alone:
        return {**tensors}
    own = {name for name in tensors if is_of_draft(name, config.get("num_hidden_layers"))}
    if own and record is None:
        raise NotSimulated("its class of drafts was not recorded")
    ends = ("embed_tokens.weight", "lm_head.weight")
    return (
        {name: one for name, one in tensors.items() if name in own or name.endswith(ends)}
        if own
        else {}
    )


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
