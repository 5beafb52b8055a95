"""NVFP4 by calibration: each step against numpy's arithmetic of the format, or float64; that no row
loses more than by rounding; and that the bytes mean what goes on to the next layer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from nvfp4_rows import KINDS, Array, Made, matrix, ours
from test_solver import raw

from qconvert.calibrate.settings import Settings
from qconvert.calibrate.solve import Quantized, rounded, solved
from qconvert.calibrate.solver import best as best_module
from qconvert.calibrate.solver import nvfp4
from qconvert.calibrate.solver.curvature import curvature, in_groups, rounding
from qconvert.calibrate.solver.nvfp4 import around, chosen, e2m1, e4m3, number_of
from qconvert.cli.demo import heavy_tailed
from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Buffer
from qconvert.core.int_scheme import Nvfp4Scheme
from qconvert.core.parameter_names import Dialect
from qconvert.formats.nvfp4.encode import PackNvfp4Codes, inverse
from qconvert.ops import fp4

Doubles = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
DIALECTS: list[Dialect] = ["compressed-tensors", "modelopt"]
both = pytest.mark.parametrize("dialect", DIALECTS)
SETTINGS = {
    "best": Settings(),
    "stored": Settings(order="stored"),
    "scales of amax": Settings(scales="amax", refit=0, descent=0),
    "no refit": Settings(refit=0, descent=1),
    "small blocks": Settings(block_size=20),
}
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def packed(one: Quantized, dialect: Dialect) -> Made:
    """A solved matrix's bytes."""
    codes = one.numpy()
    packer = PackNvfp4Codes(dialect)
    kinds = packer.infer(TensorType("BF16", codes.codes.shape))
    outs = [Buffer(kind, memoryview(bytearray(kind.nbytes))) for kind in kinds]
    packer.pack(codes, outs)
    return Made(*(bytes(out.data) for out in outs))


def meaning(made: Made, rows: int, dialect: Dialect) -> Array:
    """Of bytes, float32 [N, K]."""
    codes = np.frombuffer(made.packed, np.uint8).reshape(rows, -1)
    scale = np.frombuffer(made.scale, np.uint8).reshape(rows, -1)
    with np.errstate(over="ignore"):
        return inverse(codes, scale, float(np.frombuffer(made.own, np.float32)[0]), dialect)


def without_minus_zeros(codes: bytes) -> bytes:
    """E2M1 codes, two a byte, with 0 instead of -0."""
    both_halves = np.frombuffer(codes, np.uint8)
    parts = both_halves & 15, both_halves >> 4
    low, high = (np.where(half == 8, 0, half).astype(np.uint8) for half in parts)
    return bytes((low | high << 4).tobytes())


def losses(weight: torch.Tensor, meant: Array, hessian: torch.Tensor) -> Doubles:
    """d H d^T of each row in float64."""
    off = meant.astype(np.float64) - weight.double().numpy()
    found: Doubles = np.einsum("nk,kj,nj->n", off, hessian.double().numpy(), off)
    return found


def damped(hessians: torch.Tensor) -> torch.Tensor:
    return curvature(hessians.clone(), 0.01, by_importance=False).hessian


def test_numbers_are_the_formats() -> None:
    random = np.random.default_rng(3)
    values = np.concatenate([
        random.standard_t(3, 5000) * 2, np.arange(-8, 8, 1 / 8), np.nextafter(np.arange(0, 8, 1 / 8), 9),
        [0.0, -0.0, 1e30, -1e30, 1e-30],
    ]).astype(np.float32)  # fmt: skip
    codes = np.empty(values.shape, np.uint8)
    fp4.to_codes(values.copy(), codes, np.empty_like(codes))
    sizes = np.array(fp4.SIZES, np.float32)[codes & 7] * np.where(codes & 8, -1, 1)
    ours = e2m1(torch.from_numpy(values.copy())).numpy()
    assert np.array_equal(ours, sizes)
    assert not np.signbit(ours[ours == 0]).any()

    positive = np.abs(values[np.abs(values) <= 448])
    codes = np.empty(positive.shape, np.uint8)
    meant = positive.copy()
    fp4.e4m3(meant, codes)
    assert np.array_equal(e4m3(torch.from_numpy(positive)).numpy(), codes)
    assert np.array_equal(number_of(torch.from_numpy(codes)).numpy(), meant)


def test_scales_around_a_code_are_above_zero() -> None:
    found = around(torch.tensor([[0, 1, 56, 126]]), (-3, 0, 3))
    assert found.shape == (3, 1, 4)
    assert found[:, 0, 2].tolist() == [0.8125, 1.0, 1.375]
    assert bool((found > 0).all())
    assert float(found.max()) == 448


