"""The solver's Triton kernels, in the interpreter: the same codes as the solver's operators find."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qconvert.calibrate.solver.factor import lower_inverse
from qconvert.calibrate.solver.order import curvature

PROGRAM = Path(__file__).parent / "solver_kernels.py"


@pytest.mark.peer
def test_kernels_find_what_operators_find() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], check=False, capture_output=True, text=True, env=env
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        len(lines) == 37
    )  # six a case, five where scales are not searched for; two sums of answers
    assert all(line.startswith("fits: ") for line in lines)
    exact = [line for line in lines if "llm-compressor's" in line]
    assert len(exact) == 12
    assert all(line.endswith(": 0.00000 differ") for line in exact)


@pytest.mark.peer
def test_a_kernel_compiles_for_a_gpu() -> None:
    """For compute capability 9.0, which needs no GPU, and without instructions that round otherwise than
    llm-compressor's operators: fused, flushing denormals, approximate."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "compile"],
        check=False, capture_output=True, text=True, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = set(done.stdout.split())
    assert {"mul.rn.f32", "div.rn.f32", "add.rn.f32"} <= found
    assert found <= {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32"}


@pytest.mark.peer
def test_kernels_have_the_shared_memory_that_they_take() -> None:
    """On GPUs whose programs can have 99 KB, too."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "shared"],
        check=False,
        capture_output=True,
        text=True,
        env=env,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert len(lines) == 4
    assert all(line.startswith("fits: ") for line in lines)


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
