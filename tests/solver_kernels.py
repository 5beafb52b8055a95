"""The solver's Triton kernels against its operators of torch, which share no code with them: scales,
GPTQ and descent, on heavy-tailed matrices. Run by test_solver_kernels.py in Triton's interpreter, and by
hand on a GPU: `python tests/solver_kernels.py`. Prints a line a case; ends with 1 where one differs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from qconvert.calibrate.solver import choice, descent, gptq, scales
from qconvert.calibrate.solver.order import curvature
from qconvert.calibrate.solver.problem import Curvature, Grid, rounding
from qconvert.cli.demo_checkpoint import heavy_tailed
from qconvert.core.int_scheme import IntScheme

ON = "cuda" if torch.cuda.is_available() else "cpu"
_OFF = 0.002  # of all codes: what sums in another order change


@dataclass(frozen=True)
class Case:
    name: str
    scheme: IntScheme
    batch: int
    columns: int
    rows: int
    block: int
    signed: bool = False


CASES = (
    Case("groups of 32, ragged rows", IntScheme(4, 32), 2, 96, 70, 64),
    Case("groups of 128, both signs", IntScheme(4, 128), 1, 256, 33, 128, signed=True),
    Case("8 bits, groups of 64", IntScheme(8, 64), 2, 192, 40, 128),
    Case("zero points", IntScheme(4, 32, symmetric=False), 2, 64, 37, 64),
    Case("-7 to 7, f32", IntScheme(4, 64, scale_dtype="F32", narrow=True), 1, 128, 20, 48),
    Case("fp16 scales", IntScheme(4, 32, scale_dtype="F16"), 1, 64, 20, 64),
)


def main() -> int:
    wrong = 0
    for case in CASES:
        for what, misfit in _compared(case):
            bad = misfit > _OFF
            wrong += bad
            print(f"{'DIFFERS' if bad else 'fits'}: {case.name}: {what}: {misfit:.5f} differ")
    return 1 if wrong else 0


def _compared(case: Case) -> Iterator[tuple[str, float]]:
    weight, found, grid, scale = _problem(case)
    with_kernels, without = _both(
        lambda: scales.searched(weight, scale, found.inverse.reciprocal(), grid)
    )
    if case.scheme.symmetric:
        yield "scales", _share(with_kernels, without)
    scale = without
    with_kernels, without = _both(lambda: gptq.gptq(weight, scale, grid, found, case.block))
    yield "gptq", _share(with_kernels, without)
    start = rounding(weight, without, scale, found.hessian)
    with_kernels, without = _both(
        lambda: descent.descended(weight, start, found.hessian, grid, 2, case.block).steps
    )
    yield "descent", _share(with_kernels, without)


def _share(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one != other).float().mean())


def _both(solve: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """With the kernels and without."""
    with ExitStack() as stack:
        calls = [
            stack.enter_context(patch.object(module, "fused", wraps=choice.fused))
            for module in (scales, gptq, descent)
        ]
        made = solve()
        assert any(call.called for call in calls)
    assert choice.fused(torch.zeros(1, device=ON), 64) is not None
    with ExitStack() as stack:
        for module in (scales, gptq, descent):
            stack.enter_context(patch.object(module, "fused", return_value=None))
        return made, solve()


def _problem(case: Case) -> tuple[torch.Tensor, Curvature, Grid, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shape = case.batch, case.columns, case.rows
    weight = (
        heavy_tailed((case.batch, case.rows, case.columns), random).transpose(1, 2).contiguous()
    )
    inputs = torch.randn(case.batch, 4 * case.columns, case.columns, generator=random)
    inputs[..., ::16] *= 6  # outlier channels
    hessian = torch.bmm(inputs.transpose(1, 2), inputs).to(ON)
    found = curvature(hessian, 0.01, by_importance=True)
    width = case.scheme.width(case.columns)
    cut = weight.reshape(case.batch, -1, width, case.rows)
    zero = torch.zeros(case.batch, shape[1] // width, case.rows, dtype=torch.int8)
    span = case.scheme.high - case.scheme.low
    if case.scheme.symmetric:
        scale = cut.abs().amax(2) / (span / 2)
    else:
        scale = (cut.amax(2) - cut.amin(2)) / span
        zero = torch.clamp(torch.round(-cut.amin(2) / scale) + case.scheme.low, -8, 7).to(
            torch.int8
        )
    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    kind = dtypes[case.scheme.scale_dtype]
    grid = Grid.of(case.scheme, case.columns, zero.to(ON), kind)
    grid = replace(grid, signed=case.signed)
    return weight.to(ON), found, grid, scale.to(kind).float().to(ON)


if __name__ == "__main__":
    if ON == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("no GPU found; set TRITON_INTERPRET=1 to run the kernels in Triton's interpreter")
    sys.exit(main())
