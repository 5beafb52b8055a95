"""The HTTP library that the Hub's client speaks through: httpx in huggingface_hub 1.33, httpx2 in 2.4.

Both have the same classes under the same names; an error of one is none of the other's.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType

_BASE = "HTTPError"  # what huggingface_hub.errors.HfHubHTTPError derives from, in either


@cache
def library() -> ModuleType:
    """httpx or httpx2, whichever the installed client raises the errors of."""
    from huggingface_hub.errors import HfHubHTTPError

    (base,) = (found for found in HfHubHTTPError.__mro__ if found.__name__ == _BASE)
    return sys.modules[base.__module__.partition(".")[0]]
