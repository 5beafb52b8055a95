"""Bounds of calibrated integers (validators/weights/int_bounds.py): what a group by itself may be, and
what many together may not; real calibrations are in test_calibrated_validate.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qconvert.core.dtypes import TensorType
from qconvert.core.graph import Source
from qconvert.validators.reading.forms import Codes, Form, Grid
from qconvert.validators.weights.int_bounds import Kept, Tile

ROWS, GROUPS, WIDTH = 200, 10, 32
Array = np.ndarray[Any, np.dtype[np.float32]]


def tile(factor: Array) -> Tile:
    """Weights as rounded to nearest, each group times its own factor [rows, groups]."""
    random = np.random.default_rng(7)
    shape = ROWS, GROUPS * WIDTH
    expected = random.standard_t(5, shape).astype(np.float32)
    step = np.abs(expected.reshape(ROWS, GROUPS, WIDTH)).max(axis=2) / np.float32(7.5)
    codes = np.clip(np.rint(expected / np.repeat(step, WIDTH, 1)), -8, 7)
    weight = Source("w", TensorType("I32", (ROWS, shape[1] // 8)), 0, 0)
    scale = Source("s", TensorType("BF16", step.shape), 0, 0)
    grid = Grid(scale, 0, ROWS, GROUPS, (1, WIDTH))
    form = Form("w4a16", weight, 0, ROWS, shape[1], grid, codes=Codes(4))
    found = (codes * np.repeat(step * factor, WIDTH, 1)).astype(np.float32)
    return Tile(form, expected, found, np.abs(step * factor), np.zeros_like(step), None)


def fault(factor: Array) -> str:
    return Kept(searched=True).add(tile(factor), 0)


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.2])
def test_one_group_may_be_short(factor: float) -> None:
    """Its columns may have had next to no input: 2.03 times too short was one of 2,037 sound groups."""
    factors = np.ones((ROWS, GROUPS), np.float32)
    factors[9, 1] = factor
    assert fault(factors) == ""


def test_many_groups_may_not_be_short() -> None:
    factors = np.ones((ROWS, GROUPS), np.float32)
    factors[:, 3] = 0.5
    assert "row 0, columns from 96: expected a scale near" in fault(factors)


@pytest.mark.parametrize("factor", [1 / 512, 8.0, -1.0])
def test_a_scale_of_another_size_or_sign(factor: float) -> None:
    factors = np.ones((ROWS, GROUPS), np.float32)
    factors[9, 1] = factor
    assert "row 9, columns from 32: expected a scale near" in fault(factors)


@pytest.mark.parametrize(
    ("factor", "sound"), [(1.0, True), (0.55, True), (0.3, False), (2.2, False)]
)
def test_a_row_may_not_be_of_another_length(factor: float, sound: bool) -> None:
    factors = np.ones((ROWS, GROUPS), np.float32)
    factors[9] = factor
    assert (fault(factors) == "") is sound
