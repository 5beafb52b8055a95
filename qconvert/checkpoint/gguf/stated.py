"""The block of a GGUF file's config, which says how each of its tensors is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from qconvert.checkpoint.checkpoint import Checkpoint, QuantConfig
from qconvert.checkpoint.gguf.header import SUFFIX, TYPES

METHOD = "gguf"
KINDS, HALVES, PLUS_ONE = "types", "interleaved_halves", "plus_one"
# Ends the name of the second of two tensors that are one in the class, whose rows (of a bias: numbers)
# are each's by turns: gate and up of gpt-oss's experts.
SECOND = ".up"


@dataclass(frozen=True)
class StoredAs:
    """Statements of the block of a GGUF file's config: the type of each tensor by name, rows of a head
    of those whose halves are interleaved, and norms that are 1 + weight."""

    kinds: Mapping[str, str] = field(default_factory=dict)
    halves: Mapping[str, int] = field(default_factory=dict)
    plus_one: frozenset[str] = frozenset()


NOTHING = StoredAs()


def stored_in(checkpoint: Checkpoint) -> StoredAs:
    """The statement about the files of a checkpoint, NOTHING where they are no GGUF files, whatever its
    config says."""
    if any(shard.path.suffix.lower() != SUFFIX for shard in checkpoint.shards):
        return NOTHING
    return stored_as(checkpoint.quantization_configs)


def stored_as(configs: Iterable[QuantConfig]) -> StoredAs:
    """The statement of a GGUF file's config, NOTHING for that of any folder."""
    for config in configs:
        kinds, halves, added = map(config.block.get, (KINDS, HALVES, PLUS_ONE))
        if config.method != METHOD or not isinstance(kinds, Mapping):
            continue
        if (
            isinstance(halves, Mapping)
            and isinstance(added, list)
            and {*kinds.values()} <= {*TYPES}
        ):
            return StoredAs(kinds, halves, frozenset(added))
    return NOTHING
