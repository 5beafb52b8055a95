"""Memory that solving linear layers takes, and how many of their Hessians fit at a time."""

from __future__ import annotations

from collections.abc import Sequence

from qconvert.calibrate.memory import Budget, solver_libraries
from qconvert.calibrate.settings import Solver
from qconvert.calibrate.solver.best import best_bytes
from qconvert.core.errors import RunError

_STATES = 0.25  # as memory.py divides what is free at the start


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
