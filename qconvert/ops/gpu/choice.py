"""Whether a run searches for scales on a GPU: the one place that decides, without torch.

`--device` says it outright; without it a GPU is taken where the cores would take longer for the search
than the GPU with its start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from qconvert.core.errors import PlanError
from qconvert.core.extras import lacking
from qconvert.core.gpus import count_gpus, free_bytes
from qconvert.core.patterns import compiled
from qconvert.core.shown import count
from qconvert.core.sizes import format_size

# What one core searches in a second while all 16 of a Xeon beside an H100 do, in bytes of BF16 weights:
# in compiled loops, of whole conversions (benchmarks/README.md; alone a core does .2 to .3 GB/s), and in
# numpy's form (`benchmarks/run.py kernels`, one thread).
CORE_RATES: Mapping[str, tuple[float, float]] = {
    "ints_search": (0.14e9, 0.01e9),
    "ints_search signed": (0.1e9, 0.005e9),
    "nvfp4_encode": (0.1e9, 0.015e9),
    "amx_search": (0.12e9, 0.06e9),
}
# The same of a GPU and eight workers, with all that a conversion does beside the search: wall time from
# one size to another (AMX), or beyond the start of one (benchmarks/README.md).
GPU_RATES: Mapping[str, float] = {
    "ints_search": 3e9,
    "ints_search signed": 3e9,
    "nvfp4_encode": 4e9,
    "amx_search": 8e9,
}
# The loops that have a form on a GPU, and the module of `qconvert.ops.gpu` that has it.
_LOOPS: Mapping[str, str] = {
    "ints_search": "searches", "nvfp4_encode": "searches", "amx_search": "amx_search",
}  # fmt: skip
# torch's import, a context on the GPU and Triton's compilation: 10 s of a run's start, 4 once they are
# known to this machine.
START_SECONDS = 10.0
# What torch, triton and a context take of a worker's memory beyond what it has on a CPU; no more of the
# GPU's.
DEVICE_BYTES = 1 << 30
# More processes than this gain nothing on one GPU: each has a context, and the bus is full.
MOST_JOBS = 8

_NAME = r"cuda(:\d+)?"


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
    there = START_SECONDS + sum(size / GPU_RATES[loop] for loop, size in searched.items())
    if asked == "cpu":
        return Decision(None, f"{work}; --device cpu")
    if asked is not None:
        _check(asked)
        return Decision(asked, f"{work}; --device {asked}")
    work = f"{work}, a GPU {there:.0f} s with its start"
    if seconds < there:
        return Decision(None, work)
    missing = _missing()
    if missing:
        return Decision(None, f"{work}; {missing}")
    free, wanted = free_bytes(0), min(jobs, MOST_JOBS) * DEVICE_BYTES
    if free is not None and free < wanted:
        return Decision(
            None,
            f"{work}; cuda:0 has {format_size(free)} of memory free, and "
            f"{count(min(jobs, MOST_JOBS), 'worker')} take {format_size(wanted)}: free some, or give "
            "--device cuda:0 and fewer --jobs",
        )
    return Decision("cuda:0", work)


def _check(name: str) -> None:
    missing = _missing()
    if missing:
        raise PlanError(f"device {name}: {missing}; give --device cpu, or leave it out")
    number = int(name.partition(":")[2] or 0)
    found = count_gpus()
    if number >= found:
        raise PlanError(
            f"device {name}: this machine has {count(found, 'GPU')}, cuda:0 to cuda:{found - 1}; give "
            "one of them"
        )


def _missing() -> str:
    """Why no GPU can be used, or nothing."""
    if not count_gpus():
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            return "CUDA_VISIBLE_DEVICES names no GPU"
        return "this machine has no NVIDIA GPU (no /dev/nvidia0)"
    return lacking("kernels")


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
