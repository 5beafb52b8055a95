"""What a calibration is cut into, and how that is divided: evenly, and in the same pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.calibrate.distributed import ExpertReadOrder, divided, shares
from qconvert.calibrate.reading import Weights
from qconvert.formats.base import Stored
from qconvert.models.experts import PROJECTIONS, Projection


@given(st.lists(st.integers(), max_size=40), st.integers(1, 6))
def test_shares_are_runs_of_about_one_length(items: list[int], count: int) -> None:
    found = shares(items, count)
    assert [item for share in found for item in share] == items
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(
    ("count", "sizes", "batch", "wanted"),
    [
        (8, [8, 8], 1, [[[0, 1, 2, 3], [4, 5, 6, 7]]]),  # once a process had all, the other none
        (7, [8, 8], 1, [[[0, 1, 2, 3], [4, 5, 6]]]),
        (8, [8], 1, [[[0, 1, 2, 3, 4, 5, 6, 7]]]),
        (8, [2, 8], 1, [[[0, 1], [2, 3, 4, 5, 6, 7]]]),
        (8, [3, 2], 1, [[[0, 1, 2], [3, 4]], [[5, 6], [7]]]),
        (1, [3, 2], 1, [[[0]]]),
        (0, [3, 2], 1, []),
        (6, [9, 9], 2, [[[0, 1, 2, 3], [4, 5]]]),
        (6, [9, 9, 9, 9], 2, [[[0, 1], [2, 3], [4, 5]]]),
        (6, [3, 3], 2, [[[0, 1], [2, 3]], [[4, 5]]]),
        (4, [3, 1], 4, [[[0, 1], [2]], [[3]]]),
        (8, [3], 4, [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]),
        (8, [3, 3], 4, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
    ],
)
def test_experts_are_divided_evenly(
    count: int, sizes: Sequence[int], batch: int, wanted: list[list[list[int]]]
) -> None:
    assert list(divided(range(count), sizes, batch)) == wanted


@given(st.integers(1, 60), st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 8))
def test_groups_are_in_order_and_within_their_sizes(
    count: int, sizes: list[int], batch: int
) -> None:
    groups = list(divided(range(count), sizes, batch))
    assert [n for group in groups for mine in group for n in mine] == list(range(count))
    for group in groups:
        assert all(len(mine) <= size for mine, size in zip(group, sizes, strict=False))


@given(
    st.sets(st.integers(0, 60), min_size=1), st.integers(1, 20), st.sampled_from([1, 2, 4, 8]),
    st.integers(2, 5),
)  # fmt: skip
def test_the_same_numbers_are_together_in_any_number_of_processes(
    numbers: set[int], size: int, batch: int, count: int
) -> None:
    """Those of a batch that are in one process at a time."""

    def together(processes: int) -> set[tuple[int, ...]]:
        return {
            tuple(n for n in mine if n // batch == first // batch)
            for group in divided(sorted(numbers), [size] * processes, batch)
            for mine in group
            for first in mine
        }

    assert together(count) == together(1)


class _Reader:
    def __init__(self) -> None:
        self.orders: list[list[str]] = []

    def expect(self, order: Iterator[tuple[str, Stored]], room: int) -> None:
        self.orders.append([name for name, _ in order])


def test_a_reader_is_told_again_only_where_experts_move() -> None:
    def expert(layer: int, number: int, kind: str) -> Projection:
        found = object.__new__(Projection)
        object.__setattr__(found, "module", f"{layer}.{number}.{kind}")
        object.__setattr__(found, "weight", None)
        return found

    matrices = {
        layer: {(e, kind): expert(layer, e, kind) for e in range(4) for kind in PROJECTIONS}
        for layer in (1, 2)
    }
    reader = _Reader()
    foreseen = ExpertReadOrder(matrices, cast(Weights, reader), 10, 3)
    foreseen.set_experts(0, [0, 1])
    foreseen.set_experts(1, (0, 1))
    foreseen.set_experts(2, [1, 3])
    first, second = reader.orders
    assert first == [f"{n}.{e}.{kind}" for n in (1, 2) for e in (0, 1) for kind in PROJECTIONS]
    assert second == [f"2.{e}.{kind}" for e in (1, 3) for kind in PROJECTIONS]
