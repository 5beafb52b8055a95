"""Several devices at once: what they make comes in their order, errors come out, and nothing waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.calibrate.foreseen import Foreseen
from qconvert.calibrate.layers import divided
from qconvert.calibrate.reading import Weights
from qconvert.calibrate.spread import in_turn, on_each, shares
from qconvert.matrices.experts import PROJECTIONS, Projection
from qconvert.matrices.stored import Stored

CPUS = ["cpu"] * 3


def test_devices_compute_at_once() -> None:
    together = threading.Barrier(3, timeout=60)

    def work(place: int) -> int:
        together.wait()
        return place * place

    assert on_each(CPUS, work) == [0, 1, 4]


def test_an_error_comes_out_once_all_have_ended() -> None:
    ended: list[int] = []

    def work(place: int) -> None:
        if place == 1:
            raise ValueError("broken")
        ended.append(place)

    with pytest.raises(ValueError, match="broken"):
        on_each(CPUS, work)
    assert sorted(ended) == [0, 2]


@given(st.lists(st.integers(), max_size=40), st.integers(1, 6))
def test_shares_are_runs_of_about_one_length(items: list[int], count: int) -> None:
    found = shares(items, count)
    assert [item for share in found for item in share] == items
    assert max(map(len, found)) - min(map(len, found)) <= 1


@given(st.integers(0, 12), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_each_item_passes_all_devices_in_their_order(items: int, devices: int) -> None:
    made: list[tuple[int, list[int]]] = []

    def work(place: int, item: int, given: list[int]) -> list[int]:
        return [*given, place]

    in_turn(
        ["cpu"] * devices, range(items), lambda item: [], work,
        lambda item, found: made.append((item, found)),
    )  # fmt: skip
    assert made == [(item, list(range(devices))) for item in range(items)]


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_device_that_fails_keeps_no_other_waiting(broken: int) -> None:
    before = threading.active_count()

    def work(place: int, item: int, given: int) -> int:
        if place == broken and item == 5:
            raise ValueError(f"device {place} broke")
        return given

    made: list[int] = []
    with pytest.raises(ValueError, match=f"device {broken} broke"):
        in_turn(CPUS, range(50), lambda item: item, work, lambda item, _: made.append(item))
    assert made == list(range(5))
    assert threading.active_count() == before


def test_what_begins_or_ends_an_item_may_fail() -> None:
    def fail(*_: int) -> int:
        raise ValueError("no rows")

    with pytest.raises(ValueError, match="no rows"):
        in_turn(CPUS, range(50), fail, lambda place, item, given: given, lambda item, made: None)
    with pytest.raises(ValueError, match="no rows"):
        in_turn(
            CPUS, range(50), lambda item: item, lambda place, item, given: given,
            lambda item, made: cast(None, fail(item)),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("count", "sizes", "batch", "wanted"),
    [
        (8, [8, 8], 1, [[[0, 1, 2, 3], [4, 5, 6, 7]]]),  # once a device had all, the other none
        (7, [8, 8], 1, [[[0, 1, 2, 3], [4, 5, 6]]]),
        (8, [8], 1, [[[0, 1, 2, 3, 4, 5, 6, 7]]]),
        (8, [2, 8], 1, [[[0, 1], [2, 3, 4, 5, 6, 7]]]),
        (8, [3, 2], 1, [[[0, 1, 2], [3, 4]], [[5, 6], [7]]]),
        (1, [3, 2], 1, [[[0]]]),
        (0, [3, 2], 1, []),
        (6, [9, 9], 2, [[[0, 1, 2, 3], [4, 5]]]),
        (6, [9, 9, 9, 9], 2, [[[0, 1], [2, 3], [4, 5]]]),
        (6, [3, 3], 2, [[[0, 1], [2, 3]], [[4, 5]]]),
        (4, [3, 1], 4, [[[0, 1, 2], [3]]]),
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


class _Reader:
    def __init__(self) -> None:
        self.orders: list[list[str]] = []

    def expect(self, order: Iterator[tuple[str, Stored]], room: int, threads: int) -> None:
        self.orders.append([name for name, _ in order])


def test_readers_are_told_again_only_where_experts_move() -> None:
    def expert(layer: int, number: int, kind: str) -> Projection:
        found = object.__new__(Projection)
        object.__setattr__(found, "module", f"{layer}.{number}.{kind}")
        object.__setattr__(found, "weight", None)
        return found

    matrices = {
        layer: {(e, kind): expert(layer, e, kind) for e in range(4) for kind in PROJECTIONS}
        for layer in (1, 2)
    }
    readers = [_Reader(), _Reader()]
    foreseen = Foreseen(matrices, cast(list[Weights], readers), 10, 3)
    foreseen.settle(0, [[[0, 1], [2, 3]]])
    foreseen.settle(
        1, [[[0], [2]], [[1], [3]]]
    )  # in other groups the same experts, in the same order
    foreseen.settle(2, [[[0], [1]], [[2], [3]]])
    first, second = readers
    assert len(first.orders) == len(second.orders) == 2
    assert first.orders[0] == [
        f"{n}.{e}.{kind}" for n in (1, 2) for e in (0, 1) for kind in PROJECTIONS
    ]
    assert second.orders[1] == [f"2.{e}.{kind}" for e in (1, 3) for kind in PROJECTIONS]
