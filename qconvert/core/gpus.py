"""The NVIDIA GPUs of this machine as a process sees them, without torch, whose import takes seconds."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NODES = Path("/dev")
_NODE = re.compile(r"nvidia[0-9]+")
_VARIABLE = "CUDA_VISIBLE_DEVICES"


def count_gpus() -> int:
    """Return how many GPUs torch will probably find: 0 where that is not known."""
    named = _named()
    if named is not None:
        return len(named)
    try:
        return sum(1 for path in _NODES.iterdir() if _NODE.fullmatch(path.name))
    except OSError:
        return 0


def _named() -> list[str] | None:
    """Return what CUDA_VISIBLE_DEVICES names, if it is set."""
    asked = os.environ.get(_VARIABLE)
    return None if asked is None else [part.strip() for part in asked.split(",") if part.strip()]
