"""Checks that all weights are as near to the source's as their format allows: what the rules of
validators/weights and validators/amx ask, in one pass. A loop that says no has looked at enough to know
that numpy's form is to say where and why; so has one that met a NaN. And sums over two matrices: what
validators/weights/sums.py does."""

from __future__ import annotations

from typing import Any

import numpy as np

from qconvert.compiled.jit import inner, loop

_QUICK = 6.5  # in steps: no format's reach is less
_LARGEST = np.float32(np.finfo(np.float32).max)


@inner
def _row(expected: Any, found: Any, allowed: np.float32) -> bool:
    fits = True
    for column in range(expected.size):
        fits &= bool(abs(np.float32(expected[column] - found[column])) <= allowed)
    return fits


@inner
def _largest(values: Any) -> np.float32:
    """The largest size: without their sign floats are in the order of their bits."""
    most = np.int32(0)
    for column in range(values.size):
        most = max(most, np.int32(np.float32(values[column]).view(np.int32) & np.int32(0x7FFFFFFF)))
    return np.int32(most).view(np.float32)


@loop("rf4[2]", "rf4[2]", "rf4[1]", "f4[1]")
def row_fits(expected: Any, found: Any, allowed: Any, largest: Any) -> bool:
    """No weight [n, K] is off by more than `allowed` [n] of its row; `largest` [n] is filled with the
    largest of the expected sizes."""
    for row in range(expected.shape[0]):
        if not _row(expected[row], found[row], allowed[row]):
            return False
        largest[row] = _largest(expected[row])
    return True


@inner
def _group(expected: Any, found: Any, allowed: np.float32, part: np.float32) -> bool:
    fits = True
    for column in range(expected.size):
        near = found[column]
        fits &= bool(near == near)
        near = near if near < _LARGEST else _LARGEST
        near = near if near > -_LARGEST else -_LARGEST
        most = np.float32(allowed + np.float32(part * abs(expected[column])))
        fits &= bool(abs(np.float32(expected[column] - near)) <= most)
    return fits