@both
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_and_packing_are_the_encoders(kind: str, dialect: Dialect) -> None:
    """What `nvfp4` writes without a calibration, byte for byte, but that zeros have no sign."""
    values = matrix(kind, "BF16", (6, 64))
    weight = torch.from_numpy(values.copy()).bfloat16()
    assert np.array_equal(weight.float().numpy(), values)
    found = rounded(weight, Nvfp4Scheme(dialect), Settings(scales="amax"))
    (wanted,) = ours(dialect, "BF16", values)
    assert packed(found, dialect) == wanted._replace(packed=without_minus_zeros(wanted.packed))
    meant = torch.from_numpy(meaning(wanted, 6, dialect)).bfloat16()
    assert torch.equal(found.weight, meant)


def test_a_search_without_samples_never_loses_more() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = heavy_tailed((40, 256), generator).bfloat16()
    weight[3] = 0

    def errors(settings: Settings) -> Array:
        made = packed(rounded(weight, Nvfp4Scheme("modelopt"), settings), "modelopt")
        off = meaning(made, 40, "modelopt") - weight.float().numpy()
        found: Array = np.square(off).reshape(40, -1, 16).sum(2)
        return found

    plain, searched = errors(Settings(scales="amax")), errors(Settings())
    assert bool((searched <= plain * (1 + 1e-5)).all())
    assert searched.sum() < 0.95 * plain.sum()


def test_a_block_against_plain_code() -> None:
    """Every scale in turn, column after column, in float64."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(64, 16, generator=generator)
    hessian = (inputs.t() @ inputs)[None]
    goal = heavy_tailed((16, 9), generator)[None] * 100
    factor = nvfp4.block_factors(hessian)[:, 0]
    tried = torch.rand(5, 1, 9, generator=generator) * 4 + 0.5
    one = chosen(goal, factor, tried)
    upper = factor[0].double().numpy()
    for row in range(9):
        found = []
        for scale in tried[:, 0, row].double().numpy():
            left, total, steps = goal[0, :, row].double().numpy().copy(), 0.0, []
            for at in range(16):
                sizes = np.array([*fp4.SIZES, *(-size for size in fp4.SIZES)])
                step = sizes[np.argmin(np.abs(left[at] / scale - sizes))]
                error = (left[at] - step * scale) / upper[at, at]
                total += error**2
                left[at + 1 :] -= upper[at, at + 1 :] * error
                steps.append(step)
            found.append((total, scale, steps))
        total, scale, steps = min(found)
        assert one.steps[0, :, row].tolist() == steps
        assert float(one.scale[0, row]) == pytest.approx(scale)
        assert float(one.loss[0, row]) == pytest.approx(total, rel=1e-4)
        off = np.array(steps) * scale - goal[0, :, row].double().numpy()
        assert off @ hessian[0].double().numpy() @ off == pytest.approx(total, rel=1e-4)


def test_factors_of_blocks() -> None:
    _, hessians = raw(1, 2, 4, 64)
    hessians = damped(hessians)
    factors = nvfp4.block_factors(hessians).double()
    for number in range(2):
        for at in range(4):
            own = hessians[number, 16 * at : 16 * at + 16, 16 * at : 16 * at + 16].double()
            upper = factors[number, at]
            assert torch.equal(upper, upper.triu())
            assert torch.allclose(upper @ own @ upper.t(), torch.eye(16).double(), atol=1e-4)
    broken = torch.diag(torch.tensor([4.0] * 32))
    broken[0, 1] = broken[1, 0] = 9  # not positive definite
    found = nvfp4.block_factors(broken[None])
    assert torch.allclose(found, torch.eye(16).expand(1, 2, 16, 16) / 2)


def test_blocks_stay_together_in_the_order_of_solving() -> None:
    _, hessians = raw(4, 2, 4, 96)
    diagonal = hessians.diagonal(dim1=1, dim2=2).clone()
    order = curvature(hessians.clone(), 0.01, by_importance=True, together=16).order
    for number in range(2):
        blocks = order[number].view(-1, 16)
        assert sorted(order[number].tolist()) == list(range(96))
        assert bool((blocks // 16 == blocks[:, :1] // 16).all())
        first = diagonal[number][blocks]
        assert torch.equal(first, first.sort(dim=1, descending=True).values)
        assert bool((first[:-1, 0] >= first[1:, 0]).all())


@both
@every_setting
@pytest.mark.parametrize("seed", range(3))
def test_no_row_loses_more_than_by_rounding(
    seed: int, settings: Settings, dialect: Dialect
) -> None:
    """Of the bytes, in what is minimized, float64; the codes of rounding are the encoder's."""
    weights, hessians = raw(seed, 2, 24, 128)
    weights[0, 3], weights[1, 5, :40] = 0, 0
    made, failed = solved(list(weights), hessians.clone(), Nvfp4Scheme(dialect), settings)
    assert failed == [False, False]
    before = after = 0.0
    for number, hessian in enumerate(damped(hessians)):
        weight = weights[number]
        (plain,) = ours(dialect, "BF16", weight.float().numpy())
        found = packed(made[number], dialect)
        assert found.own == plain.own
        first, last = (losses(weight, meaning(one, 24, dialect), hessian) for one in (plain, found))
        assert bool((last <= first * (1 + 1e-4)).all())
        before, after = before + first.sum(), after + last.sum()
    assert after < 0.6 * before


