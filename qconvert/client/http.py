"""The HTTP library that the Hub's client speaks through: httpx in huggingface_hub, httpx2 in 2.4.

Both have the same classes under the same names; an error of one is none of the other's. And what a
request is sent with: the token goes to the Hub alone.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from urllib.parse import urlsplit

_BASE = "HTTPError"  # what huggingface_hub.errors.HfHubHTTPError derives from, in either


@cache
def library() -> ModuleType:
    """httpx or httpx2, whichever the installed client raises the errors of."""
    from huggingface_hub.errors import HfHubHTTPError

    (base,) = (found for found in HfHubHTTPError.__mro__ if found.__name__ == _BASE)
    return sys.modules[base.__module__.partition(".")[0]]


def own_headers() -> dict[str, str]:
    """Return what the Hub itself is told, with the token."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    from qconvert import __version__

    found: dict[str, str] = build_hf_headers(library_name="qconvert", library_version=__version__)
    return found


def is_at(endpoint: str, url: str) -> bool:
    """Return whether an address is at an endpoint: scheme, host and port, which is what a token is
    for."""
    return _place(url) == _place(endpoint)


def _place(url: str) -> tuple[str, str | None, int | None] | None:
    """None for what is no address."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"https": 443, "http": 80}.get(parts.scheme)
    except ValueError:
        return None
    return parts.scheme, parts.hostname, port
