"""Whether Triton kernels compute: on a GPU, where Triton is installed."""

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
    if not by_triton(weight):
        return None
    from qconvert.calibrate.kernels import columns as kernels

    return kernels if width <= kernels.WIDEST else None


def by_triton(tensor: torch.Tensor) -> bool:
    """Whether kernels are to compute with a tensor."""
    there = tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return there and _is_installed()


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None
