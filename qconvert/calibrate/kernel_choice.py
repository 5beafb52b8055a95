"""Choice of Triton kernels: on a GPU, where Triton is installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")


def fused(weight: torch.Tensor, width: int) -> ModuleType | None:
    """The kernels for matrices, a block or group of `width` columns at a time; None where operators of
    torch do it, a column at a time."""
    if not by_triton(weight):
        return None
    from qconvert.calibrate import triton_kernels as kernels

    return kernels if width <= kernels.WIDEST else None


def by_triton(tensor: torch.Tensor) -> bool:
    """Return whether kernels are to compute with a tensor."""
    there = tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return there and _is_installed()


def there(function: Callable[P, R]) -> Callable[P, R]:
    """Run what launches kernels on the device of its first tensor: Triton launches them on the current
    one, whatever their tensors are on, and in a stream that nothing orders with those of theirs."""

    @wraps(function)
    def run(*args: P.args, **more: P.kwargs) -> R:
        import torch

        cuda: Any = torch.cuda  # its devices are typed for nobody
        with cuda.device_of(args[0]):
            return function(*args, **more)

    return run


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None
