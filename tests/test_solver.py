"""The solver's steps, each against plain code of its own in float64; and that none makes a row worse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from qconvert.calibrate.settings import Settings
from qconvert.calibrate.solve import rounded, solved
from qconvert.calibrate.solver import best as best_module
from qconvert.calibrate.solver.best import CLIPS, descended, gptq, nearest, refitted, searched
from qconvert.calibrate.solver.curvature import (
    Curvature,
    Grid,
    Rounding,
    curvature,
    in_groups,
    meant,
    rounding,
)
from qconvert.cli.demo import heavy_tailed
from qconvert.core.int_scheme import IntScheme, Signs

Doubles = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
SCHEMES = {
    "g32": IntScheme(4, 32),
    "float16 scales": IntScheme(4, 32, scale_dtype="F16"),
    "int8 row": IntScheme(8, None),
    "narrow": IntScheme(4, None, scale_dtype="F32", narrow=True),
    "narrow g64": IntScheme(4, 64, scale_dtype="F32", narrow=True),
    "asymmetric": IntScheme(4, 32, symmetric=False),
}
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


@dataclass
class Case:
    """Matrices with what they are solved by. Weights [B, K, N], scales as amax has them."""

    weight: torch.Tensor
    hessian: torch.Tensor
    scale: torch.Tensor
    grid: Grid
    found: Curvature


def raw(seed: int, batch: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Heavy-tailed weights [B, N, K] in BF16 with outlier channels, and Hessians of inputs in which
    those channels are small."""
    generator = torch.Generator().manual_seed(seed)
    weights, hessians = [], []
    for _ in range(batch):
        outlier = torch.exp2(torch.randn(columns, generator=generator).mul(0.7).round())
        mixed = torch.randn(columns, columns, generator=generator) / columns**0.5
        inputs = torch.randn(300, columns, generator=generator) @ (mixed + torch.eye(columns) / 4)
        inputs /= outlier
        weights.append((heavy_tailed((rows, columns), generator) * outlier).bfloat16())
        hessians.append(2 * inputs.t() @ inputs)
    return torch.stack(weights), torch.stack(hessians)


def case(scheme: IntScheme, seed: int, batch: int = 2, rows: int = 24, columns: int = 128,
         *, by_importance: bool = True, signs: Signs = "positive") -> Case:  # fmt: skip
    weight, hessian = raw(seed, batch, rows, columns)
    turned = weight.float().transpose(1, 2).contiguous()
    cut = in_groups(turned, scheme.width(columns))
    zero = torch.zeros(batch, cut.shape[1], rows, dtype=torch.int8)
    half = (scheme.high - scheme.low) / 2
    scale = cut.abs().amax(2) / half
    if not scheme.symmetric:
        scale = (cut.amax(2).clamp(min=0) - cut.amin(2).clamp(max=0)) / (2 * half)
        zero = (scheme.low - cut.amin(2).clamp(max=0) / scale).round().to(torch.int8)
    dtype = DTYPES[scheme.scale_dtype]
    scale = scale.to(dtype).float()
    found = curvature(hessian.clone(), 0.01, by_importance=by_importance)
    return Case(turned, hessian, scale, Grid.of(scheme, columns, zero, dtype, signs), found)


def losses(weight: torch.Tensor, steps: torch.Tensor, scale: torch.Tensor, hessian: torch.Tensor
           ) -> Doubles:  # fmt: skip
    """d H d^T of each row [B, N] in float64."""
    width = steps.shape[1] // scale.shape[1]
    wide = np.repeat(scale.double().numpy(), width, axis=1)
    off = steps.double().numpy() * wide - weight.double().numpy()
    found: Doubles = np.einsum("bkn,bkj,bjn->bn", off, hessian.double().numpy(), off)
    return found


