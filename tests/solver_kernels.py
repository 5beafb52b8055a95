"""The solver's Triton kernels against its operators of torch, which share no code with them: scales,
GPTQ, llm-compressor's GPTQ and descent, on heavy-tailed matrices; and the sum of what experts answer.
Run by test_solver_kernels.py in Triton's interpreter, and by hand on a GPU: `python
tests/solver_kernels.py`. Prints a line a case; ends with 1 where one differs. `compile` compiles the
kernel for llm-compressor's codes for compute capability 9.0, and prints what of its instructions rounds.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from qconvert.calibrate import kernel_choice, token_dispatch
from qconvert.calibrate.settings import Settings
from qconvert.calibrate.solver import best, parity
from qconvert.calibrate.solver.curvature import Curvature, Grid, curvature, rounding
from qconvert.calibrate.token_dispatch import dispatch_of
from qconvert.cli.demo import heavy_tailed
from qconvert.core.int_scheme import Actorder, IntScheme

ON = "cuda" if torch.cuda.is_available() else "cpu"
_MODULES = (best, parity)
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
    static: bool = False  # llm-compressor's codes: columns by importance, not as they are stored


CASES = (
    Case("groups of 32, ragged rows", IntScheme(4, 32), 2, 96, 70, 64),
    Case("groups of 128, both signs", IntScheme(4, 128), 1, 256, 33, 128, signed=True, static=True),
    Case("8 bits, groups of 64", IntScheme(8, 64), 2, 192, 40, 128),
    Case("zero points", IntScheme(4, 32, symmetric=False), 2, 64, 37, 64, static=True),
    Case("-7 to 7, f32", IntScheme(4, 64, scale_dtype="F32", narrow=True), 1, 128, 20, 48),
    Case("fp16 scales", IntScheme(4, 32, scale_dtype="F16"), 1, 64, 20, 64, static=True),
)


def main() -> int:
    wrong = 0
    for case in CASES:
        for what, misfit in _compared(case):
            bad = misfit > _OFF
            wrong += bad
            print(f"{'DIFFERS' if bad else 'fits'}: {case.name}: {what}: {misfit:.5f} differ")
    for what, misfit in _answers():
        wrong += misfit > 0
        print(f"{'DIFFERS' if misfit else 'fits'}: {what}: {misfit:.5f} differ")
    return 1 if wrong else 0


def _answers() -> Iterator[tuple[str, float]]:
    """Answers of experts added up, bit for bit, wide and narrow rows, and rows in float32, which no
    kernel adds; and that NaN stays NaN."""
    random = torch.Generator().manual_seed(0)
    for width, k, dtype, held in (
        (1100, 3, torch.float32, torch.bfloat16),
        (48, 8, torch.bfloat16, torch.bfloat16),
        (48, 8, torch.float32, torch.float32),
    ):
        routes = torch.stack([torch.randperm(9, generator=random)[:k] for _ in range(20)]).int()
        shares = torch.rand(20, k, generator=random).to(dtype)
        sorted_by = dispatch_of(routes.to(ON), shares.to(ON), 9)
        start, stop = sorted_by.starts[2], sorted_by.starts[7]
        answers = heavy_tailed((stop - start, width), random).to(held).to(ON)
        answers[3, 5] = torch.nan
        answers[4, 6] = torch.inf
        before = heavy_tailed((20, width), random).to(held).to(ON)
        made, wanted = before.clone(), before.clone()
        assert kernel_choice.by_triton(made)
        token_dispatch.add_answers(made, answers, sorted_by, start)
        with patch.object(token_dispatch, "by_triton", return_value=False):
            token_dispatch.add_answers(wanted, answers, sorted_by, start)
        assert wanted.isnan().any()
        assert wanted.isinf().any()
        same = (made == wanted) | (made.isnan() & wanted.isnan())
        yield f"answers of {width} columns in {held}", 1 - float(same.float().mean())


def _compared(case: Case) -> Iterator[tuple[str, float]]:
    weight, found, grid, scale = _problem(case)
    with_kernels, without = _both(
        lambda: best.searched(weight, scale, found.inverse.reciprocal(), grid)
    )
    if case.scheme.symmetric:
        yield "scales", _share(with_kernels, without)
    scale = without
    with_kernels, without = _both(lambda: best.gptq(weight, scale, grid, found, case.block))
    yield "gptq", _share(with_kernels, without)
    # Within what BF16 halves of a Hessian leave: 100 times nearer than without the lower one.
    yield "normal equations", 40 * _normal_equations(case, without, found.hessian, grid)
    start = rounding(weight, without, scale, found.hessian)
    with_kernels, without = _both(
        lambda: best.descended(weight, start, found.hessian, grid, 2, case.block).steps
    )
    yield "descent", _share(with_kernels, without)
    order: Actorder | None = "static" if case.static else None
    ordered = replace(case, scheme=replace(case.scheme, actorder=order))
    with_kernels, without = _both(partial(_parity, ordered, weight, found.hessian, scale, grid))
    yield f"llm-compressor's, order {order or 'stored'}", _share(with_kernels, without)


def _parity(
    case: Case, weight: torch.Tensor, hessian: torch.Tensor, scale: torch.Tensor, grid: Grid
) -> torch.Tensor:
    """Codes of llm-compressor's GPTQ."""
    zero = (case.scheme.low - grid.low).expand_as(scale).to(torch.int8).transpose(1, 2)
    held = scale.transpose(1, 2).to(grid.dtype)
    settings = Settings(block_size=case.block)
    rows = weight.transpose(1, 2)
    return parity.parity(rows, hessian.clone(), held, zero, case.scheme, settings)[0]


