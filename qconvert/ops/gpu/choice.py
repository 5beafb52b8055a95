"""Whether a run searches for scales on a GPU: the one place that decides, without torch.

`--device` says it outright; without it a GPU is taken where the search would hold up the run: where the
cores would take more than `ENOUGH_SECONDS` for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from qconvert.core.errors import PlanError
from qconvert.core.extras import lacking
from qconvert.core.patterns import compiled
from qconvert.core.shown import count
from qconvert.core.sizes import format_size

# What one core searches in a second, in bytes of BF16 weights, in compiled loops and in numpy's form:
# `benchmarks/run.py kernels`.
CORE_RATES: Mapping[str, tuple[float, float]] = {
    "ints_search": (0.4e9, 0.01e9),
    "ints_search signed": (0.28e9, 0.005e9),
    "nvfp4_encode": (0.3e9, 0.02e9),
    "amx_search": (0.4e9, 0.15e9),
}
# The loops that have a form on a GPU, and the module of `qconvert.ops.gpu` that has it.
_LOOPS: Mapping[str, str] = {
    "ints_search": "searches", "nvfp4_encode": "searches", "amx_search": "amx_search",
}  # fmt: skip
# torch's import, a context on the GPU and Triton's compilation take 10 s of a run's start.
ENOUGH_SECONDS = 30.0
# What torch, triton and a context take of a worker's memory beyond what it has on a CPU.
DEVICE_BYTES = 1 << 30
# More processes than this gain nothing on one GPU: each has a context, and the bus is full.
MOST_JOBS = 8

_NAME = r"cuda(:\d+)?"
_NODES = Path("/dev")


@dataclass(frozen=True, slots=True)
class Decision:
    """Where scales are searched for: a GPU by torch's name, or None for the CPU's cores; and why."""

    device: str | None
    why: str


def decide(
    searched: Mapping[str, int], asked: str | None, jobs: int, *, compiled_loops: bool
) -> Decision | None:
    """Where a run with so many `jobs` searches, of the bytes of BF16 that each search of CORE_RATES has;
    `compiled_loops` are what it would run in on the CPU. None: there is nothing to search. `asked` is
    what --device says. Raises PlanError for a GPU that is asked for and is not there, or needs a package
    that is not installed."""
    if asked is not None and asked != "cpu" and not compiled(_NAME).fullmatch(asked):
        raise PlanError(f"device {asked!r}: expected cpu or cuda:N")
    total = sum(searched.values())
    if not total:
        if asked in (None, "cpu"):
            return None
        return Decision(
            None,
            "a GPU searches for scales, and none are searched for here; cores do all else",
        )
    seconds = sum(
        size / CORE_RATES[loop][0 if compiled_loops else 1] for loop, size in searched.items()
    )
    seconds /= max(1, jobs)
    work = f"searching scales of {format_size(total)} takes {count(jobs, 'core')} about {seconds:.0f} s"
    if asked == "cpu":
        return Decision(None, f"{work}; --device cpu")
    if asked is not None:
        _check(asked)
        return Decision(asked, f"{work}; --device {asked}")
    if seconds < ENOUGH_SECONDS:
        return Decision(None, f"{work}, a GPU's start 10 s")
    missing = _missing()
    if missing:
        return Decision(None, f"{work}; {missing}")
    return Decision("cuda:0", work)


def _check(name: str) -> None:
    missing = _missing()
    if missing:
        raise PlanError(f"device {name}: {missing}; give --device cpu, or leave it out")
    number = int(name.partition(":")[2] or 0)
    found = len(_gpus())
    if number >= found:
        raise PlanError(
            f"device {name}: this machine has {count(found, 'GPU')}, cuda:0 to cuda:{found - 1}; give "
            "one of them"
        )


def _missing() -> str:
    """Why no GPU can be used, or nothing."""
    if not _gpus():
        return "this machine has no NVIDIA GPU (no /dev/nvidia0)"
    return lacking("kernels")


def _gpus() -> list[Path]:
    return [node for node in _NODES.glob("nvidia[0-9]*") if node.name[6:].isdigit()]


_device: str | None = None


def use(device: str | None) -> None:
    """Where this process searches from now on: a GPU by torch's name, None for the CPU."""
    global _device
    _device = device


def kernel(name: str) -> Callable[..., bool] | None:
    """The loop of this name on the GPU that this process is to use, if it has that form."""
    if _device is None or name not in _LOOPS:
        return None
    return _kernels(_device)[name]


@cache
def _kernels(device: str) -> Mapping[str, Callable[..., bool]]:
    from functools import partial
    from importlib import import_module

    from qconvert.ops.gpu.staging import Staging

    staging = Staging(device)
    modules = {name: import_module(f"qconvert.ops.gpu.{where}") for name, where in _LOOPS.items()}
    return {name: partial(getattr(found, name), staging) for name, found in modules.items()}
