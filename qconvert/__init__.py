"""qconvert: turn a Hugging Face checkpoint into exactly what a runtime wants to load.

A conversion is a compiler run over a checkpoint: headers say what exists, passes rewrite a lazy
plan of what shall exist, and only then are bytes read, computed and written, a small unit at a
time. ARCHITECTURE.md is the map; `qconvert.api` is for Python programs, and
imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qconvert import api

__all__ = ("__version__", "api")

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "api":
        return import_module("qconvert.api")
    raise AttributeError(f"module 'qconvert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
