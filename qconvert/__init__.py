"""qconvert: turn a Hugging Face checkpoint into exactly what a runtime wants to load.

A conversion is a compiler run over a checkpoint: headers say what exists, passes rewrite a lazy
plan of what shall exist, and only then are bytes read, computed and written, a small unit at a
time. ARCHITECTURE.md is the map. The names of `qconvert.api` are names of this module too, and are
imported when the first of them is used.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qconvert.api import *  # noqa: F403

__version__ = "0.1.0"


class CallablePackage(ModuleType):
    """A package that is called like the function of its name in `qconvert.api`: `qconvert.plan` and
    `qconvert.run` are both, and a package stands before `__getattr__` once it has been imported."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return getattr(import_module("qconvert.api"), self.__name__.rpartition(".")[2])(
            *args, **options
        )


if not TYPE_CHECKING:  # which would take any name for one of ours

    def __getattr__(name: str) -> Any:
        api = None if name.startswith("_") else import_module("qconvert.api")
        if name == "api":
            return api
        if api is None or name not in api.__all__:
            raise AttributeError(f"module 'qconvert' has no attribute {name!r}")
        # Looked for again, because importing the API imports the packages `plan` and `run`.
        return globals().get(name, getattr(api, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("qconvert.api").__all__})
