"""Whether matrices are solved by Triton kernels: on a GPU, where Triton is installed."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def fused(weight: torch.Tensor, width: int) -> ModuleType | None:
    """The kernels for matrices, a block or group of `width` columns at a time; None where operators of
    torch do it, a column at a time."""
    if not weight.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    kernels = _kernels()
    return kernels if kernels is not None and width <= kernels.WIDEST else None


@cache
def _kernels() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from qconvert.calibrate.solver import fused as kernels

    return kernels
