"""What sglang would do with a folder: `simulate` builds the rank's parameters from the config, offers
every tensor of the headers to them, and says what is written, read, refused or misread."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qconvert.core.dtypes import TensorType
from qconvert.core.shown import count
from qconvert.runtimes.sglang.building import Build
from qconvert.runtimes.sglang.classes import (
    CLASSES,
    Finder,
    ModelClass,
    runner_of,
    text_config,
)
from qconvert.runtimes.sglang.drafts import DRAFTS, layer_of
from qconvert.runtimes.sglang.names import Target
from qconvert.runtimes.sglang.parameters import Experts, Parameter, Shard
from qconvert.runtimes.sglang.quantization import quantization_of, renamed
from qconvert.runtimes.sglang.refusal import LoadRefused, NotSimulated
from qconvert.runtimes.sglang.setting import Setting

_NUMBER = re.compile(r"\.experts\.([0-9]{1,6})\.")


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
        """Whether it loads, and right: every parameter that counts is written, and as it was stored."""
        return self.refused is None and not (self.missing or self.misread or self.empty)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The class that a config names. Raises NotSimulated for one that the simulator does not know."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if name not in CLASSES:
        raise NotSimulated(f"architecture {name!r}")
    return str(name)


def holds_draft(config: Mapping[str, Any], tensors: Iterable[str]) -> bool:
    """Whether a folder holds a draft model that the runtime loads by a class of its own."""
    kind = architecture_of(config)
    if kind not in DRAFTS:
        return False
    layer = layer_of(kind, text_config(config))
    return any(name.startswith(layer) for name in tensors)


def simulate(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorType],
    setting: Setting | None = None,
    *,
    groups: int | None = None,
    draft: bool = False,
) -> Simulated:
    """Load a folder on one rank: its config.json and the headers of its tensors, in the order of its
    files. `groups`: in how many groups the rows of its fused linear-attention projections are, 0 for
    split ones, as its manifest states; headers cannot show it, and without it any order is taken for
    right. `draft`: load the draft model that the folder holds. Raises NotSimulated for what the
    simulator has no rule for."""
    asked = setting or Setting()
    name = architecture_of(config)
    kind = CLASSES[name]
    setting = replace(asked, moe_runner=runner_of(kind, config, asked))
    if draft:
        if name not in DRAFTS:
            raise NotSimulated(f"a draft of {name}")
        if setting.pp > 1:
            raise NotSimulated("a draft in pipeline stages")
        kind = DRAFTS[name]
    if setting.tp % setting.ep:
        raise NotSimulated(f"tp {setting.tp} that ep {setting.ep} does not divide")
    numbers = text_config(config)
    stated = renamed(config, kind.renames) if kind.renames else config
    fused = 0
    try:
        quantization = quantization_of(stated, kind.fused(numbers), setting, numbers.dtype)
        build = Build(setting, quantization, numbers.dtype)
        fused = kind.shared(numbers, quantization, setting)
        kind.build(build, numbers, fused)
    except LoadRefused as refused:
        return Simulated(asked, refused, shared_fused=fused > 0)
    finder = kind.names(build, numbers, fused)
    done = _loaded(kind, build, finder, tensors, asked, fused > 0)
    wanted = kind.groups(numbers) if kind.groups is not None and groups else None
    if wanted is None or groups == wanted:
        return done
    order = f"rows in {count(groups or 0, 'group')}, and the class takes {count(wanted, 'group')}"
    unread = frozenset(done.unread)
    wrong = {
        name: order
        for name in tensors
        if name not in unread and (".in_proj_qkvz." in name or ".in_proj_ba." in name)
    }
    return replace(done, misread={**done.misread, **wrong})


def _loaded(
    kind: ModelClass,
    build: Build,
    finder: Finder,
    tensors: Mapping[str, TensorType],
    asked: Setting,
    shared_fused: bool,
) -> Simulated:
    read: set[str] = set()
    ignored: list[str] = []
    misread: dict[str, str] = {}
    refused = None
    alike = _Alike(finder.experts)
    try:
        for name, stored in tensors.items():
            if not finder.stacked and alike.takes(name, stored, read):
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
                alike.learn(name, stored, build.parameters[under], targets[0].shard)
        if kind.after is not None:
            kind.after(build, tensors)
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


class _Alike:
    """Experts of a layer, which are loaded alike: what one did is done for the others without finding
    names and comparing shapes again. A model has tens of thousands of such tensors."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._known: dict[tuple[str, str, TensorType], tuple[Parameter, Experts, str]] = {}

    def learn(self, name: str, stored: TensorType, parameter: Parameter, shard: Shard) -> None:
        """Remember a tensor that was written to a parameter and read right."""
        match, slot = _NUMBER.search(name), parameter.slot
        if match is None or not isinstance(slot, Experts) or not isinstance(shard, tuple):
            return
        if shard[0] == int(match[1]) < self._experts:
            key = name[: match.start(1)], name[match.end(1) :], stored
            self._known[key] = parameter, slot, str(shard[1])

    def takes(self, name: str, stored: TensorType, read: set[str]) -> bool:
        """Write a tensor as one of another expert was written, if one was."""
        match = _NUMBER.search(name)
        if match is None or int(match[1]) >= self._experts:
            return False
        key = name[: match.start(1)], name[match.end(1) :], stored
        known = self._known.get(key)
        if known is None:
            return False
        parameter, slot, which = known
        here = slot.local(int(match[1]))
        if here is None:
            return True
        if here >= parameter.shape[0]:
            return False
        key_of_part, size = slot.part(parameter.shape, here, which)
        parameter.parts[key_of_part] = size
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
