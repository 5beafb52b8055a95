"""The solver's Triton kernels: in the interpreter they find what the solver's operators find, they
compile, and each is launched on the device that has its tensors; factors by blocks; and products by
halves, as tensor cores take them, by which the solver loses nothing."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from qconvert.calibrate.kernel_choice import by_halves, codes_by_halves, halves, there
from qconvert.calibrate.settings import Settings
from qconvert.calibrate.solver import best
from qconvert.calibrate.solver import curvature as solver_curvature
from qconvert.calibrate.solver.curvature import curvature, lower_inverse
from qconvert.cli.demo import heavy_tailed
from qconvert.core.int_scheme import IntScheme


def program(*words: str, interprets: bool = False) -> list[str]:
    """Lines that solver_kernels.py prints."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interprets:
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(Path(__file__).parent / "solver_kernels.py"), *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.peer
def test_kernels_find_what_operators_find() -> None:
    lines = program(interprets=True)
    # Five a case, four where scales are not searched for; two sums of answers.
    assert len(lines) == 32
    assert all(line.startswith("fits: ") for line in lines)
    exact = [line for line in lines if "llm-compressor's" in line]
    assert len(exact) == 6
    assert all(line.endswith(": 0.00000 differ") for line in exact)


@pytest.mark.peer
def test_a_kernel_compiles_for_a_gpu() -> None:
    """For compute capability 9.0, which needs no GPU, and without instructions that round otherwise than
    llm-compressor's operators: fused, flushing denormals, approximate."""
    found = set(program("compile"))
    assert {"mul.rn.f32", "div.rn.f32", "add.rn.f32"} <= found
    assert found <= {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32"}


@pytest.mark.peer
def test_kernels_have_the_shared_memory_that_they_take() -> None:
    """On GPUs whose programs can have 99 KB, too."""
    lines = program("shared")
    assert len(lines) == 4
    assert all(line.startswith("fits: ") for line in lines)


# --- Devices ---------------------------------------------------------------------------------------


def test_what_launches_kernels_runs_on_its_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    @contextlib.contextmanager
    def of(tensor: torch.Tensor) -> Iterator[None]:
        log.append(f"on {tensor.shape[0]}")
        yield
        log.append("back")

    monkeypatch.setattr(torch.cuda, "device_of", of)

    @there
    def launch(rows: torch.Tensor, other: torch.Tensor, *, more: int) -> int:
        log.append("launch")
        return rows.shape[0] + more

    assert launch(torch.empty(3), torch.empty(2), more=4) == 7
    assert log == ["on 3", "launch", "back"]


@pytest.mark.peer
def test_all_that_launches_kernels_does_so() -> None:
    """Every public function that has a kernel in its code."""
    from qconvert.calibrate import triton_kernels

    found = []
    for name, one in inspect.getmembers(triton_kernels, inspect.isfunction):
        plain = inspect.unwrap(one)
        launches = re.search(r"^    \w+\[", inspect.getsource(plain), re.MULTILINE)
        if one.__module__ == triton_kernels.__name__ and launches:
            found.append(name)
            assert plain is not one, f"{name} is not decorated with `there`"
    assert len(found) == 7, found


# --- Factors ---------------------------------------------------------------------------------------


def _hessians(batch: int, columns: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(batch, 3 * columns, columns, generator=random)
    inputs[..., ::32] *= 8
    return torch.bmm(inputs.transpose(1, 2), inputs)


def test_factors_by_blocks_are_inverses() -> None:
    """Of a size that is no multiple of a block, in float64 against a true inverse."""
    hessians = _hessians(2, 300)
    found, failed = lower_inverse(hessians.clone())
    assert not failed.any()
    assert torch.equal(found, found.tril())
    product = found.double() @ hessians.double() @ found.double().transpose(1, 2)
    assert float((product - torch.eye(300)).abs().max()) < 1e-3


def test_factors_by_blocks_are_those_of_one_by_one() -> None:
    hessians = _hessians(3, 160)
    one = curvature(hessians.clone(), 0.01, by_importance=True)
    damped = one.hessian
    turned = one.order.flip(1)
    each = torch.arange(3)[:, None, None]
    found, failed = lower_inverse(damped[each, turned[:, :, None], turned[:, None, :]])
    assert not failed.any()
    factor = found.flip(1, 2)
    assert float((factor - one.factor).abs().max() / one.factor.abs().max()) < 1e-5


def test_a_matrix_that_is_not_positive_definite_fails_alone() -> None:
    hessians = _hessians(3, 140)
    hessians[1, 130, 130] = -1.0
    _, failed = lower_inverse(hessians)
    assert failed.tolist() == [False, True, False]


# --- Products --------------------------------------------------------------------------------------

ROWS, COLUMNS, GROUP = 96, 256, 32


def test_halves_add_up() -> None:
    values = heavy_tailed((64, 128), torch.Generator().manual_seed(0))
    high, low = halves(values)
    off = (high.double() + low.double() - values.double()).abs()
    assert bool((off <= values.double().abs() * 2.0**-16).all())


def test_a_product_is_wrong_by_less_than_it_says() -> None:
    random = torch.Generator().manual_seed(1)
    one, other = heavy_tailed((2, 40, 300), random), heavy_tailed((2, 300, 50), random)
    exact = one.double() @ other.double()
    most = one.double().abs() @ other.double().abs()
    # What halves leave out, and float32's own rounding of 900 sums.
    assert bool(((by_halves(one, other) - exact).abs() <= most * (2.0**-15 + 900 * 2.0**-24)).all())
    codes = torch.randint(-128, 128, (2, 300, 50), generator=random).float()
    exact = one.double() @ codes.double()
    most = one.double().abs() @ codes.double().abs()
    wrong = (codes_by_halves(one, codes) - exact).abs()
    assert bool((wrong <= most * (2.0**-16 + 600 * 2.0**-24)).all())


def _loss(by_tensor_cores: bool) -> float:
    """Loss of the best codes of a heavy-tailed matrix under inputs with outlier channels."""
    random = torch.Generator().manual_seed(2)
    weight = heavy_tailed((1, ROWS, COLUMNS), random).bfloat16()
    inputs = torch.randn(1, 4 * COLUMNS, COLUMNS, generator=random)
    inputs = inputs + inputs @ torch.randn(COLUMNS, COLUMNS, generator=random) / 16
    inputs[..., ::16] *= 8
    hessian = torch.bmm(inputs.transpose(1, 2), inputs)
    scale = (weight.float().reshape(1, ROWS, -1, GROUP).abs().amax(-1) / 7.5).bfloat16()
    zero = torch.zeros(scale.shape, dtype=torch.int8)

    def added(to: torch.Tensor, one: torch.Tensor, other: torch.Tensor, *, sign: int = 1) -> None:
        to.add_(by_halves(one, other), alpha=sign)

    with ExitStack() as stack:
        if by_tensor_cores:
            for module in (solver_curvature, best):
                stack.enter_context(patch.object(module, "product", by_halves))
            stack.enter_context(patch.object(best, "add_product", added))
            stack.enter_context(patch.object(best, "product_with_codes", codes_by_halves))
        codes, kept, failed = best.best(
            weight, hessian.clone(), scale, zero, IntScheme(4, GROUP), Settings()
        )
    assert not failed.any()
    meant = codes.double().reshape(1, ROWS, -1, GROUP) * kept.double()[..., None]
    off = meant.flatten(2) - weight.double()
    return float(((off @ hessian.double()) * off).sum())


def test_the_solver_loses_nothing_by_them() -> None:
    plain, fast = _loss(False), _loss(True)
    print(f"loss {plain:.6g} in float32, {fast:.6g} by halves: {fast / plain:.6f}")
    assert plain > 0
    assert abs(fast / plain - 1) < 0.001
