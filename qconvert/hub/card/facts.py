"""Facts that cards need from a manifest and a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qconvert.runtimes.consumers import consumer_in


def amx_of(manifest: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The manifest's entry on AMX experts, None if the folder has none."""
    return (manifest or {}).get("amx")


def consumer_of(manifest: Mapping[str, Any]) -> str | None:
    """The runtime that a step was told to convert for."""
    found = consumer_in(manifest)
    return None if found is None else found.name


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The config's quantization block, or that of its text model."""
    text = config.get("text_config")
    for level in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(level.get(key), Mapping):
                block: Mapping[str, Any] = level[key]
                return block
    return None


def has_signed_scales(manifest: Mapping[str, Any]) -> bool:
    """Return whether scales of its INT4 weights were searched for below 0, too."""
    for step in manifest["passes"]:
        options = step["options"]
        searched = options.get("calibrate") or options
        signed = (searched.get("scales"), searched.get("signs")) == ("search", "both")
        codes = options.get("bits"), options.get("symmetric")
        if step["name"] == "w4a16" and signed and codes == (4, True):
            return True
    return False
