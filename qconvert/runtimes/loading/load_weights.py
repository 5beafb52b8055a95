"""A rank's parameters, to which every tensor of the headers is offered: what is written, read, refused
or misread of a folder, for any runtime."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

from qconvert.core.dtypes import TensorType
from qconvert.core.shown import count
from qconvert.runtimes.loading.building import RankBuild
from qconvert.runtimes.loading.parameters import Experts, Parameter, Shard
from qconvert.runtimes.loading.setting import LoadRefused, Setting

T = TypeVar("T")
Config = Mapping[str, Any]
_LEFT, _WRITTEN = 1, 2
_MOST_DIGITS = 6  # of an expert's number


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter that a tensor goes to. `part`: the shape of what is taken, if not of all of it;
    `beside`: another tensor that is concatenated with it."""

    name: str
    shard: Shard = None
    part: tuple[int, ...] | None = None
    beside: str = ""


Found = Iterable[Target]
# Why a tensor reaches nothing: the class passes over it, or looks for a parameter and finds none.
PASSED: Found = ()
# The number of an expert, -1 for none, and what stands around it in a name.
_Place = tuple[int, tuple[str, str]]


class _Group(NamedTuple):
    """Tensors alike: their numbers in the order of all, their experts and types."""

    at: tuple[int, ...]
    experts: tuple[int, ...]
    stored: tuple[TensorType, ...]


class NameResolver(Protocol):
    """Names of one class; keeps what it has met."""

    missing: list[str]
    experts: int
    stacked: bool

    def find(self, tensor: str, stored: TensorType) -> Found: ...


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """A load, foreseen. `refused`: the error that ends it. `unwritten`: parameters that no tensor fills,
    with the share of their elements; those among them that the runtime computes with are `missing`.
    `unread`: tensors that reach no parameter; `ignored`: those among them for which the class looked
    and found none, which it does not pass over by rule, as over a draft's. `misread`: tensors that
    reach one in silence and wrong. `nbytes`: what the rank holds of weights. `shared_fused`: shared
    experts are loaded as routed ones."""

    setting: Setting
    refused: LoadRefused | None
    unwritten: Mapping[str, float] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    misread: Mapping[str, str] = field(default_factory=dict)
    empty: tuple[str, ...] = ()
    schemes: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, TensorType] = field(default_factory=dict)
    nbytes: int = 0
    shared_fused: bool = False

    @property
    def whole(self) -> bool:
        """Tell whether it loads, and right: every parameter that counts is written, and as it was
        stored."""
        return self.refused is None and not (self.missing or self.misread or self.empty)

    def in_groups(self, groups: int, wanted: int, names: Iterable[str]) -> SimulatedLoad:
        """The same for fused rows of linear attention in `groups` groups, where the class takes them in
        `wanted`: those of `names` that it reads are misread."""
        order = f"rows in {count(groups, 'group')}, and the class takes {count(wanted, 'group')}"
        read = frozenset(names) - frozenset(self.unread)
        fused = (n for n in read if ".in_proj_qkvz." in n or ".in_proj_ba." in n)
        return replace(self, misread={**self.misread, **dict.fromkeys(fused, order)})


class Tensors(dict[str, TensorType]):
    """A folder's tensors in some order, and what each rank asks of their names, found once for all."""

    @classmethod
    def of(cls, tensors: Mapping[str, TensorType]) -> Tensors:
        return tensors if isinstance(tensors, cls) else cls(tensors)

    @cached_property
    def by_name(self) -> Tensors:
        """Sorted."""
        names = sorted(self)
        return self if names == list(self) else Tensors((name, self[name]) for name in names)

    @cached_property
    def experts(self) -> list[_Place]:
        """Destination of each."""
        alike: dict[tuple[str, str], tuple[str, str]] = {}
        found = map(_expert_of, self)
        return [(number, alike.setdefault(around, around)) for number, around in found]

    @cached_property
    def _said(self) -> dict[str, tuple[Config, Any]]:
        return {}

    def once(self, what: str, config: Config, make: Callable[[Config, Tensors], T]) -> T:
        """Return what `make` says of these tensors under a config, asked at each size."""
        known = self._said.get(what)
        if known is None or known[0] is not config:
            known = self._said[what] = config, make(config, self)
        said: T = known[1]
        return said

    @cached_property
    def alike(self) -> Mapping[tuple[str, str], _Group]:
        """Tensors of experts whose names are alike but for the number, in order."""
        found: dict[tuple[str, str], list[tuple[int, int, TensorType]]] = {}
        pairs = zip(self.values(), self.experts, strict=True)
        for at, (stored, (expert, key)) in enumerate(pairs):
            if expert >= 0:
                found.setdefault(key, []).append((at, expert, stored))
        return {key: _Group(*zip(*members, strict=True)) for key, members in found.items()}


