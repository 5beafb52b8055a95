"""Memory of a calibration: the user's --memory cut into shares."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from qconvert.calibrate import llmcompressor_backend
from qconvert.calibrate.settings import Solver
from qconvert.calibrate.solver.best import best_bytes
from qconvert.core.errors import RunError

_MACHINE = 0.75  # of the machine's memory, where the user gives no number
# Of an accelerator's, whatever else is on it, because group sizes must not depend on that: for experts,
# and for what a layer keeps of each token.
_DEVICE, _DEVICE_STATES = 0.5, 0.35
_M_MMAP_THRESHOLD = -3  # malloc.h
_MAPPED = 1 << 20  # what is larger is mapped, and unmapped when it is freed
_TOGETHER = 2 << 30  # of Hessians that an accelerator solves at a time
_ROUTES = 1 << 10  # of a token's places among the experts, while they are sorted
_SLACK = 160 << 20  # what libraries take once they compute: threads, kernels, free lists
# Of what is free at the start, for what a layer keeps of each token; and where an accelerator has the
# experts.
_STATES, _STATES_BESIDE = 0.25, 0.75
_CODES = 2 << 30  # for codes on their way to who writes them, beside an accelerator
# Of what an accelerator has for experts, for solving: the more are solved at a time, the fewer are in
# its memory, and all tokens pass by each group. With 8 of DeepSeek-V3 solved at a time 42 GB held five.
_SOLVING = 0.3


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes: `memory` for the whole process, `base` what it took before, `states` by device for what a
    layer keeps of each token, `device` what an accelerator has for experts (0: a CPU)."""

    memory: int
    base: int
    states: Mapping[str, int]
    device: int

    def with_rest(self, device: str, left: int) -> Budget:
        """Experts have what is left of a device's memory for what a layer keeps of each token."""
        return self if device == "cpu" else replace(self, device=self.device + left)

    @classmethod
    def of(cls, memory: int | None, device: str) -> Budget:
        """Shares of a number of bytes, None: three quarters of the machine."""
        base = resident() + _SLACK
        if memory is None:
            memory = int(_MACHINE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        states = {"cpu": int(_STATES * max(0, memory - base))}
        if device != "cpu":
            states["cpu"] = int(_STATES_BESIDE * max(0, memory - base - _CODES))
            states = {device: _device_bytes(device, _DEVICE_STATES), **states}
        return cls(memory, base, states, _device_bytes(device, _DEVICE))


def solver_libraries(solver: Solver, device: str) -> int:
    """Bytes that a budget's base does not count: of llm-compressor, where its own functions solve on a
    device and nobody has imported it yet."""
    return _theirs_bytes() if llmcompressor_backend.are_asked(solver, device) else 0


@cache
def _theirs_bytes() -> int:
    """Return what llm-compressor takes that was not there yet: 0 where it had been imported."""
    before = resident()
    llmcompressor_backend.load()
    return max(0, resident() - before)


def resident() -> int:
    """Bytes of memory that this process has now."""
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def keep_nothing_freed() -> None:
    """Let freed memory go back to the system: what glibc keeps for later (malloc(3), mallopt(3)) and
    oneDNN's kernels for every number of rows there ever was would count as this process's."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _MAPPED)


def trim() -> None:
    """Give back what is free in the heap."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def _device_bytes(device: str, share: float) -> int:
    if device == "cpu":
        return 0
    import torch

    return int(share * torch.cuda.get_device_properties(device).total_memory)


def solved_together(asked: int, columns: int) -> int:
    """Matrices that an accelerator solves at a time: fewer where their Hessians are large. A power of
    two, so that batches of one size are whole ones of a smaller."""
    most = max(1, min(asked, _TOGETHER // (4 * columns * columns)))
    return 1 << (most.bit_length() - 1)


def together_on(
    device: int,
    asked: int,
    *,
    hidden: int,
    middle: int,
    schemes: int,
    solver: Solver,
    corrects: bool,
) -> int:
    """Of how many experts an accelerator solves a matrix at a time: `asked`, or fewer where solving
    would take more than its share of `device`, the bytes that it has for experts."""
    share = int(_SOLVING * device)
    found = asked
    while (most := max(batches := _batches(found, hidden, middle))) > 1:
        need = _solver_bytes(hidden, middle, schemes, solver, batches, "cuda", corrects=corrects)
        if need <= share:
            break
        found = most // 2
    return found


def _batches(together: int, hidden: int, middle: int) -> tuple[int, int]:
    """Return how many matrices an accelerator solves at a time, of gate and up, and of down."""
    return solved_together(together, hidden), solved_together(together, middle)


def _expert_bytes(hidden: int, middle: int, own_hessians: bool, corrects: bool = False) -> int:
    """An expert in memory: BF16 weights, float32 Hessians. To correct propagated errors, weights as they
    were and as they are served, and for one matrix after the other its Hessian and what that is
    multiplied with."""
    if corrects:
        return 6 * hidden * middle * 2 + 8 * max(middle, hidden if own_hessians else 0) ** 2
    hessians = 4 * middle * middle + (4 * hidden * hidden if own_hessians else 0)
    return 3 * hidden * middle * 2 + hessians


def _solver_bytes(
    hidden: int, middle: int, schemes: int, solver: Solver, batches: tuple[int, int] = (1, 1),
    device: str = "cpu", *, corrects: bool = False,
) -> int:  # fmt: skip
    """Some matrices being solved, `batches` of gate and up or of down at a time: Hessians and their
    copies, and the matrices in float32 with their errors. Where propagated errors are corrected, what
    they are solved against is float32."""
    tallest = 2 * middle * hidden
    kept = (schemes * 2 + (6 if corrects else 0)) * tallest
    shapes = ((2 * middle, hidden), (hidden, middle))

    def solving(batch: int, rows: int, columns: int) -> int:
        if solver == "best":
            return best_bytes(batch, rows, columns, device)
        return batch * 4 * (3 * columns * columns + 4 * tallest)

    each = zip(batches, shapes, strict=True)
    return max(kept * batch + solving(batch, *shape) for batch, shape in each)


def least_bytes(
    hidden: int, middle: int, schemes: int, solver: Solver, *, corrects: bool = False
) -> int:
    """Memory without which no expert can be solved on a CPU, known from shapes alone: libraries, a
    layer's other weights and its tokens come on top."""
    solving = _solver_bytes(hidden, middle, schemes, solver, corrects=corrects)
    return _expert_bytes(hidden, middle, True, corrects) + solving


def experts_together(
    budget: Budget,
    device: str,
    *,
    hidden: int,
    middle: int,
    own_hessians: bool,
    schemes: int,
    solver: Solver,
    together: int,
    layer_bytes: int,
    chunk: int,
    corrects: bool = False,
    most: int | None = None,
    hosted: int = 0,
    receives: bool = False,
) -> int:
    """Experts that a device works on together. `chunk` tokens pass at a time, of which an expert
    of an accelerator sees `most` together (None: a CPU sees all); of `hosted` streams they come from the
    host's memory. If it `receives` experts of others, those answer in the place of Hessians of its own.
    Raises RunError where not one fits, with the smallest budget that is enough."""
    one = _expert_bytes(hidden, middle, own_hessians, corrects)
    if receives and not own_hessians:
        one += 6 * hidden * middle * (2 if corrects else 1)
    streams = 2 if corrects else 1
    if most is None:
        # A chunk's inputs, what goes into down_proj, and each of them in float32.
        passing = streams * (chunk * (hidden + middle) * 12 + chunk * 4 * middle)
    else:
        # Inputs of what an expert sees together, how they differ, and what is made of gate and up; the
        # chunk's and the next one's on their way, and who gets which of them.
        passing = most * (2 * (streams + 1) * hidden + 16 * middle)
        passing += chunk * (2 * hosted * 2 * hidden + _ROUTES)
    shared = 0 if own_hessians else (8 if corrects else 4) * hidden * hidden
    rest = passing + layer_bytes + shared
    on_cpu = device == "cpu"
    batches = (1, 1) if on_cpu else _batches(together, hidden, middle)
    fixed = rest + _solver_bytes(
        hidden, middle, schemes, solver, batches, device, corrects=corrects
    )
    fixed += solver_libraries(solver, device)
    free = budget.device
    if on_cpu:
        free = budget.memory - budget.base - budget.states.get("cpu", 0)
    count = (free - fixed) // one
    if count < 1 and on_cpu:
        need = budget.base + int((fixed + one) / (1 - _STATES)) + (1 << 20)
        raise RunError(
            f"one expert with its Hessians needs {(fixed + one) >> 20} MiB, and libraries "
            f"{budget.base >> 20} MiB, more than this run may take; give --memory "
            f"{(need >> 20) + 1}MiB"
        )
    return max(1, count)


# Memory that solving linear layers takes, and how many of their Hessians fit at a time.


def solver_bytes(rows: int, columns: int, schemes: int, solver: Solver, device: str) -> int:
    """A matrix [rows, columns] being solved, beside its Hessian: a copy of that and its factors, the
    matrix as it is read and as floats, codes and what they mean for each scheme."""
    kept = (2 + 3 * schemes) * rows * columns + 4 * columns * columns
    if solver == "best":
        return kept + best_bytes(1, rows, columns, device)
    return kept + 4 * (3 * columns * columns + 4 * rows * columns)


def least_linear_bytes(rows: int, columns: int, schemes: int, solver: Solver) -> int:
    """Memory without which a linear cannot be solved on a CPU, known from its shape alone: libraries,
    its layer's weights and tokens come on top."""
    return 4 * columns * columns + solver_bytes(rows, columns, schemes, solver, "cpu")


def rounds(
    budget: Budget,
    device: str,
    shapes: Sequence[Sequence[tuple[int, int]]],
    *,
    schemes: int,
    solver: Solver,
    layer_bytes: int,
    chunk: int,
    keeps: bool,
) -> list[list[int]]:
    """Return which sets of linears have their Hessians in memory together, one list after the other:
    numbers of sets in order. `shapes` are [rows, columns] of the matrices of each set, which share an
    input; `layer_bytes` are the layer's weights, `chunk` the tokens that run through it together;
    `keeps`: it has experts, for which something is kept of each token.

    Raises RunError where not one fits on a CPU, with the smallest budget that is enough."""
    every = [shape for some in shapes for shape in some]
    solving = max(solver_bytes(*shape, schemes, solver, device) for shape in every)
    # What codes mean waits aside, in BF16, until all Hessians have been counted.
    aside = sum(2 * rows * columns for rows, columns in every)
    wide = max(rows + columns for rows, columns in every)
    # Inputs in float32 and once more to be multiplied; each set's is alive while sets are told apart.
    passing = chunk * (12 * wide + 2 * sum(some[0][1] for some in shapes))
    libraries = solver_libraries(solver, device)
    fixed = solving + aside + passing + layer_bytes + libraries
    on_cpu = device == "cpu"
    of_process = budget.memory - budget.base - (budget.states.get("cpu", 0) if keeps else 0)
    free = of_process if on_cpu else budget.device
    widest = max(4 * columns * columns for _, columns in every)
    if on_cpu and free < fixed + widest:
        need = budget.base + int((fixed + widest) / (1 - _STATES * keeps)) + (1 << 20)
        raise RunError(
            f"one linear layer with its Hessian needs {(fixed + widest) >> 20} MiB, and libraries "
            f"{budget.base >> 20} MiB, more than this run may take; give --memory "
            f"{(need >> 20) + 1}MiB"
        )
    found: list[list[int]] = []
    left = 0
    for number, some in enumerate(shapes):
        size = 4 * some[0][1] ** 2
        if not found or size > left:
            found.append([])
            left = free - fixed
        found[-1].append(number)
        left -= size
    return found
