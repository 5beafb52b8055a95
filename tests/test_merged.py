"""Streams of several devices as one: everything comes through, errors too, and nothing waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from qconvert.calibrate.merged import merged


def counting(first: int, count: int, fails: str | None = None) -> Iterator[int]:
    yield from range(first, first + count)
    if fails is not None:
        raise ValueError(fails)


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_every_item_comes_once_and_in_its_stream_s_order(streams: int) -> None:
    found = list(merged([counting(100 * n, 30) for n in range(streams)]))
    for n in range(streams):
        mine = [item for item in found if item // 100 == n]
        assert mine == list(range(100 * n, 100 * n + 30))
    assert len(found) == 30 * streams


def test_an_error_comes_after_the_items_of_the_others() -> None:
    found: list[int] = []
    with pytest.raises(ValueError, match="broken"):
        found.extend(merged([counting(0, 3, "broken"), counting(100, 40)]))
    assert sorted(found) == [0, 1, 2, *range(100, 140)]


def test_closed_early_the_threads_end() -> None:
    before = threading.active_count()
    stream = merged([counting(0, 10**9), counting(10**9, 10**9)])
    assert next(stream) in (0, 10**9)
    stream.close()
    assert threading.active_count() == before
