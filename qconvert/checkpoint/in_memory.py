"""A checkpoint of tensors that a program holds: their types and a config, no file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.checkpoint.reading import stated
from qconvert.core.dtypes import TensorType
from qconvert.core.errors import CheckpointError
from qconvert.core.graph import Source
from qconvert.core.json_text import parse_object
from qconvert.core.names import natural_key

_NOWHERE = Path("(tensors in memory)")


@dataclass(frozen=True)
class InMemory(Checkpoint):
    """Its tensors have types; their bytes come later, as often as they change."""

    __hash__ = Checkpoint.__hash__

    def read(self, name: str, limit: int = 0) -> bytes | None:
        """There is no file beside the tensors."""
        return None

    def read_scalar(self, source: Source) -> bytes:
        """Raises CheckpointError: a plan that depends on a value would not hold for the next tensors."""
        raise CheckpointError(
            f"{source.name}: the plan depends on the value of this scale, and is made before there are "
            "values; convert the checkpoint as a folder"
        )


def checkpoint_of(types: Mapping[str, TensorType], config: Mapping[str, Any]) -> InMemory:
    """A checkpoint of tensors by name, with the model's config (that of config.json). Raises
    CheckpointError where there are none, and for a config that JSON cannot hold."""
    if not types:
        raise CheckpointError("no tensors are given; give the model's, by their names")
    names = sorted(types, key=natural_key)
    try:
        text = json.dumps(config, sort_keys=True).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the config is not what config.json could hold: {error}; give the config's to_dict()"
        ) from error
    digest = sha256(text)
    for name in names:
        digest.update(f"{name} {types[name]}\n".encode())
    sources = {name: Source(name, types[name], 0, 0) for name in names}
    parsed = parse_object(text, _NOWHERE)
    return InMemory(
        _NOWHERE, (), sources, parsed, text, (), (), digest.hexdigest(), indexed=False, metadata={},
        asked=stated(),
    )  # fmt: skip
