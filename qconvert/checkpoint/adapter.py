"""Folders of adapters (peft's, or plain deltas of weights), and a checkpoint with adapters beside it.

A folder of peft has `adapter_config.json` and `adapter_model.safetensors`; one of plain deltas has
safetensors alone. Its tensors become sources of a plan like the model's own, `adapter-0/NAME`, so that
they are read, accounted for and hashed in receipts as those are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

from qconvert.checkpoint.checkpoint import ADAPTER_CONFIG, Checkpoint, Shard, extended
from qconvert.checkpoint.open import local
from qconvert.core.errors import CheckpointError
from qconvert.core.family import Family, RoleIndex
from qconvert.core.graph import Source
from qconvert.core.shown import shortened


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter of an `Adapted`: the name of its folder, its config ({}: plain deltas), and its
    tensors by their own names."""

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Source]
    folder: Checkpoint

    @property
    def digest(self) -> str:
        """A hash of its config, of all headers, and of blocks of its weights, as a source's."""
        parts = (self.folder.header_digest, self.folder.sample_digest)
        return sha256("".join(parts).encode() + self.folder.config_bytes).hexdigest()


@dataclass(frozen=True, eq=False)
class Adapted(Checkpoint):
    """A model with adapters: their files are behind the model's own in `shards`. All else, family and
    roles too, is the model's."""

    base: Checkpoint | None = None
    adapters: tuple[Adapter, ...] = ()

    @property
    def added(self) -> str:
        return " and its adapters"

    @cached_property
    def family(self) -> Family:
        assert self.base is not None
        return self.base.family

    @cached_property
    def role_index(self) -> RoleIndex:
        assert self.base is not None
        return self.base.role_index

    @cached_property
    def adapter_sources(self) -> frozenset[str]:
        """Names of the tensors that are the adapters'."""
        return frozenset(one.name for each in self.adapters for one in each.tensors.values())


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 20


def _is_pattern(text: Any) -> bool:
    try:
        re.compile(text)
    except (re.error, TypeError, RecursionError, OverflowError):
        return False
    return True


def _patterns(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, dict) and all(map(_is_pattern, value)) and all(map(holds, value.values()))
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_KEYS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, "a rank"),
    "lora_alpha": (_is_number, "a number"),
    "rank_pattern": (_patterns(_is_rank), "ranks by pattern"),
    "alpha_pattern": (_patterns(_is_number), "numbers by pattern"),
    "target_parameters": (_is_texts, "a list of names"),
    "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
    "fan_in_fan_out": (lambda value: isinstance(value, bool), "true or false"),
    "peft_type": (lambda value: isinstance(value, str), "a name"),
}


def _check_config(folder: Checkpoint) -> None:
    for key, (holds, expected) in _KEYS.items():
        value = folder.config.get(key)
        if value is not None and not holds(value):
            raise CheckpointError(
                f"{folder.root / ADAPTER_CONFIG}: expected {key} to be {expected}, found "
                f"{shortened(repr(value), 80)}"
            )


def names_of_adapters(source: Checkpoint) -> tuple[str, ...]:
    """Folders of the adapters of a source, () where it has none."""
    return tuple(each.folder.name for each in getattr(source, "adapters", ()))


def adapted(model: Checkpoint, names: Sequence[str | Path]) -> Adapted:
    """Raises CheckpointError for a folder of an adapter that cannot be read."""
    shards, sources, found = list[Shard](), dict[str, Source](), list[Adapter]()
    for number, where in enumerate(names):
        folder = Checkpoint.open(
            local(where), follow_links=model.follow_links, config_name=ADAPTER_CONFIG
        )
        _check_config(folder)
        first = len(model.shards) + len(shards)
        moved = {
            name: replace(one, name=f"adapter-{number}/{name}", shard=first + one.shard)
            for name, one in folder.items()
        }
        shards += folder.shards
        sources.update((one.name, one) for one in moved.values())
        found.append(Adapter(folder.root.resolve().name, folder.config, moved, folder))
    if not found:
        raise CheckpointError("no folder of an adapter is given")
    digests = [one.digest for one in found]
    return extended(Adapted, model, shards, sources, digests, base=model, adapters=tuple(found))