def assert_valid(one: Rounding, grid: Grid) -> None:
    low, high = (b.repeat_interleave(grid.width, 1) if b.shape[1] > 1 else b
                 for b in (grid.low, grid.high))  # fmt: skip
    assert torch.equal(one.steps, one.steps.round())
    assert bool((one.steps >= low).all())
    assert bool((one.steps <= high).all())
    assert bool(one.scale.isfinite().all())
    assert bool((one.scale != 0 if grid.signed else one.scale > 0).all())
    assert torch.equal(one.scale.to(grid.dtype).float(), one.scale)


@every_scheme
@pytest.mark.parametrize("signs", ["both", "positive"])
@pytest.mark.parametrize("seed", range(4))
def test_no_step_makes_a_row_worse(scheme: IntScheme, seed: int, signs: Signs) -> None:
    one = case(scheme, seed, signs=signs)
    hessian = one.found.hessian
    if signs == "both" and scheme.gains_by_signs:  # where refits and descent begin
        one.scale = searched(one.weight, one.scale, one.found.inverse.reciprocal(), one.grid)
        assert 0.2 < float((one.scale < 0).float().mean()) < 0.8

    def loss(made: Rounding) -> Doubles:
        found = losses(one.weight, made.steps, made.scale, hessian)
        assert np.allclose(found, made.loss.numpy(), rtol=1e-3)
        assert_valid(made, one.grid)
        return found

    first = rounding(one.weight, nearest(one.weight, one.scale, one.grid), one.scale, hessian)
    steps = gptq(one.weight, one.scale, one.grid, one.found, 32)
    second = first.better(rounding(one.weight, steps, one.scale, hessian))
    third = refitted(one.weight, hessian @ one.weight, second, hessian, one.grid)
    fourth = descended(one.weight, third, hessian, one.grid, 1, 32)
    fifth = descended(one.weight, fourth, hessian, one.grid, 2, 32)
    found = [loss(made) for made in (first, second, third, fourth, fifth)]
    for before, after in pairwise(found):
        assert bool((after <= before * (1 + 1e-4)).all())
        assert after.sum() <= before.sum()
    assert found[1].sum() < 0.8 * found[0].sum()
    assert found[4].sum() < 0.995 * found[2].sum()


@every_scheme
def test_each_refinement_pays(scheme: IntScheme) -> None:
    """In what is minimized, over some matrices; those of asymmetric schemes keep their scales."""
    plain = Settings(scales="amax", order="stored", refit=0, descent=0)
    searching = Settings(order="stored", refit=0, descent=0)
    refitting = Settings(order="stored", refit=2, descent=0)
    whole = Settings()
    found = []
    for settings in (plain, searching, refitting, whole):
        weight, hessian = raw(3, 3, 24, 128)
        damped = curvature(hessian.clone(), 0.01, by_importance=False).hessian
        made, failed = solved(list(weight), hessian, scheme, settings)
        assert not any(failed)
        total = 0.0
        for number, one in enumerate(made):
            zero = (
                0 if one.zero is None else one.zero.float().repeat_interleave(scheme.width(128), 1)
            )
            steps = (one.codes.float() - zero).t()[None]
            scale = one.scale.float().t()[None]
            goal = weight[number].float().t()[None]
            total += float(losses(goal, steps, scale, damped[number : number + 1]).sum())
        found.append(total)
    if scheme.symmetric and scheme.bits == 4:
        assert found[1] < found[0]
        assert found[2] < found[1]
    assert found[3] < 0.9 * found[0]


