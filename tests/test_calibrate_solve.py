"""Codes from Hessians: a case worked by hand, batches against single matrices, narrow codes, scales."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from qconvert.calibrate.settings import Settings
from qconvert.calibrate.solve import rounded, solved
from qconvert.cli.demo import heavy_tailed
from qconvert.core.int_scheme import Codes, IntScheme

PLAIN = Settings(solver="llmcompressor", search="none")
SOLVERS = {"llmcompressor": Settings(solver="llmcompressor"), "best": Settings()}
NARROW = IntScheme(4, None, scale_dtype="F32", narrow=True)
SCHEMES = {
    "g32": IntScheme(4, 32),
    "asymmetric": IntScheme(4, 32, symmetric=False),
    "int8 row": IntScheme(8, None),
    "static": IntScheme(4, 32, actorder="static"),
    "group": IntScheme(4, 32, actorder="group"),
    "float16 scales": IntScheme(4, 32, scale_dtype="F16"),
    "narrow": NARROW,
    "narrow static": replace(NARROW, group=64, actorder="static"),
    "narrow group": replace(NARROW, group=64, actorder="group"),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
every_solver = pytest.mark.parametrize("settings", SOLVERS.values(), ids=SOLVERS)


def case(seed: int, rows: int = 48, columns: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and the Hessian of inputs that go together."""
    generator = torch.Generator().manual_seed(seed)
    weight = heavy_tailed((rows, columns), generator).bfloat16()
    mixed = torch.randn(columns, columns, generator=generator) / columns**0.5
    inputs = torch.randn(400, columns, generator=generator) @ (mixed + torch.eye(columns) / 4)
    return weight, 2 * inputs.t() @ inputs


def loss(weight: torch.Tensor, codes: Codes, scheme: IntScheme, hessian: torch.Tensor) -> float:
    """What an output is off by, squared and summed over inputs."""
    columns = weight.shape[1]
    groups = codes.g_idx if codes.g_idx is not None else np.arange(columns) // scheme.width(columns)
    zero = 0 if codes.zero is None else codes.zero[:, groups].astype(np.float32)
    meant = torch.from_numpy((codes.codes.astype(np.float32) - zero) * codes.scale[:, groups])
    wrong = weight.float() - meant
    return float(((wrong @ hessian) * wrong).sum())


@pytest.mark.parametrize("narrow", [False, True])
def test_worked_by_hand(narrow: bool) -> None:
    """The first two inputs are always equal. Damping adds 1 % of the mean diagonal, 0.01. The largest
    weight makes the step 1 (narrow: 7 / 7; else 7.5 / 7.5).

    The first, 6.6, is rounded up to 7: 0.4 too much, of which the second takes back
    0.4 * H01 / H11 = 0.4 / 1.01 = 0.396, so 0.6 becomes 0.204 and rounds to 0, not to 1.
    """
    last = 7.0 if narrow else -7.5
    weight = torch.tensor([[6.6, 0.6, last]]).bfloat16()
    hessian = torch.tensor([[[1.0, 1, 0], [1, 1, 0], [0, 0, 1]]])
    scheme = NARROW if narrow else IntScheme(4, None, scale_dtype="F32")
    (found,), failed = solved([weight], hessian.clone(), scheme, PLAIN)
    nearest = rounded(weight, scheme, PLAIN)
    lowest = 7 if narrow else -8  # -7.5 rounds to even
    assert found.codes.tolist() == [[7, 0, lowest]]
    assert nearest.codes.tolist() == [[7, 1, lowest]]
    assert found.scale.tolist() == [[1.0]]
    assert failed == [False]


def test_what_narrow_codes_cut_off_is_made_up_for() -> None:
    """Inputs are always 4 : 1 : 1, so H = x x^T, damped by 0.06. The step is 7 / 7 = 1.

    -6.4 becomes -6, 0.4 too much; the others take back 0.4 * 4 / 2.06 = 0.78 each, so the second is
    -7.78 and is cut off at -7. The third, 0.6 - 0.78 = -0.18, takes that back too: 0.78 / 1.06 = 0.73,
    and is -0.91, which is -1. Had the second been -8 in the solver, the third would have been 0.
    """
    weight = torch.tensor([[-6.4, -7.0, 0.6]]).bfloat16()
    inputs = torch.tensor([[4.0, 1, 1]])
    (found,), _ = solved([weight], (inputs.t() @ inputs)[None], NARROW, PLAIN)
    assert found.codes.tolist() == [[-6, -7, -1]]


