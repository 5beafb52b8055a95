"""GPTQ for a GPU as llm-compressor solves it against its `quantize_weight`: on a GPU where there is
one, else on the CPU. The kernel in Triton's interpreter: tests/solver_kernels.py."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from qconvert.calibrate import solve
from qconvert.calibrate.settings import Settings
from qconvert.calibrate.solve import Quantized
from qconvert.calibrate.solver import parity
from qconvert.calibrate.solver.curvature import lower_inverse, upper_factor
from qconvert.cli.demo import heavy_tailed
from qconvert.core.int_scheme import IntScheme

ON = "cuda" if torch.cuda.is_available() else "cpu"
THEIRS = Settings(solver="llmcompressor")
NARROW = IntScheme(4, None, scale_dtype="F32", narrow=True)
SCHEMES = {
    "g128": IntScheme(4, 128),
    "g32": IntScheme(4, 32),
    "row": IntScheme(4, None),
    "asymmetric": IntScheme(4, 32, symmetric=False),
    "asymmetric row": IntScheme(4, None, symmetric=False),
    "int8 row": IntScheme(8, None),
    "int8 asymmetric": IntScheme(8, 128, symmetric=False),
    "static": IntScheme(4, 128, actorder="static"),
    "static asymmetric": IntScheme(4, 32, symmetric=False, actorder="static"),
    "group": IntScheme(4, 32, actorder="group"),
    "float16 scales": IntScheme(4, 32, scale_dtype="F16"),
    "float32 scales": IntScheme(4, 32, symmetric=False, scale_dtype="F32"),
    "narrow": NARROW,
    "narrow static": replace(NARROW, group=64, actorder="static"),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def case(seed: int, rows: int = 96, columns: int = 384) -> tuple[torch.Tensor, torch.Tensor]:
    """A heavy-tailed weight, and the Hessian of correlated inputs with outlier channels."""
    generator = torch.Generator().manual_seed(seed)
    weight = heavy_tailed((rows, columns), generator).bfloat16()
    mixed = torch.randn(columns, columns, generator=generator) / columns**0.5
    inputs = torch.randn(3 * columns, columns, generator=generator) @ (
        mixed + torch.eye(columns) / 4
    )
    inputs[:, ::64] *= 8
    return weight, 2 * inputs.t() @ inputs


Both = tuple[list[Quantized], list[Quantized]]


def both(
    weights: list[torch.Tensor], hessians: torch.Tensor, scheme: IntScheme, settings: Settings = THEIRS
) -> tuple[Both, tuple[list[bool], list[bool]]]:  # fmt: skip
    """Ours and theirs, and what each says could not be factorized."""
    weights, hessians = [weight.to(ON) for weight in weights], hessians.to(ON)
    with patch.object(solve, "_by_llmcompressor", return_value=True):
        theirs, their_failed = solve.solved(weights, hessians.clone(), scheme, settings)
    with patch.object(solve, "_by_llmcompressor", return_value=False):
        ours, failed = solve.solved(weights, hessians.clone(), scheme, settings)
    return (ours, theirs), (failed, their_failed)


def rows_that_differ(ours: list[Quantized], theirs: list[Quantized]) -> int:
    pairs = zip(ours, theirs, strict=True)
    return sum(int((one.codes != other.codes).any(1).sum()) for one, other in pairs)


def off(one: Quantized, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """What outputs are off by, squared and summed."""
    codes = one.numpy()
    adjacent = np.arange(weight.shape[1]) // (weight.shape[1] // codes.scale.shape[1])
    groups = adjacent if codes.g_idx is None else codes.g_idx
    zero = 0 if codes.zero is None else codes.zero[:, groups].astype(np.float32)
    meant = torch.from_numpy((codes.codes.astype(np.float32) - zero) * codes.scale[:, groups])
    wrong = (weight.float() - meant).double()
    return float(((wrong @ hessian.double()) * wrong).sum())


def by_lapack(
    hessians: torch.Tensor, left: torch.Tensor, dampening: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of Hessians with inputs in every column, by the functions that llm-compressor calls."""
    diagonal = hessians.diagonal(dim1=1, dim2=2)
    diagonal.add_(dampening * diagonal.mean(1, keepdim=True))
    factors = []
    for hessian in hessians:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
        factors.append(torch.linalg.cholesky(inverse, upper=True))
    return torch.stack(factors), torch.zeros(len(hessians), dtype=torch.bool)


