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
    from qconvert.service.converting import quantize
    from qconvert.service.weights import open_weights

    open = open_weights

# `open` is not among them, or `from qconvert import *` would take the place of Python's own.
__all__ = ("__version__", "api", "quantize")

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "api":
        return import_module("qconvert.api")
    if name == "quantize":
        return import_module("qconvert.api").quantize
    if name == "open":
        return import_module("qconvert.api").open_weights
    raise AttributeError(f"module 'qconvert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, "open"))
