"""Choice of Triton kernels: on a GPU, where Triton is installed.

Products of float32 matrices, on a GPU by its tensor cores: each number as a sum of two of BF16.

a b is a_high b_high + a_high b_low + a_low b_high, added up in float32; what is left out is 2^-16 of a
product of magnitudes. It is one product of BF16, with three times the inner dimension.

Products of BF16 matrices on a CPU: where it has fast units for them (AMX) as torch makes them, else in
float32, with one rounding of the result. Without such units torch takes three to eleven times
as long for a product of BF16 as for the two conversions and a product of float32 (one core, oneDNN
held to AVX512 and to AVX2). Sums differ by their order alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
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


def product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Float32 [B, N, K] times [B, K, M]: [B, N, M]."""
    import torch

    return by_halves(one, other) if one.is_cuda else torch.bmm(one, other)


def by_halves(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A product as a GPU takes it; on a CPU to try it, as slow as it is there."""
    import torch

    high, low = halves(one)
    above, below = halves(other)
    return _multiplied(torch.cat([high, high, low], 2), torch.cat([above, below, above], 1))


def _multiplied(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of BF16 numbers, whose products are exact in float32."""
    import torch

    if one.is_cuda:
        return torch.bmm(one, other, out_dtype=torch.float32)
    return torch.bmm(one.float(), other.float())


def add_product(to: torch.Tensor, one: torch.Tensor, other: torch.Tensor, *, sign: int = 1) -> None:
    """Add a product, or take it away, in place."""
    if by_triton(to) and to.numel():
        from qconvert.calibrate import triton_kernels as kernel

        kernel.add_product(to, one, other, sign)
    elif not to.is_cuda:
        to.baddbmm_(one, other, alpha=sign)
    elif to.numel():
        to.add_(product(one, other), alpha=sign)


def product_with_codes(one: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Float32 [B, N, K] times whole numbers up to 256 [B, K, M], which BF16 holds as they are."""
    import torch

    return codes_by_halves(one, codes) if one.is_cuda else torch.bmm(one, codes)


def codes_by_halves(one: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """`product_with_codes` as a GPU takes it."""
    import torch

    exact = codes.bfloat16()
    return _multiplied(torch.cat(halves(one), 2), torch.cat([exact, exact], 1))


def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 numbers whose sum is a float32 one, to 2^-16 of it."""
    high = values.bfloat16()
    return high, (values - high.float()).bfloat16()


# --- BF16 on CPUs --------------------------------------------------------------------------------


@cache
def bf16_is_slow() -> bool:
    """Tell whether this CPU multiplies BF16 matrices slower than by way of float32. By what the CPU has:
    a measurement is another one beside other work, and all processes of a run, and the one that goes on
    with it, must make the same codes."""
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()  # what torch is held to
    held = isa not in ("", "ALL", "DEFAULT") and "AMX" not in isa
    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return held
    return held or not multiplies_bf16(said)


def multiplies_bf16(cpuinfo: str) -> bool:
    """Tell whether the first processor of /proc/cpuinfo has units for products of BF16 that are faster
    than those of float32: AMX's, Arm's, and AVX512-BF16 of AMD. Intel's AVX512-BF16 alone made 87
    GFLOP/s a core where float32 and its conversions made 145."""
    first: dict[str, str] = {}
    for line in cpuinfo.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        first[key.strip()] = value.strip()
    has = {*first.get("flags", "").split(), *first.get("Features", "").split()}
    of_amd = first.get("vendor_id") == "AuthenticAMD"
    return bool(has & {"amx_bf16", "bf16"}) or (of_amd and "avx512_bf16" in has)


def linear(
    rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows [T, K] times a weight [N, K]: [T, N], into `out` if it is given."""
    import torch

    if not _by_float32(rows):
        return torch.mm(rows, weight.t(), out=out)
    made = torch.mm(rows.float(), weight.float().t())
    return made.to(rows.dtype) if out is None else out.copy_(made)


def _by_float32(tensor: torch.Tensor) -> bool:
    import torch

    return tensor.dtype is torch.bfloat16 and not tensor.is_cuda and bf16_is_slow()


@contextmanager
def forward_of(hidden: torch.Tensor) -> Iterator[None]:
    """Within this a class of transformers computes what it makes of hidden states: nothing is kept for
    gradients, and products are made as the device does them fastest."""
    import torch

    with torch.no_grad(), _in_float32() if _by_float32(hidden) else nullcontext():
        yield


@cache
def _in_float32() -> Any:
    """The mode of torch in which products of BF16 are made in float32."""
    import torch
    from torch.overrides import TorchFunctionMode

    functional: Any = torch.nn.functional
    products = {
        functional.linear, functional.scaled_dot_product_attention, torch.matmul, torch.mm, torch.bmm,
        torch.einsum, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm, torch.Tensor.bmm,
    }  # fmt: skip

    def raised(value: Any) -> Any:
        is_bf16 = isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16
        return value.float() if is_bf16 else value

    class Float32Products(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:  # fmt: skip
            more = dict(kwargs or {})
            bf16 = [isinstance(one, torch.Tensor) and one.dtype is torch.bfloat16 for one in args]
            if function not in products or not any(bf16):
                return function(*args, **more)
            made = function(*map(raised, args), **{key: raised(one) for key, one in more.items()})
            return made.bfloat16()

    return Float32Products()