@pytest.mark.skipif(ON != "cpu", reason="llm-compressor's kernel may fuse products and sums")
@every_scheme
def test_under_the_same_factors_every_code_is_theirs(scheme: IntScheme) -> None:
    cases = [case(seed) for seed in range(3)]
    stacked = torch.stack([hessian for _, hessian in cases])
    with patch.object(parity, "_factorized", by_lapack):
        (ours, theirs), _ = both([weight for weight, _ in cases], stacked, scheme)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.scale, other.scale)
        assert torch.equal(one.weight, other.weight)
        for mine, its in ((one.zero, other.zero), (one.g_idx, other.g_idx)):
            assert mine is its if mine is None or its is None else torch.equal(mine, its)


def test_codes_are_theirs() -> None:
    """But for one in 10,000, and the loss to 1e-4: where a value lies within float rounding of the
    middle of two codes, and in its row after it. Factors in float64 change as many."""
    codes = differing = 0
    loss, their_loss = [], []
    cases = [case(seed) for seed in range(3)]
    stacked = torch.stack([hessian for _, hessian in cases])
    for scheme in SCHEMES.values():
        (ours, theirs), (failed, their_failed) = both([w for w, _ in cases], stacked, scheme)
        assert failed == their_failed == [False] * 3
        for one, other, (weight, hessian) in zip(ours, theirs, cases, strict=True):
            codes += one.codes.numel()
            differ = one.codes != other.codes
            differing += int(differ.sum())
            assert int(differ.any(1).sum()) <= 2  # of 96 rows
            loss.append(off(one, weight, hessian))
            their_loss.append(off(other, weight, hessian))
            assert loss[-1] == pytest.approx(their_loss[-1], rel=1e-3)
    print(f"{differing} of {codes} codes differ, loss {sum(loss) / sum(their_loss) - 1:.1e}")
    assert differing <= 1e-4 * codes
    assert sum(loss) == pytest.approx(sum(their_loss), rel=1e-4)


@pytest.mark.parametrize("block", [48, 256, 512])
def test_blocks_of_other_sizes(block: int) -> None:
    weight, hessian = case(4)
    settings = replace(THEIRS, block_size=block)
    (ours, theirs), _ = both([weight], hessian[None], SCHEMES["static"], settings)
    assert rows_that_differ(ours, theirs) <= 1


@every_scheme
def test_columns_without_inputs_become_zeros(scheme: IntScheme) -> None:
    weight, hessian = case(5)
    dead = torch.arange(7, 384, 50)
    hessian[dead], hessian[:, dead] = 0, 0
    (ours, theirs), _ = both([weight], hessian[None], scheme)
    assert rows_that_differ(ours, theirs) <= 1
    assert not ours[0].weight[:, dead].any()


@pytest.mark.parametrize("name", ["g128", "static asymmetric", "narrow"])
def test_hessians_that_cannot_be_factorized(name: str) -> None:
    """Two of them, one by its last block; llm-compressor rounds these to nearest, and so do we."""
    cases = [case(seed) for seed in range(4)]
    stacked = torch.stack([hessian for _, hessian in cases])
    stacked[1, 0, 0] = -1e6
    stacked[2, 383, 382] = stacked[2, 382, 383] = 1e7
    weights = [weight for weight, _ in cases]
    (ours, theirs), (failed, their_failed) = both(weights, stacked, SCHEMES[name])
    assert failed == their_failed == [False, True, True, False]
    assert rows_that_differ(ours, theirs) <= 2
    assert not rows_that_differ(ours[1:3], theirs[1:3])


def test_the_largest_batches_of_theirs_go_another_way() -> None:
    """From 16 matrices llm-compressor factorizes a batch at once."""
    cases = [case(seed, 16, 128) for seed in range(17)]
    stacked = torch.stack([hessian for _, hessian in cases])
    stacked[3, 5, 5] = -1.0
    (ours, theirs), (failed, their_failed) = both([w for w, _ in cases], stacked, SCHEMES["g32"])
    assert failed == their_failed
    assert sum(failed) == 1
    assert rows_that_differ(ours, theirs) <= 2


def test_factors_by_blocks() -> None:
    """U of the inverse, of a size that is no multiple of a block, as llm-compressor's steps find it."""
    hessians = torch.stack([case(seed, 8, 300)[1] for seed in range(2)])
    hessians.diagonal(dim1=1, dim2=2).mul_(1.01)
    wanted = torch.cholesky_inverse(torch.linalg.cholesky(hessians.double()))
    wanted = torch.linalg.cholesky(wanted, upper=True)
    lower, failed = lower_inverse(hessians.clone())
    found = torch.bmm(lower.transpose(1, 2), lower)
    failed |= upper_factor(found)
    assert not failed.any()
    assert torch.equal(found, found.triu())
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5
    found[1, 260, 260] = -1.0
    assert upper_factor(found.triu() + found.triu(1).transpose(1, 2)).tolist()[1]
