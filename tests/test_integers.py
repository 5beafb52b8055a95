"""Scales, codes, what codes mean and Hessians, against compressed-tensors' and llm-compressor's own
functions: to the last bit, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

import pytest
import torch

from qconvert.calibrate import llmcompressor_backend, solve
from qconvert.calibrate.experts import input_stats
from qconvert.cli.demo import heavy_tailed
from qconvert.core.int_scheme import Bits, IntScheme

ROWS, COLUMNS = 37, 256
_BITS: tuple[Bits, ...] = (4, 8)
SCHEMES = [
    IntScheme(bits, group, symmetric=symmetric)
    for bits, group, symmetric in product(_BITS, (16, 32, 128, None), (True, False))
]
NARROW = [IntScheme(bits, group, narrow=True) for bits in _BITS for group in (64, None)]


def _outliers(weight: torch.Tensor) -> torch.Tensor:
    weight[:, ::16] *= 50
    return weight


def _zeros(weight: torch.Tensor) -> torch.Tensor:
    """Whole groups, rows and columns of them, some of them below 0."""
    weight[:, 32:160] = 0
    weight[3], weight[4] = 0.0, -0.0
    weight[:, 200] = -0.0
    return weight


def _mixed(weight: torch.Tensor) -> torch.Tensor:
    """Rows from below the least normal number of BF16 to near the largest one."""
    return weight * torch.logspace(-41, 37, weight.shape[0])[:, None]


def _steps(weight: torch.Tensor) -> torch.Tensor:
    """Halves of what would be steps: values in the middle of two codes."""
    return torch.randint(-15, 16, weight.shape, generator=torch.Generator().manual_seed(3)) / 2


WEIGHTS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heavy-tailed": lambda weight: weight,
    "outlier channels": _outliers,
    "zeros": _zeros,
    "subnormal": lambda weight: weight * 1e-39,
    "of a subnormal scale in F16": lambda weight: weight * 1e-6,
    "all sizes": _mixed,
    "above zero": lambda weight: weight.abs() + 0.1,
    "below zero": lambda weight: -weight.abs() - 0.1,
    "halves": _steps,
}
every_weight = pytest.mark.parametrize("make", WEIGHTS.values(), ids=WEIGHTS)


def weights(make: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """BF16 matrices, and the first of them in float32."""
    made = [
        make(heavy_tailed((ROWS, COLUMNS), torch.Generator().manual_seed(seed))).bfloat16()
        for seed in range(3)
    ]
    assert all(bool(one.isfinite().all()) for one in made)
    return [*made, made[0].float()]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of one dtype and shape, bit for bit but for the sign of a zero, NaN alike."""
    return one.dtype == other.dtype and torch.equal(
        torch.nan_to_num(one.float(), nan=-3.25), torch.nan_to_num(other.float(), nan=-3.25)
    )


@every_weight
def test_scales_are_the_observers(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for weight, scheme in product(weights(make), SCHEMES):
        scale, zero = solve.observed(weight, scheme, weight.dtype)
        their_scale, their_zero = llmcompressor_backend.observed(weight, scheme)
        assert same(scale, their_scale), scheme
        assert same(zero, their_zero), scheme
        # A wider dtype's are those of the weight in it.
        wide, zero = solve.observed(weight, scheme, torch.float32)
        their_scale, their_zero = llmcompressor_backend.observed(weight.float(), scheme)
        assert same(wide, their_scale), scheme
        assert same(zero, their_zero), scheme


@every_weight
def test_a_batch_has_the_scales_of_each(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    stacked = torch.stack(weights(make)[:3])
    for scheme in SCHEMES:
        scale, zero = solve.observed(stacked, scheme, torch.bfloat16)
        for number, weight in enumerate(stacked):
            alone = solve.observed(weight, scheme, torch.bfloat16)
            assert same(scale[number], alone[0])
            assert same(zero[number], alone[1])


@every_weight
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_codes_and_their_meaning_are_theirs(
    make: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    for weight, scheme in product(weights(make), [*SCHEMES, *NARROW]):
        observed = replace(scheme, narrow=False)
        scale, zero = solve.observed(weight, observed, torch.float32)
        scale = scale.to(dtype)
        usable = (scale > 0) & scale.isfinite()
        scale = torch.where(usable, scale, torch.finfo(dtype).eps)
        zeros = None if scheme.symmetric else zero
        for values in (weight, weight.float()):
            codes = solve.coded(values, scale, zeros, scheme)
            assert torch.equal(codes, llmcompressor_backend.coded(values, scale, zeros, scheme)), (
                scheme
            )
            assert int(codes.min()) >= scheme.low
            for factor in (scale, scale.float()):
                meant = solve.meaning(codes, factor, zeros, scheme)
                args = llmcompressor_backend.args_of(observed)
                assert same(meant, dequantize(codes, factor, zeros, args)), scheme


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 333])
@pytest.mark.parametrize("columns", [16, 96, 512])
def test_hessians_are_added_up_as_theirs(tokens: int, columns: int) -> None:
    from llmcompressor.modifiers.gptq.helpers import accumulate_hessian

    generator = torch.Generator().manual_seed(tokens)
    ours = input_stats(columns, "cpu")
    linear, theirs_ = torch.nn.Linear(1, 1, device="meta"), torch.zeros(columns, columns)
    for _ in range(3):
        rows = torch.randn(tokens, columns, generator=generator).bfloat16()
        rows[:, ::32] *= 40
        ours.add(rows)
        accumulate_hessian(rows, linear, theirs_, torch.zeros(()))
        assert torch.equal(ours.hessian, theirs_)