@inner
def _reach(values: Any) -> np.float32:
    """From the smallest to the largest, 0 included. Bits of negative floats, all but the sign turned,
    are in their order too."""
    least, most = np.int32(0), np.int32(0)
    for column in range(values.size):
        bits = np.float32(values[column]).view(np.int32)
        bits = np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        least, most = min(least, bits), max(most, bits)
    least = np.int32(least ^ np.int32(np.int32(least >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return np.float32(np.int32(most).view(np.float32) - np.int32(least).view(np.float32))


@loop("rf4[2]", "rf4[2]", "rf4[2]", "float", "float", "float", "bool", "f4[2]")
def int_fits(
    expected: Any, found: Any, step: Any, half: float, least: float, part: float,
    symmetric: bool, span: Any,
) -> bool:  # fmt: skip
    """No weight [n, K] is off by more than `half` a step of its group (steps [n, G]) plus `least`, plus
    `part` of its own size. `span` [n, G] is filled with the range that a group's codes must cover."""
    rows, groups = step.shape
    wide = expected.shape[1] // groups
    for row in range(rows):
        for group in range(groups):
            own, size = expected[row, group * wide : (group + 1) * wide], step[row, group]
            if not size <= _LARGEST:
                return False
            allowed = np.float32(np.float32(np.float32(half) * size) + np.float32(least))
            other = found[row, group * wide : (group + 1) * wide]
            if not _group(own, other, allowed, np.float32(part)):
                return False
            span[row, group] = _largest(own) if symmetric else _reach(own)
    return True


@inner
def _fp4_near(expected: Any, found: Any, step: Any, slack: float) -> bool:
    """Tell whether all of a row, with a step for each, is near, without a quotient: that of two float32
    is 2, 4 or 6.5, or so far from it that a product of float64 shows it. What is beyond is not near
    here."""
    fits = True
    for column in range(expected.size):
        size, own = np.float64(abs(expected[column])), np.float64(step[column])
        error = abs(np.float64(expected[column]) - np.float64(found[column]))
        half = 0.5 if size < 4.0 * own else 1.0
        half = 0.25 if size < 2.0 * own else half
        fits &= bool((error <= half * own * slack) & (size <= _QUICK * own))
    return fits


@inner
def _fp4_block(expected: Any, found: Any, step: Any, reach: Any, slack: Any) -> bool:
    fits = True
    for column in range(expected.size):
        size = np.float64(abs(expected[column])) / step
        error = abs(np.float64(expected[column]) - np.float64(found[column]))
        beyond = size - 6.0
        half = beyond if beyond > 1.0 else 1.0
        half = 0.5 if size < 4.0 else half
        half = 0.25 if size < 2.0 else half
        near = (error <= half * step * slack) & (size <= reach)
        fits &= bool(near | (error == 0.0))
    return fits


@loop("rf4[2]", "rf4[2]", "rf4[2]", "double", "double", "double", "double", "f4[2]")
def fp4_fits(
    expected: Any, found: Any, factor: Any, normal: float, reach: float, denormal: float,
    slack: float, largest: Any,
) -> bool:  # fmt: skip
    """No weight [n, K] is further off than half a step of E2M1 where it is, in units of its block's
    factor [n, G], times `slack`; none is beyond `reach` factors, or `denormal` for factors below
    `normal`. `largest` [n, G] is filled with the largest of the expected sizes."""
    rows, blocks = factor.shape
    columns = expected.shape[1]
    wide = columns // blocks
    steps = np.empty(
        columns, np.float32
    )  # blocks of 16 columns are too short for a loop of their own
    for row in range(rows):
        for block in range(blocks):
            first, last = block * wide, (block + 1) * wide
            steps[first:last] = abs(factor[row, block])
            largest[row, block] = _largest(expected[row, first:last])
        if _fp4_near(expected[row], found[row], steps, slack):
            continue
        for block in range(blocks):
            first, last = block * wide, (block + 1) * wide
            step = np.float64(steps[first])
            most: Any = reach if step >= normal else denormal
            own, other = expected[row, first:last], found[row, first:last]
            if not _fp4_block(own, other, step, most, slack):
                return False
    return True


@inner
def _fp8_block(
    expected: Any, found: Any, half: np.float32, least: np.float32, slack: np.float32,
    more: np.float32,
) -> bool:  # fmt: skip
    fits = True
    for column in range(expected.size):
        size = abs(expected[column])
        own = np.float32(half * size)
        allowed = np.float32((own if own > least else least) * slack)
        allowed = np.float32(allowed + np.float32(more * size))
        fits &= bool(abs(np.float32(expected[column] - found[column])) <= allowed)
    return fits


@loop("rf4[2]", "rf4[2]", "rf4[2]", "int", "float", "float", "float", "float")
def fp8_fits(
    expected: Any, found: Any, step: Any, wide: int, half: float, least: float, slack: float,
    more: float,
) -> bool:  # fmt: skip
    """No weight [n, K] is off by more than `half` of its size, or `least` steps (steps [n, G], each for
    `wide` columns) if that is more, times `slack`, plus `more` of its size."""
    rows, blocks = step.shape
    columns = expected.shape[1]
    for row in range(rows):
        for block in range(blocks):
            first, last = block * wide, min(columns, (block + 1) * wide)
            lowest = np.float32(np.float32(least) * step[row, block])
            if not lowest >= np.float32(0):
                return False
            if not _fp8_block(
                expected[row, first:last], found[row, first:last], np.float32(half), lowest,
                np.float32(slack), np.float32(more),
            ):  # fmt: skip
                return False
    return True


# --- Sums ----------------------------------------------------------------------------------------

_COLUMNS = 1024  # at a time: their sums stay in the first cache


@inner
def _products(left: Any, right: Any, source: Any, found: Any, product: Any, difference: Any) -> Any:
    """Add a row's products to those of its columns. Returns the largest difference."""
    worst = np.int32(0)  # sizes are in the order of their bits
    for column in range(left.size):
        one, other = left[column], right[column]
        off = np.float32(other - one)
        source[column] += np.float32(one * one)
        found[column] += np.float32(other * other)
        product[column] += np.float32(one * other)
        difference[column] += np.float32(off * off)
        worst = max(worst, np.int32(np.float32(off).view(np.int32) & np.int32(0x7FFFFFFF)))
    return np.int32(worst).view(np.float32)


@loop("rf4[2]", "rf4[2]", "int", "f4[3]", "f4[1]")
def sums(expected: Any, found: Any, height: int, totals: Any, worst: Any) -> bool:
    """Of [n, K] the sums of each column over `height` rows, `totals` [4, n / height, K]: squares of the
    expected and of the found, their product, and squares of the difference; `worst` [1] is filled with
    the largest difference. Declines a column alone, which numpy adds in another order; whether all sums
    are finite, and so all weights, the caller sees in `totals`."""
    rows, columns = expected.shape
    if columns < 2:
        return False
    worst[0] = np.float32(0)
    totals[:] = np.float32(-0.0)  # whatever is added to it stays as it is
    for first in range(0, columns, _COLUMNS):
        last = min(columns, first + _COLUMNS)
        for row in range(rows):
            group = row // height
            off = _products(
                expected[row, first:last], found[row, first:last], totals[0, group, first:last],
                totals[1, group, first:last], totals[2, group, first:last],
                totals[3, group, first:last],
            )  # fmt: skip
            worst[0] = off if off > worst[0] else worst[0]
    return True