def offered(
    build: RankBuild,
    finder: NameResolver,
    tensors: Mapping[str, TensorType],
    asked: Setting,
    *,
    shared_fused: bool = False,
    after: Callable[[RankBuild, Mapping[str, TensorType]], None] | None = None,
) -> SimulatedLoad:
    """Offer all tensors to a rank. `after`: what the class does once all is read, which may raise
    LoadRefused."""
    read: set[str] = set()
    ignored: list[str] = []
    misread: dict[str, str] = {}
    refused = None
    whole = Tensors.of(tensors)
    done = bytearray(len(whole))  # those written like another, and those left to another rank
    try:
        for at, (name, stored) in enumerate(whole.items()):
            if done[at]:
                continue
            before = len(finder.missing)
            targets = list(finder.find(name, stored))
            if len(finder.missing) > before:
                ignored.append(name)
            for target in targets:
                said = _write(build, target, name, stored, read)
                if said:
                    misread[name] = said
            expert, key = whole.experts[at]
            if (
                0 <= expert < finder.experts
                and not finder.stacked
                and len(targets) == 1
                and name in read
                and name not in misread
            ):
                under = build.aliases.get(targets[0].name, targets[0].name)
                group, into = whole.alike[key], build.parameters[under]
                _others(group, at, expert, into, targets[0].shard, finder.experts, done)
        if after is not None:
            after(build, tensors)
    except LoadRefused as error:
        refused = error
    held = {
        **build.parameters,
        **{alias: build.parameters[name] for alias, name in build.aliases.items()},
    }
    unwritten = {
        name: parameter.unwritten
        for name, parameter in held.items()
        if parameter.unwritten and not parameter.default
    }
    return SimulatedLoad(
        asked, refused, unwritten,
        tuple(
            name
            for name in unwritten
            if held[name].lacks and name not in build.aliases and name not in build.borrowed
        ),
        tuple(
            name for name, how in zip(whole, done, strict=True) if how != _WRITTEN and name not in read
        ),
        tuple(ignored), misread,
        tuple(name for name, parameter in held.items() if 0 in parameter.shape), build.schemes,
        {name: TensorType(made.dtype, made.shape) for name, made in held.items()},
        sum(made.nbytes for name, made in build.parameters.items() if name not in build.borrowed),
        shared_fused,
    )  # fmt: skip


def _expert_of(name: str) -> _Place:
    """The number of the expert that a tensor is of, -1 for none, and its name without it."""
    before, found, after = name.partition(".experts.")
    number, _, rest = after.partition(".")
    if found and number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS:
        return int(number), (before, rest)
    return -1, ("", "")


def _others(
    group: _Group,
    at: int,
    expert: int,
    parameter: Parameter,
    shard: Shard,
    experts: int,
    done: bytearray,
) -> None:
    """Write what other experts of a layer have like a tensor that was written and read right, without
    finding names and comparing shapes again: a model has tens of thousands of such tensors."""
    slot = parameter.slot
    if not isinstance(slot, Experts) or not isinstance(shard, tuple) or shard[0] != expert:
        return
    part, size = slot.part(parameter.shape, 0, str(shard[1]))
    which = str(shard[1]) if isinstance(part, tuple) else None
    first = bisect_right(group.at, at)
    stored, rows = group.stored[first - 1], parameter.shape[0]
    places = _places(slot, experts)
    for other, one, same in zip(*(each[first:] for each in group), strict=True):
        if one >= experts or not (same is stored or same == stored):
            continue
        here = places[one]
        if here is None:
            done[other] = _LEFT
        elif here < rows:
            parameter.parts[here if which is None else (here, which)] = size
            done[other] = _WRITTEN


@lru_cache(maxsize=8)
def _places(slot: Experts, experts: int) -> list[int | None]:
    """The slot of each expert on the rank."""
    return [slot.local(expert) for expert in range(experts)]


def _write(
    build: RankBuild, target: Target, name: str, stored: TensorType, read: set[str]
) -> str | None:
    """Write what a target takes of a tensor. Returns what goes wrong in silence."""
    held = build.aliases.get(target.name, target.name)
    parameter = build.parameters[held]
    if isinstance(parameter.slot, Experts):
        expert = target.shard[0] if isinstance(target.shard, tuple) else None
        if expert is None:
            raise LoadRefused(
                "TypeError", "weight_loader() missing 3 required positional arguments", name,
                f"the class finds the experts' {held} for it, but not for which expert",
            )  # fmt: skip
        if parameter.slot.local(expert) is None:
            return None
    part = stored if target.part is None else TensorType(stored.dtype, target.part)
    try:
        said = parameter.write(part, target.shard)
    except LoadRefused as refused:
        raise LoadRefused(refused.kind, refused.says, name, refused.why) from None
    read.add(name)
    if target.beside:
        read.add(target.beside)
    return said
