"""Ignore lists: which modules a quantization config leaves unquantized, in names every runtime matches.

Runtimes look for a module under the name they use, fused or split: vLLM and sglang fuse at load and
ask whether the parts are ignored, others ask for the fused name. An entry for only the fused name
is ignored by one or the other, so all names of a set are listed together. sglang takes `ignored_layers`
or else `modules_to_not_convert`, never both: one key is written. Which modules a
conversion leaves unquantized is decided in models/unquantized.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qconvert.core.errors import CheckpointError
from qconvert.core.shown import shortened

_KEY = "modules_to_not_convert"
_OTHER_KEYS = ("ignored_layers", "ignore")
_SETS = (
    ("in_proj_b", "in_proj_a", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_qkvz"),
)


def complete_ignore_lists(config: Mapping[str, Any], unquantized: Iterable[str]) -> dict[str, Any]:
    """The config with the ignore list of every quantization block completed: wherever one name of a
    set is listed all are, and so are the sets of the `unquantized` modules. Order is kept; new names
    follow the first of their set. Configs without a quantization block are returned as they are."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("quantization_config", "compression_config") and isinstance(value, Mapping):
            changed[key] = _block(value, list(unquantized))
        elif isinstance(value, Mapping) and key.endswith("_config"):
            changed[key] = complete_ignore_lists(value, unquantized)
        else:
            changed[key] = value
    return changed


def _block(block: Mapping[str, Any], unquantized: list[str]) -> dict[str, Any]:
    """compressed-tensors' and modelopt's key is `ignore`; the fp8 dialects get
    `modules_to_not_convert`."""
    key = "ignore" if block.get("quant_method") in ("compressed-tensors", "modelopt") else _KEY
    listed: list[Any] = []
    for name in (key, *(k for k in (_KEY, *_OTHER_KEYS) if k != key)):
        value = block.get(name)
        listed += value if isinstance(value, list) else []
    kept = {k: v for k, v in block.items() if k not in (_KEY, *_OTHER_KEYS)}
    names = _completed([*listed, *unquantized])
    return {**kept, key: names} if names or key in block else kept


def _completed(names: list[Any]) -> list[Any]:
    found: dict[Any, None] = {}
    for name in names:
        if not isinstance(name, str):
            raise CheckpointError(
                f"config.json: expected names of modules in the ignore list, found "
                f"{shortened(repr(name), 80)}; fix or remove the entry"
            )
        found[name] = None
        # A pattern of compressed-tensors ends in `$` or not; its siblings end alike.
        body, dollar = (name[:-1], "$") if name.endswith("$") else (name, "")
        for members in _SETS:
            fitting = [member for member in members if _ends(body, member)]
            if fitting:
                stem = body.removesuffix(max(fitting, key=len))
                found.update(dict.fromkeys(f"{stem}{member}{dollar}" for member in members))
    return list(found)


def _ends(name: str, member: str) -> bool:
    """Return whether the last component of a dotted name or pattern is `member`."""
    return name == member or name.endswith(("." + member, "*" + member))


def renamed_modules(config: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """The config with module names that begin with `old` renamed to begin with `new`: lists follow their
    tensors."""
    return {key: _renamed(value, old, new) for key, value in config.items()}


def _renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, Mapping):
        return renamed_modules(value, old, new)
    if isinstance(value, list):
        return [_renamed(inner, old, new) for inner in value]
    if isinstance(value, str) and value.startswith(old):
        return new + value.removeprefix(old)
    return value
