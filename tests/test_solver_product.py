"""Products by halves, as tensor cores take them: how far they are from float64, and that the solver
loses nothing by them."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import torch

from qconvert.calibrate.settings import Settings
from qconvert.calibrate.solver import best, descent, gptq, problem, refit
from qconvert.calibrate.solver.product import by_halves, codes_by_halves, halves
from qconvert.cli.demo_checkpoint import heavy_tailed
from qconvert.core.int_scheme import IntScheme

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
    """What the best codes of a heavy-tailed matrix lose under inputs with outlier channels."""
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
            for module in (problem, descent, best):
                stack.enter_context(patch.object(module, "product", by_halves))
            for module in (gptq, descent):
                stack.enter_context(patch.object(module, "add_product", added))
            stack.enter_context(patch.object(refit, "product_with_codes", codes_by_halves))
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