def test_the_factor_is_of_the_inverse_in_that_order() -> None:
    _, hessian = raw(1, 3, 4, 64)
    wanted = hessian.double().numpy().copy()
    found = curvature(hessian, 0.02, by_importance=True)
    for number, own in enumerate(wanted):
        own += 0.02 * own.diagonal().mean() * np.eye(64)
        order = found.order[number].numpy()
        assert np.array_equal(order, np.argsort(-own.diagonal(), kind="stable"))
        factor = found.factor[number].double().numpy()
        assert np.array_equal(factor, np.triu(factor))
        inverse = np.linalg.inv(own[np.ix_(order, order)])
        assert np.allclose(factor.T @ factor, inverse, rtol=1e-3, atol=1e-4 * inverse.max())
        assert np.allclose(found.inverse[number], np.linalg.inv(own).diagonal(), rtol=1e-3)
        assert np.allclose(found.hessian[number], own, rtol=1e-5)
    assert not found.failed.any()


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("block", [1, 7, 128])
@every_scheme
def test_the_loop_is_gptq(scheme: IntScheme, block: int, signed: bool) -> None:
    """Against the textbook in float64: round a column, and let the rest make up for it by what is left
    of the Hessian's inverse once the column is gone (Frantar et al., equation 2)."""
    one = case(scheme, 11, rows=6, columns=64)
    if signed:
        one.scale[:, :, ::2] *= -1
    made = gptq(one.weight, one.scale, one.grid, one.found, block).numpy()
    width = one.grid.width
    bounds = [np.broadcast_to(b.numpy(), one.scale.shape) for b in (one.grid.low, one.grid.high)]
    for number in range(2):
        left = one.weight[number].double().numpy().copy()
        inverse = np.linalg.inv(one.found.hessian[number].double().numpy())
        wanted = np.zeros_like(left)
        for column in one.found.order[number].tolist():
            scale = one.scale[number, column // width].double().numpy()
            low, high = (b[number, column // width] for b in bounds)
            code = np.clip(np.rint(left[column] / scale), low, high)
            wanted[column] = code
            error = (left[column] - code * scale) / inverse[column, column]
            left -= np.outer(inverse[:, column], error)
            inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
            inverse[column] = inverse[:, column] = 0
            inverse[column, column] = 1  # not used again
        # A sum in float32 may fall on the other side of a half, from where a row goes another way.
        assert np.mean(np.any(made[number] != wanted, axis=0)) <= 1 / 6


@pytest.mark.parametrize("signs", ["both", "positive"])
def test_no_scale_among_those_tried_is_better(signs: Signs) -> None:
    scheme = SCHEMES["g32"]
    one = case(scheme, 5, signs=signs)
    share = one.found.inverse.reciprocal()
    found = searched(one.weight, one.scale, share, one.grid)
    cut = in_groups(one.weight.double(), 32).numpy()
    weights = share.double().numpy().reshape(2, -1, 32, 1)

    def error(scale: Any) -> Doubles:
        wide = scale.double().numpy()[:, :, None]
        made: Doubles = ((np.clip(np.rint(cut / wide), -8, 7) * wide - cut) ** 2 * weights).sum(2)
        return made

    largest = in_groups(one.weight, 32).abs().amax(2) / 7.5
    clips = [*CLIPS, *(-clip for clip in CLIPS)] if signs == "both" else CLIPS
    tried = [one.scale, *((largest * clip).to(torch.bfloat16).float() for clip in clips)]
    least = np.min([error(scale) for scale in tried], axis=0)
    assert np.allclose(error(found), least, rtol=1e-4)
    assert error(found).sum() < 0.9 * error(one.scale).sum()
    assert (CLIPS[0], CLIPS[-1]) == (1.05, 0.1)
    assert bool((found < 0).any()) == (signs == "both")


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", ["narrow", "narrow g64"])
def test_refitted_scales_are_least_squares(name: str, signed: bool) -> None:
    """Of a row's outputs over samples, its groups' codes being what is fitted: numpy's lstsq."""
    one = case(SCHEMES[name], 7, batch=1, columns=128)
    if signed:
        one.scale[:, :, 1::2] *= -1
        one.grid = replace(one.grid, signed=True)
    steps = nearest(one.weight, one.scale, one.grid)
    now = rounding(one.weight, steps, one.scale, one.found.hessian)
    pull = one.found.hessian @ one.weight
    found = refitted(one.weight, pull, now, one.found.hessian, one.grid)
    root = np.linalg.cholesky(one.found.hessian[0].double().numpy()).T
    width = one.grid.width
    for row in range(one.weight.shape[2]):
        codes = steps[0, :, row].double().numpy()
        columns = [
            root[:, start : start + width] @ codes[start : start + width]
            for start in range(0, 128, width)
        ]
        goal = root @ one.weight[0, :, row].double().numpy()
        wanted = np.linalg.lstsq(np.stack(columns, axis=1), goal, rcond=None)[0]
        assert np.allclose(found.scale[0, :, row], wanted, rtol=1e-3)


@pytest.mark.parametrize("signed", [False, True])
@every_scheme
def test_descent_ends_where_no_code_is_better(scheme: IntScheme, signed: bool) -> None:
    one = case(scheme, 9, batch=1, rows=4, columns=64)
    if signed:
        one.scale[:, :, 1::2] *= -1
        one.grid = replace(one.grid, signed=True)
    hessian = one.found.hessian
    steps = nearest(one.weight, one.scale, one.grid)
    start = rounding(one.weight, steps, one.scale, hessian)
    found = descended(one.weight, start, hessian, one.grid, 60, 16)
    assert_valid(found, one.grid)
    assert not torch.equal(found.steps, start.steps)
    least = losses(one.weight, found.steps, found.scale, hessian)
    low, high = (np.broadcast_to(b.numpy(), one.scale.shape) for b in (one.grid.low, one.grid.high))
    for column in range(64):
        for change in (-2, -1, 1, 2):
            other = found.steps.clone()
            group = column // one.grid.width
            moved = other[0, column].numpy() + change
            other[0, column] = torch.from_numpy(np.clip(moved, low[0, group], high[0, group]))
            assert bool((losses(one.weight, other, one.scale, hessian) >= least * (1 - 1e-4)).all())


def test_blocks_change_little() -> None:
    one = case(SCHEMES["g32"], 4)
    now = rounding(
        one.weight, nearest(one.weight, one.scale, one.grid), one.scale, one.found.hessian
    )
    made = [descended(one.weight, now, one.found.hessian, one.grid, 2, b) for b in (1, 24, 128)]
    for other in made[1:]:
        assert float((other.steps != made[0].steps).float().mean()) < 0.01


@every_scheme
def test_rows_are_solved_apart(scheme: IntScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = raw(6, 1, 24, 128)
    whole, _ = solved([weight[0]], hessian.clone(), scheme, Settings())
    monkeypatch.setattr(best_module, "_ROWS", 10)
    parts, _ = solved([weight[0]], hessian.clone(), scheme, Settings())
    differs = (parts[0].codes != whole[0].codes).float().mean()
    assert float(differs) < 0.01  # the order of sums in a product depends on its size
    assert torch.allclose(parts[0].scale.float(), whole[0].scale.float(), rtol=0.02)


def test_an_input_never_seen_is_rounded_to_nearest() -> None:
    weight, hessian = raw(8, 1, 24, 128)
    dead = [3, 40, 41, 100]
    hessian[:, dead] = 0
    hessian[:, :, dead] = 0
    for scheme in (SCHEMES["g32"], SCHEMES["narrow"], SCHEMES["asymmetric"]):
        (found,), failed = solved([weight[0]], hessian.clone(), scheme, Settings())
        assert failed == [False]
        scale = found.scale.float().repeat_interleave(scheme.width(128), 1)
        zero = 0 if found.zero is None else found.zero.float().repeat_interleave(32, 1)
        wanted = (weight[0].float() / scale + zero).round().clamp(scheme.low, scheme.high)
        # The last refit moves scales a little, and leaves codes.
        off = (found.codes[:, dead].float() - wanted[:, dead]).abs()
        assert float(off.max()) <= 1
        assert float(off.mean()) < 0.1
        assert bool((found.weight[:, dead] != 0).any())


def test_a_hessian_that_cannot_be_factorized_means_rounding() -> None:
    """To nearest, under scales with the least squared error, all columns alike."""
    weight, hessian = raw(2, 2, 24, 128)
    for broken in (-1e6, float("nan"), float("inf")):
        own = hessian.clone()
        own[0, 0, 0] = broken
        scheme = SCHEMES["g32"]
        made, failed = solved(list(weight), own, scheme, Settings(refit=0))
        alone, _ = solved([weight[1]], hessian[1:].clone(), scheme, Settings(refit=0))
        assert failed == [True, False]
        assert torch.equal(made[0].codes, rounded(weight[0], scheme, Settings()).codes)
        assert torch.equal(made[1].codes, alone[0].codes)


def test_rounding_searches_scales() -> None:
    weight, _ = raw(4, 1, 24, 128)
    for name, scheme in SCHEMES.items():
        found = [
            float((rounded(weight[0], scheme, s).weight - weight[0]).float().square().sum())
            for s in (Settings(scales="amax"), Settings())
        ]
        assert found[1] < found[0] if scheme.symmetric else found[1] == found[0], name


@pytest.mark.parametrize("signs", ["both", "positive"])
@every_scheme
def test_scales_are_below_0_only_where_that_is_asked_for(scheme: IntScheme, signs: Signs) -> None:
    weight, hessian = raw(3, 2, 24, 128)
    for made in (
        solved(list(weight), hessian.clone(), scheme, Settings(signs=signs))[0][1],
        rounded(weight[1], scheme, Settings(signs=signs)),
    ):
        below = float((made.scale < 0).float().mean())
        if signs == "both" and scheme.gains_by_signs:
            assert 0.2 < below < 0.8
            assert made.scale.dtype == DTYPES[scheme.scale_dtype]
        else:
            assert below == 0
        width = scheme.width(128)
        zero = 0 if made.zero is None else made.zero.float().repeat_interleave(width, 1)
        meant_by = (made.codes.float() - zero) * made.scale.float().repeat_interleave(width, 1)
        assert torch.allclose(made.weight.float(), meant_by, rtol=2.0**-8)


@pytest.mark.parametrize("seed", range(3))
def test_scales_below_0_pay(seed: int) -> None:
    """In what is minimized, over all rows: .8 to .9."""
    weight, hessian = raw(seed, 3, 24, 128)
    damped = curvature(hessian.clone(), 0.01, by_importance=False).hessian.double()
    found = []
    for signs in ("positive", "both"):
        settings = replace(Settings(), signs=signs)
        made, _ = solved(list(weight), hessian.clone(), SCHEMES["g32"], settings)
        total = 0.0
        for number, one in enumerate(made):
            wide = one.scale.double().repeat_interleave(32, 1)
            off = one.codes.double() * wide - weight[number].double()
            total += float(torch.einsum("nk,kj,nj->", off, damped[number], off))
        found.append(total)
    assert found[1] < 0.95 * found[0], found[1] / found[0]


def test_groups_that_fit_nothing_keep_their_scale() -> None:
    """All codes of a group are 0, or fit the wrong way round."""
    scheme = SCHEMES["narrow g64"]
    one = case(scheme, 1, batch=1, rows=3)
    steps = nearest(one.weight, one.scale, one.grid)
    steps[:, :64, 0] = 0
    steps[:, :, 1] *= -1
    now = rounding(one.weight, steps, one.scale, one.found.hessian)
    pull = one.found.hessian @ one.weight
    found = refitted(one.weight, pull, now, one.found.hessian, one.grid)
    assert found.scale[0, 0, 0] == one.scale[0, 0, 0]
    assert_valid(found, one.grid)
    assert bool((found.loss <= now.loss).all())
    assert torch.equal(meant(found.steps, found.scale).isfinite(), torch.ones_like(steps).bool())
