"""Packages that a runtime imports and that have no build for this machine, as modules of inert names.

Nothing of the runtime itself is replaced. A stub may be subclassed, used as a decorator or in a type; a
call of a stub's function raises, so no kernel runs in silence.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any


class _Inert(type):
    """Attributes of a stub are stubs."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return inert(f"{cls.__qualname__}.{name}")

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __getitem__(cls, key: Any) -> Any:
        return cls


def inert(name: str) -> Any:
    """A class that stands for anything."""

    def decorated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0] if len(args) == 1 and not kwargs and _is_code(args[0]) else None

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return decorated(args, kwargs) or object.__new__(cls)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = decorated(args, kwargs)
        if found is None:
            raise NotImplementedError(f"{name} is a stub and was called")
        return found

    def attribute(self: Any, attr: str) -> Any:
        if attr.startswith("__"):
            raise AttributeError(attr)
        return inert(f"{name}.{attr}")

    body = {
        "__new__": new, "__init__": lambda self, *args, **kwargs: None, "__call__": call,
        "__getattr__": attribute, "__module__": "stubs", "__qualname__": name,
        "__init_subclass__": classmethod(lambda cls, **kwargs: None),
    }  # fmt: skip
    return _Inert(name.rpartition(".")[2], (), body)


def _is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | type)


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "99.0.0"
        if name.startswith("__"):
            raise AttributeError(name)
        value = inert(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    """The first finder: an installed build for GPUs would not load either."""

    def __init__(self, packages: Collection[str], modules: re.Pattern[str]) -> None:
        self._packages = packages
        self._modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._modules.fullmatch(name):
            return ModuleSpec(name, self, is_package=True)
        top = name.partition(".")[0]
        if top not in self._packages:
            return None
        if "." in name and not isinstance(sys.modules.get(top), _Module):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: its names come when they are asked for."""


def transformers_without_torchvision() -> None:
    """Classes of transformers that need torchvision take the registrations that runtimes make."""
    found = importlib.import_module("transformers.utils.import_utils")

    def attribute(cls: Any, key: str) -> Any:
        if (key.startswith("_") and key != "_from_config") or key in ("is_dummy", "mro", "call"):
            return type.__getattribute__(cls, key)
        return lambda *args, **kwargs: None

    found.DummyObject.__getattribute__ = attribute


def install(packages: Collection[str], modules: str = "") -> None:
    """Stub these top-level packages, also where they are installed, and the modules whose full name
    this pattern matches."""
    sys.meta_path.insert(0, _Finder(packages, re.compile(modules)))
