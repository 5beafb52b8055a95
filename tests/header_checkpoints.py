"""Checkpoints that exist only as headers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import headers

from qconvert.checkpoint.checkpoint import Checkpoint, Shard
from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Source

ANY = "some model nobody has described"


def checkpoint(
    tensors: Mapping[str, TensorType], config: Mapping[str, Any] | None = None, **more: Any
) -> Checkpoint:
    """A checkpoint that exists only as headers, in one shard."""
    sources, at = {}, 4096
    for name, kind in tensors.items():
        sources[name] = Source(name, kind, 0, at)
        at += kind.nbytes
    shard = Shard(Path("model.safetensors"), at, 0)
    known = {"model_type": ANY} if config is None else dict(config)
    return Checkpoint(
        Path("nowhere"), (shard,), sources, known, b"{}", (), (), "0" * 64, False, {}, **more
    )


@cache
def published(model: str) -> Checkpoint:
    """A published model's headers, with few experts; cached, and never changed."""
    found = headers.few(model)
    return checkpoint(found.tensors, found.config)
