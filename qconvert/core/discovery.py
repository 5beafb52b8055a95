"""Families, formats, passes and validators, found by the module that holds them: a file of one of
qconvert's packages, or a module that another package names as an entry point.

An entry point of a group below names a module of the same form as a file of qconvert has:

    [project.entry-points."qconvert.passes"]
    prune = "mine.prune"        # a module with PASSES, as qconvert/passes/drop.py
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from typing import Any

from qconvert.core.errors import QConvertError

FAMILIES, FORMATS = "qconvert.families", "qconvert.formats"
PASSES, VALIDATORS = "qconvert.passes", "qconvert.validators"
# What a module holds that an entry point of a group names.
HOLDS: Mapping[str, str] = {
    FAMILIES: "FAMILY", FORMATS: "FORMAT", PASSES: "PASSES", VALIDATORS: "VALIDATOR",
}  # fmt: skip


def discover(*packages: str, group: str = "") -> list[Any]:
    """Every module of some packages, in order of the modules' names, then those of other packages'
    entry points in a group, if one is named. What cannot be imported is fatal: QConvertError names
    the file, or the package and the cause. A family that silently failed to load would be treated as
    unknown."""
    found: dict[tuple[str, str], str] = {}
    for package in packages:
        root = importlib.import_module(package)
        for info in pkgutil.iter_modules(root.__path__):
            if not info.ispkg:
                found[info.name, package] = f"{package}.{info.name}"
    modules = []
    for _, name in sorted(found.items()):
        try:
            modules.append(importlib.import_module(name))
        except ImportError as error:
            raise QConvertError(
                f"{name.replace('.', '/')}.py: cannot be imported: {error}"
            ) from error
    return [*modules, *(_installed(group) if group else ())]


@lru_cache(maxsize=8)
def _installed(group: str) -> tuple[Any, ...]:
    points = sorted(metadata.entry_points(group=group), key=lambda point: (point.name, point.value))
    return tuple(_loaded(point) for point in points)


def _loaded(point: metadata.EntryPoint) -> Any:
    of = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown"
    where = f"package {of}: its entry point {point.name!r} of {point.group}, {point.value!r},"
    mend = "upgrade or uninstall the package"
    try:
        module = point.load()
    except Exception as error:  # whatever another's code raises: the message says it
        cause = f"{type(error).__name__}: {error}"
        raise QConvertError(f"{where} cannot be imported ({cause}); {mend}") from error
    if not hasattr(module, HOLDS[point.group]):
        raise QConvertError(f"{where} has no {HOLDS[point.group]}; {mend}")
    return module
