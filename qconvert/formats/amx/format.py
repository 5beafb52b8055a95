"""AMXINT4 and AMXINT8: tiles of kt-kernel, an expert's rows by NUMA node, under names of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping

from qconvert.core.versions import KT_KERNEL
from qconvert.formats.base import Folder, Format

_CODES = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down)_exps\.\d+\.numa\.\d+")


def _label(folder: Folder, module: str, parameter: str) -> str | None:
    """The method that the manifest states."""
    if parameter != "weight" or _CODES.fullmatch(module) is None:
        return None
    fact = folder.facts.get("amx")
    method = fact.get("method") if isinstance(fact, Mapping) else None
    return method if isinstance(method, str) else None


FORMAT = Format(
    name="amx", title="AMX", parameters=("weight", "scale"), codes=("I8",), cut=(0, 0),
    equals=str(KT_KERNEL),
    label=_label,
)  # fmt: skip