@every_solver
@every_scheme
def test_a_batch_is_as_each_alone(scheme: IntScheme, settings: Settings) -> None:
    cases = [case(seed) for seed in range(3)]
    stacked = torch.stack([hessian for _, hessian in cases])
    together, _ = solved([weight for weight, _ in cases], stacked, scheme, settings)
    for (weight, hessian), batched in zip(cases, together, strict=True):
        (alone,), _ = solved([weight], hessian[None].clone(), scheme, settings)
        assert torch.equal(alone.codes, batched.codes)
        assert torch.equal(alone.scale, batched.scale)


@every_solver
@every_scheme
def test_it_loses_less_than_rounding(scheme: IntScheme, settings: Settings) -> None:
    for seed in range(3):
        weight, hessian = case(seed)
        (found,), _ = solved([weight], hessian[None].clone(), scheme, settings)
        ours = loss(weight, found.numpy(), scheme, hessian)
        plain = replace(scheme, actorder=None)
        assert ours < 0.7 * loss(weight, rounded(weight, plain, PLAIN).numpy(), plain, hessian)


@every_solver
@every_scheme
def test_what_goes_on_is_what_codes_mean(scheme: IntScheme, settings: Settings) -> None:
    weight, hessian = case(5)
    (found,), _ = solved([weight], hessian[None].clone(), scheme, settings)
    made = found.numpy()
    columns = weight.shape[1]
    groups = made.g_idx if made.g_idx is not None else np.arange(columns) // scheme.width(columns)
    zero = 0 if made.zero is None else made.zero[:, groups].astype(np.float32)
    meant = torch.from_numpy((made.codes.astype(np.float32) - zero) * made.scale[:, groups])
    assert made.codes.min() >= scheme.low
    assert made.codes.max() <= scheme.high
    assert torch.allclose(found.weight.float(), meant, rtol=2**-8, atol=0)
    assert made.scale.dtype == np.float32
    kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[scheme.scale_dtype]
    scale = torch.from_numpy(made.scale)
    assert torch.equal(scale.to(kind).float(), scale)


def test_searched_scales_lose_less_in_every_row() -> None:
    """Weighted by the columns' mean squares, rounding to nearest under either scale."""
    weight, hessian = case(7, rows=64)
    alone = torch.diag(torch.diagonal(hessian))
    plain = solved([weight], alone[None].clone(), NARROW, PLAIN)[0][0].numpy()
    asked = Settings(solver="llmcompressor", search="narrow")
    found = solved([weight], alone[None].clone(), NARROW, asked)[0][0].numpy()
    rows = range(weight.shape[0])

    def by_row(codes: Codes) -> list[float]:
        return [
            loss(weight[r : r + 1], Codes(codes.codes[r : r + 1], codes.scale[r : r + 1]), NARROW, alone)
            for r in rows
        ]  # fmt: skip

    before, after = by_row(plain), by_row(found)
    assert all(b <= a * (1 + 1e-5) for a, b in zip(before, after, strict=True))
    assert sum(after) < 0.9 * sum(before)


@every_solver
@every_scheme
def test_a_row_of_zeros_stays_zero(scheme: IntScheme, settings: Settings) -> None:
    weight, hessian = case(3)
    weight[4] = 0
    (found,), _ = solved([weight], hessian[None].clone(), scheme, settings)
    for made in (found.numpy(), rounded(weight, scheme, settings).numpy()):
        assert (made.scale[4] > 0).all()
        zero = 0 if made.zero is None else made.zero[4].repeat(32)
        assert (made.codes[4] == zero).all()


@every_solver
def test_a_hessian_that_cannot_be_factorized_is_told(settings: Settings) -> None:
    weight, hessian = case(2)
    good = hessian.clone()
    hessian[0, 0] = -1e6
    for scheme in (SCHEMES["g32"], NARROW):
        stacked = torch.stack([hessian, good])
        _, failed = solved([weight, weight], stacked, scheme, settings)
        assert failed == [True, False]