@both
def test_each_step_pays(dialect: Dialect) -> None:
    weights, hessians = raw(7, 3, 24, 128)
    steps = [
        Settings(scales="amax", order="stored", refit=0, descent=0),
        Settings(order="stored", refit=0, descent=0),
        Settings(refit=0, descent=0),
        Settings(refit=0),
        Settings(),
        Settings(refit=4),
    ]
    found = []
    for settings in steps:
        made, _ = solved(list(weights), hessians.clone(), Nvfp4Scheme(dialect), settings)
        total = 0.0
        for number, hessian in enumerate(damped(hessians)):
            meant = meaning(packed(made[number], dialect), 24, dialect)
            total += losses(weights[number], meant, hessian).sum()
        found.append(total)
    assert all(after < 0.998 * before for before, after in pairwise(found)), found


def test_no_sweep_makes_a_row_worse() -> None:
    weights, hessians = raw(9, 2, 24, 128)
    hessian = damped(hessians)
    own = nvfp4.global_scale_of(weights, "modelopt")
    part = weights.float().transpose(1, 2).contiguous()
    goal, first = nvfp4.units(part, own, "modelopt"), nvfp4.plain(part, own, "modelopt")
    now = rounding(goal, first.steps, first.scale, hessian)
    within = nvfp4.block_factors(hessian)
    for offsets in ((0,), (-1, 0, 1), (0,)):
        then = nvfp4.swept(goal, now, hessian, within, offsets, 48)
        wide = (in_groups(then.steps, 16) * then.scale.unsqueeze(2)).flatten(1, 2)
        off = (wide - goal).double()
        loss = torch.einsum("bkn,bkj,bjn->bn", off, hessian.double(), off)
        assert torch.allclose(loss.float(), then.loss, rtol=1e-3)
        assert bool((then.loss <= now.loss).all())
        now = then
    assert float(now.loss.sum()) < 0.5 * float(
        rounding(goal, first.steps, first.scale, hessian).loss.sum()
    )


@both
def test_gate_and_up_share_what_rounding_gives_them(dialect: Dialect) -> None:
    """They are solved as one matrix, and each of its halves has the scale of both."""
    weights, hessians = raw(11, 1, 32, 64)
    weights[0, :16] *= 5
    (both_halves,), _ = solved([weights[0]], hessians, Nvfp4Scheme(dialect), Settings())
    gate, up = (packed(both_halves.rows(at, at + 16), dialect) for at in (0, 16))
    halves = (half.float().numpy() for half in (weights[0, :16], weights[0, 16:]))
    first, second = ours(dialect, "BF16", *halves)
    assert gate.own == up.own == first.own == second.own


def test_rows_and_matrices_do_not_depend_on_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, hessians = raw(13, 3, 40, 96)
    scheme = Nvfp4Scheme("modelopt")
    together, _ = solved(list(weights), hessians.clone(), scheme, Settings())
    monkeypatch.setattr(best_module, "_ROWS", 16)
    for number, one in enumerate(together):
        (alone,), _ = solved(
            [weights[number]], hessians[number : number + 1].clone(), scheme, Settings()
        )
        assert packed(alone, "modelopt") == packed(one, "modelopt")


@both
def test_what_goes_on_is_what_the_bytes_mean(dialect: Dialect) -> None:
    weights, hessians = raw(17, 1, 24, 64)
    (one,), _ = solved([weights[0]], hessians, Nvfp4Scheme(dialect), Settings())
    meant = torch.from_numpy(meaning(packed(one, dialect), 24, dialect)).bfloat16()
    assert torch.equal(one.weight, meant)
    assert one.numpy().scale.min() > 0


def test_a_hessian_that_cannot_be_factorized_is_told() -> None:
    weights, hessians = raw(19, 2, 8, 32)
    hessians[0, 0, 0] = -1e6
    made, failed = solved(list(weights), hessians, Nvfp4Scheme("modelopt"), Settings())
    assert failed == [True, False]
    meant = meaning(packed(made[0], "modelopt"), 8, "modelopt")
    (plain,) = ours("modelopt", "BF16", weights[0].float().numpy())
    wanted = weights[0].float().numpy()
    rounded_error = np.square(meaning(plain, 8, "modelopt") - wanted).sum()
    assert np.square(meant - wanted).sum() <= rounded_error * (1 + 1e-5)