def _normal_equations(case: Case, steps: torch.Tensor, hessian: torch.Tensor, grid: Grid) -> float:
    """How far a row's are from what float64 gives, over their diagonal's mean: 1e-5 on an H100."""
    made, without = _both(lambda: best._normal(steps, hessian, grid).tril())
    count = case.columns // grid.width
    cut = steps.double().reshape(case.batch, count, grid.width, -1)
    blocks = hessian.double().reshape(case.batch, count, grid.width, count, grid.width)
    wanted = torch.einsum("bgin,bgihj,bhjn->bngh", cut, blocks, cut).tril()
    size = wanted.diagonal(dim1=2, dim2=3).mean(-1)
    return max(float(((one - wanted).abs().amax((2, 3)) / size).max()) for one in (made, without))


def _share(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one != other).float().mean())


def _both(solve: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """With the kernels and without."""
    with ExitStack() as stack:
        calls = [
            stack.enter_context(patch.object(module, "fused", wraps=kernel_choice.fused))
            for module in _MODULES
        ]
        made = solve()
        assert any(call.called for call in calls)
    assert kernel_choice.fused(torch.zeros(1, device=ON), 64) is not None
    with ExitStack() as stack:
        for module in _MODULES:
            stack.enter_context(patch.object(module, "fused", return_value=None))
        stack.enter_context(patch.object(kernel_choice, "by_triton", return_value=False))
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


_TYPES = {
    "left": "*fp32", "factor": "*fp32", "groups": "*i64", "scale": "*fp32", "made": "*i8",
    "lost": "*fp32", "columns": "i32", "rows": "i32", "count": "i32", "start": "i32", "width": "i32",
    "low": "fp32", "high": "fp32",
}  # fmt: skip
# PTX that does not round.
_EXACT = {"mov", "neg", "abs", "min", "max", "setp", "selp", "ld", "st", "cvt", "shfl"}


def compile_all() -> int:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qconvert.calibrate import triton_kernels

    kernel: Any = triton_kernels._parity_block
    names, found = kernel.arg_names, set()
    for zero in (True, False):
        for dtype in range(3):
            types = {**_TYPES, "zero": "*i8" if zero else "*fp32"}
            constants = {"ZERO": zero, "DTYPE": dtype, "BLOCK": 128, "ROWS": 32}
            source = ASTSource(
                kernel,
                {name: types.get(name, "constexpr") for name in names},
                {(names.index(name),): value for name, value in constants.items()},
            )
            made = triton.compile(
                source, target=GPUTarget("cuda", 90, 32), options=triton_kernels._APART
            )
            rounding = re.findall(r"^\s*((?:\w+\.)*f(?:32|64))\b", made.asm["ptx"], re.MULTILINE)
            found |= {name for name in rounding if name.split(".")[0] not in _EXACT}
    print(*sorted(found), sep="\n")
    return 0


# Of GPUs with little shared memory and of those with more: the bytes that a program can have.
_SHARED = {86: 101_376, 90: 232_448}


def shared_all() -> int:
    """Prints what kernels of products take of shared memory, and whether there is as much."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qconvert.calibrate import triton_kernels

    normal: Any = triton_kernels._normal
    blocks: Any = triton_kernels._add_product
    wrong = 0
    for target, most in _SHARED.items():
        options = triton_kernels.normal_options(divmod(target, 10))
        asked: list[tuple[Any, dict[str, Any], dict[str, int]]] = [
            (normal, {"WIDTH": 128, "TALL": 128, "ROWS": 64, "HALVES": True}, options)
        ]
        sizes = {
            "SIDE": triton_kernels._SIDE,
            "DEEP": triton_kernels._DEEP,
            "HALVES": True,
            "one_inner": 1,
        }
        asked.append((blocks, sizes, triton_kernels.OPTIONS))
        for kernel, constants, launch in asked:
            names = kernel.arg_names
            matrices = ("steps", "hessian", "found", "to", "one", "other")
            types = {name: "*fp32" if name in matrices else "i32" for name in names}
            types |= {"sign": "fp32"} | dict.fromkeys(constants, "constexpr")
            source = ASTSource(
                kernel, {name: types[name] for name in names},
                {(names.index(name),): value for name, value in constants.items()},
            )  # fmt: skip
            made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=launch)
            wrong += made.metadata.shared > most
            fits = "DIFFERS" if made.metadata.shared > most else "fits"
            print(f"{fits}: sm_{target}: {kernel.fn.__name__}: {made.metadata.shared} of {most}")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["shared"]:
        sys.exit(shared_all())
    if sys.argv[1:] == ["compile"]:
        sys.exit(compile_all())
    if ON == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("no GPU found; set TRITON_INTERPRET=1 to run the kernels in Triton's interpreter")
    sys.exit(main())
