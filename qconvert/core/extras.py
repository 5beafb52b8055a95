"""Packages that `pip install qconvert` leaves out, and the extra that installs each: the one place that
knows. Whoever imports one asks here first, while planning, so that no run ends at a missing import.

pyproject.toml declares the same extras; tests/test_packaging.py compares them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Literal

from qconvert.core.errors import PlanError, QConvertError

Extra = Literal["calibrate", "kernels", "fast", "ray", "s3", "gguf", "sign", "all"]

# An extra's packages by the names they are imported by, those that tell whether it is there.
EXTRAS: Mapping[Extra, tuple[str, ...]] = {
    "calibrate": ("torch", "transformers", "llmcompressor"),
    "kernels": ("torch", "triton"),
    "fast": ("numba",),
    "ray": ("ray",),
    "s3": ("fsspec", "s3fs"),
    "gguf": ("torch", "transformers", "gguf"),
    "sign": ("cryptography",),
}
# What an extra's packages bring along: compressed-tensors and datasets are llm-compressor's.
_ALONG: Mapping[str, Extra] = {
    "compressed_tensors": "calibrate",
    "datasets": "calibrate",
    "llvmlite": "fast",
    "loguru": "calibrate",
    "tokenizers": "calibrate",
}


def pip_line(extra: Extra) -> str:
    """The command that installs an extra."""
    return f"pip install 'qconvert[{extra}]'"


def is_installed(package: str) -> bool:
    """Return whether a package can be found, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: a module of that name that no file made
        return False


def lacking(extra: Extra, *packages: str) -> str:
    """Return which of some packages (all of the extra's, if none is named) are missing, and the command
    that installs them; empty where all are there."""
    missing = [name for name in packages or EXTRAS[extra] if not is_installed(name)]
    if not missing:
        return ""
    *others, last = missing
    names = f"{', '.join(others)} and {last}" if others else last
    return f"{names} {'are' if others else 'is'} not installed: {pip_line(extra)}"


def require(
    extra: Extra, what: str, *packages: str, error: type[QConvertError] = PlanError
) -> None:
    """Raise `error` where any of some packages (all of the extra's, if none is named) is missing. `what`
    begins its sentence: who needs them."""
    missing = lacking(extra, *packages)
    if missing:
        raise error(f"{what}, and {missing}")


def failed_import(error: BaseException) -> str | None:
    """The first cause of an import that failed, None for an error that is no failed import: transformers
    hides it behind a question about requirements (`utils/import_utils.py`)."""
    if not isinstance(error, ImportError):
        return None
    first: BaseException = error
    while (cause := first.__cause__ or first.__context__) is not None:
        first = cause
    return " ".join(f"{type(first).__name__}: {first}".split())


def extra_of(module: str) -> Extra | None:
    """The extra that installs a module, by its full name; None for one of no extra."""
    package = module.partition(".")[0]
    found = (extra for extra, packages in EXTRAS.items() if package in packages)
    return next(found, _ALONG.get(package))
