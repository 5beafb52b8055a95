"""A rank's parameters, to which every tensor of the headers is offered: what is written, read, refused
or misread of a folder, for any runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from qconvert.core.dtypes import TensorType
from qconvert.runtimes.loading.building import Build
from qconvert.runtimes.loading.parameters import Experts, Parameter, Shard
from qconvert.runtimes.loading.refusal import LoadRefused
from qconvert.runtimes.loading.setting import Setting

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


class Finder(Protocol):
    """Names of one class; keeps what it has met."""

    missing: list[str]
    experts: int
    stacked: bool

    def find(self, tensor: str, stored: TensorType) -> Found: ...


@dataclass(frozen=True, slots=True)
class Simulated:
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


def offered(
    build: Build,
    finder: Finder,
    tensors: Mapping[str, TensorType],
    asked: Setting,
    *,
    shared_fused: bool = False,
    after: Callable[[Build, Mapping[str, TensorType]], None] | None = None,
) -> Simulated:
    """Offer all tensors to a rank. `after`: what the class does once all is read, which may raise
    LoadRefused."""
    read: set[str] = set()
    ignored: list[str] = []
    misread: dict[str, str] = {}
    refused = None
    alike = _Alike(finder.experts)
    whole = Tensors.of(tensors)
    try:
        for (name, stored), place in zip(whole.items(), whole.experts, strict=True):
            if not finder.stacked and alike.takes(name, place, stored, read):
                continue
            before = len(finder.missing)
            targets = list(finder.find(name, stored))
            if len(finder.missing) > before:
                ignored.append(name)
            for target in targets:
                said = _write(build, target, name, stored, read)
                if said:
                    misread[name] = said
            if len(targets) == 1 and name in read and name not in misread:
                under = build.aliases.get(targets[0].name, targets[0].name)
                alike.learn(place, stored, build.parameters[under], targets[0].shard)
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
    return Simulated(
        asked, refused, unwritten,
        tuple(
            name
            for name in unwritten
            if held[name].needed and name not in build.aliases and name not in build.borrowed
        ),
        tuple(name for name in tensors if name not in read), tuple(ignored), misread,
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


@dataclass(frozen=True, slots=True)
class _Known:
    """A tensor that was written and read right: where to, and how many elements. `which` of an expert's
    matrices, where a parameter holds several."""

    stored: TensorType
    parameter: Parameter
    slot: Experts
    which: str | None
    size: int


class _Alike:
    """Experts of a layer, which are loaded alike: what one did is done for the others without finding
    names and comparing shapes again. A model has tens of thousands of such tensors."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._known: dict[tuple[str, str], _Known] = {}

    def learn(self, place: _Place, stored: TensorType, parameter: Parameter, shard: Shard) -> None:
        """Remember a tensor that was written to a parameter and read right."""
        (expert, key), slot = place, parameter.slot
        if not isinstance(slot, Experts) or not isinstance(shard, tuple):
            return
        if shard[0] == expert < self._experts:
            part, size = slot.part(parameter.shape, 0, str(shard[1]))
            which = str(shard[1]) if isinstance(part, tuple) else None
            self._known[key] = _Known(stored, parameter, slot, which, size)

    def takes(self, name: str, place: _Place, stored: TensorType, read: set[str]) -> bool:
        """Write a tensor as one of another expert was written, if one was."""
        expert, key = place
        known = self._known.get(key)
        if known is None or not 0 <= expert < self._experts:
            return False
        if not (known.stored is stored or known.stored == stored):
            return False
        here = known.slot.local(expert)
        if here is None:
            return True
        if here >= known.parameter.shape[0]:
            return False
        part = here if known.which is None else (here, known.which)
        known.parameter.parts[part] = known.size
        read.add(name)
        return True


def _write(
    build: Build, target: Target, name: str, stored: TensorType, read: set[str]
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
