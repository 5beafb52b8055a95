"""Ignore lists: which modules a quantization config leaves out, in names every runtime matches.

Runtimes look for a module under the name they use, fused or split: vLLM and sglang fuse at load and
ask whether the parts are ignored, others ask for the fused name. An entry for the fused name alone is
ignored by one or the other, so all names of a set stand together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore")
_SETS = (
    ("in_proj_b", "in_proj_a", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_qkvz"),
)


def with_siblings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with every ignore list completed: wherever one name of a set is listed, all are.
    Order is kept, new names follow the first of their set."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            changed[key] = with_siblings(value)
        elif key in _KEYS and isinstance(value, list):
            changed[key] = _completed(value)
        else:
            changed[key] = value
    return changed


def _completed(names: list[Any]) -> list[Any]:
    found: dict[Any, None] = {}
    for name in names:
        found[name] = None
        if not isinstance(name, str):
            continue
        stem, dot, last = name.rpartition(".")
        for members in _SETS:
            if last in members:
                found.update(dict.fromkeys(f"{stem}{dot}{member}" for member in members))
    return list(found)
