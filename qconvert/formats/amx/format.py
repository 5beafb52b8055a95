"""AMXINT4 and AMXINT8: tiles of kt-kernel, an expert's rows by NUMA node, under names of their own, and
the sizes of matrices that its kernels take.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from qconvert.core.errors import PlanError
from qconvert.core.shown import count
from qconvert.core.versions import KT_KERNEL
from qconvert.formats.base import FolderTensors, Format

Method = Literal["int4", "int8"]

RUNTIME_NAME: dict[str, str] = {"int4": "AMXINT4", "int8": "AMXINT8"}
BITS: dict[str, int] = {"int4": 4, "int8": 8}
# Columns a tile load takes at once, and the multiple that rows come in.
STEP: dict[str, int] = {"int4": 128, "int8": 64}


def check_dims(method: Method, hidden: int, intermediate: int, numa: int) -> None:
    """Raise PlanError where kt-kernel's kernels cannot hold these sizes, naming the NUMA counts that
    are supported. `intermediate` is that of a routed expert."""
    step = STEP[method]
    if numa < 1:
        raise PlanError(f"the NUMA count must be at least 1, found {numa}")
    if hidden < 1 or hidden % step:
        raise PlanError(
            f"{RUNTIME_NAME[method]} takes hidden sizes in multiples of {step}, found {hidden}"
            + _other_method(method, hidden, intermediate, numa)
        )
    if intermediate % numa or (intermediate // numa) % step or intermediate < 1:
        fitting = numa_counts(method, intermediate)
        found = ", ".join(map(str, fitting))
        raise PlanError(
            f"experts of intermediate size {intermediate} cannot be cut for "
            f"{count(numa, 'NUMA node')}: "
            f"{RUNTIME_NAME[method]} takes shards in multiples of {step} columns; "
            + (f"supported counts: {found}" if fitting else "no count is supported")
            + _other_method(method, hidden, intermediate, numa)
        )


def numa_counts(method: Method, intermediate: int) -> list[int]:
    """NUMA counts up to 8 that an expert's intermediate size can be cut for."""
    step = STEP[method]
    return [n for n in range(1, 9) if intermediate > 0 and not intermediate % (n * step)]


def _other_method(method: Method, hidden: int, intermediate: int, numa: int) -> str:
    step = STEP["int8"]
    if method == "int4" and not hidden % step and numa in numa_counts("int8", intermediate):
        return "; in AMXINT8 they can (amx --method int8, kt --cpu int8)"
    return ""


_CODES = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down)_exps\.\d+\.numa\.\d+")


def _label(folder: FolderTensors, module: str, parameter: str) -> str | None:
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
