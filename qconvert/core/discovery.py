"""Families, formats, passes and validators, found by the module that holds them: a file of one of
qconvert's packages, or a module that another package names as an entry point.

An entry point of a group below names a module of the same form as a file of qconvert has:

    [project.entry-points."qconvert.passes"]
    prune = "mine.prune"        # a module with PASSES, as qconvert/passes/drop.py
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from qconvert.core.errors import QConvertError

if TYPE_CHECKING:
    from importlib import metadata

FAMILIES, FORMATS = "qconvert.families", "qconvert.formats"
PASSES, VALIDATORS = "qconvert.passes", "qconvert.validators"
# What a module holds that an entry point of a group names.
HOLDS: Mapping[str, tuple[str, ...]] = {
    FAMILIES: ("FAMILY",), FORMATS: ("FORMAT", "FORMATS"), PASSES: ("PASSES",),
    VALIDATORS: ("VALIDATOR", "VALIDATORS"),
}  # fmt: skip


def discover(*packages: str, group: str = "") -> list[Any]:
    """Every module of some packages, in order of the modules' names, then those of other packages'
    entry points in a group, if one is named. What cannot be imported is fatal: QConvertError names
    the file, or the package and the cause. A family that silently failed to load would be treated as
    unknown."""
    import pkgutil

    found: dict[tuple[str, str], str] = {}
    for package in packages:
        root = importlib.import_module(package)
        for info in pkgutil.iter_modules(root.__path__):
            if not info.ispkg:
                found[info.name, package] = f"{package}.{info.name}"
    modules = [_imported(name) for _, name in sorted(found.items())]
    return [*modules, *(_installed(group) if group else ())]


def modules_within(package: str, name: str) -> list[Any]:
    """The module of this name of every package within a package. Raises QConvertError as `discover`
    does."""
    import pkgutil

    root = importlib.import_module(package)
    packages = sorted(info.name for info in pkgutil.iter_modules(root.__path__) if info.ispkg)
    return [_imported(f"{package}.{one}.{name}") for one in packages]


def formats_of(modules: Iterable[Any]) -> list[Any]:
    """Formats that modules hold as FORMAT or FORMATS."""
    return list(held(modules, "FORMAT"))


def held(modules: Iterable[Any], name: str) -> Iterator[Any]:
    """Values of modules under a name, or, as a tuple, under its plural; nothing of those without."""
    for module in modules:
        yield from getattr(module, f"{name}S", None) or (
            (getattr(module, name),) if hasattr(module, name) else ()
        )


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise QConvertError(f"{name.replace('.', '/')}.py: cannot be imported: {error}") from error


def loaded(*packages: str) -> list[Any]:
    """Modules of some packages that have been imported already, in order of their names."""
    return [
        module
        for name, module in sorted(sys.modules.items())
        if name.rpartition(".")[0] in packages
    ]


def is_extended() -> bool:
    """Return whether another package may have an entry point of any of the groups."""
    return _names_a_group(tuple(sys.path))


@lru_cache(maxsize=2)
def _names_a_group(path: Sequence[str]) -> bool:
    """Return whether the text of any package's entry points on a path has one of ours, or where that
    cannot be told from folders alone. `importlib.metadata` reads and parses them all for each group, and
    its import is 40 modules: 44 ms of CPU in an environment of 122 packages, where this takes 2."""
    finders = [finder for finder in sys.meta_path if finder is not PathFinder]
    if any(getattr(finder, "find_distributions", None) is not None for finder in finders):
        return True
    return any(map(_has_points, path))


def _has_points(folder: str) -> bool:
    """Return whether a package installed in a folder has an entry point of ours. True for what is no
    folder: it may be an archive."""
    try:
        names = os.listdir(folder or ".")
    except NotADirectoryError:
        return True
    except OSError:
        return False
    if folder.lower().endswith(".egg"):
        return True
    for name in names:
        if name.lower().endswith((".dist-info", ".egg-info")):
            try:
                with open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                    if b"[qconvert." in file.read():
                        return True
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                return True
    return False


@lru_cache(maxsize=8)
def _installed(group: str) -> tuple[Any, ...]:
    if not is_extended():
        return ()
    from importlib import metadata

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
    if not any(hasattr(module, held) for held in HOLDS[point.group]):
        raise QConvertError(f"{where} has no {' or '.join(HOLDS[point.group])}; {mend}")
    return module
