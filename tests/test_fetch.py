"""Ranges of objects fetched ahead: the right bytes, each once, and a bounded number at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.checkpoint.checkpoint import Shard
from qconvert.checkpoint.store import RemoteObject, StoredObject
from qconvert.core.errors import RunError
from qconvert.run.work import reader
from qconvert.run.work.reader import Range, RangeFetcher, pieces_of


@dataclass(frozen=True)
class Held:
    """A store whose objects are bytes here, and which notes what is read of them."""

    imports: ClassVar[tuple[str, ...]] = ()

    objects: dict[str, bytes]
    url: str = "held://here"
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def __hash__(self) -> int:
        return id(self)

    def listed(self) -> Sequence[StoredObject]:
        return [StoredObject(name, len(data), "mark") for name, data in self.objects.items()]

    def read(self, found: StoredObject, start: int, stop: int) -> bytes:
        with self.lock:
            self.reads.append((found.name, start, stop))
        return self.objects[found.name][start:stop]


def shards_of(store: Held) -> list[Shard]:
    return [
        Shard(Path(each.name), each.size, 0, remote=RemoteObject(store, each))
        for each in store.listed()
    ]


def held(size: int = 1000) -> Held:
    return Held(
        {name: bytes((i * seed) % 251 for i in range(size)) for seed, name in ((1, "a"), (7, "b"))}
    )


def read(fetching: RangeFetcher, found: Range, end: int) -> bytes:
    shard, start, stop = found
    into = memoryview(bytearray(stop - start))
    fetching.read(shard, start, into, end)
    return bytes(into)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "PIECE_BYTES", 64)
    monkeypatch.setattr(reader, "AT_ONCE", 3)
    monkeypatch.setattr(reader, "LEAST_BYTES", 0)


RANGES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 990), st.integers(1, 300)).map(
        lambda r: (r[0], r[1], min(1000, r[1] + r[2]))
    ),
    max_size=20,
)


@settings(max_examples=25)
@given(ranges=RANGES, again=st.booleans())
def test_expected_ranges(ranges: list[Range], again: bool) -> None:
    """Whatever is expected and in whatever order it is read, the bytes are those of the object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "PIECE_BYTES", 64)
        patch.setattr(reader, "AT_ONCE", 3)
        store = held()
        fetching = RangeFetcher(shards_of(store))
        try:
            half = len(ranges) // 2
            fetching.expect(ranges[:half])
            fetching.expect(ranges[half:])
            for shard, start, stop in ranges[::-1] if again else ranges:
                whole = store.objects["ab"[shard]]
                for at in range(start, stop, 50):
                    part = (shard, at, min(at + 50, stop))
                    assert read(fetching, part, 1000) == whole[at : part[2]]
                assert fetching._bytes <= 3 * 64
        finally:
            fetching.close()


def test_each_byte_is_fetched_once_and_touching_ranges_together(small_pieces: None) -> None:
    store = held()
    fetching = RangeFetcher(shards_of(store))
    ranges = [(0, 100, 130), (1, 0, 200), (0, 130, 150), (0, 150, 400), (1, 500, 510)]
    fetching.expect(ranges)
    for each in ranges:
        read(fetching, each, 1000)
    fetching.close()
    spans = sorted(store.reads)
    assert sum(stop - start for _, start, stop in spans) == 300 + 200 + 10
    assert [s for s in spans if s[0] == "a"] == [
        ("a", at, min(at + 64, 400)) for at in range(100, 400, 64)
    ]


def test_what_is_expected_twice_is_fetched_once(small_pieces: None) -> None:
    """A scale that two batches read, and a piece of which one reads the front, the other all."""
    store = held()
    fetching = RangeFetcher(shards_of(store))
    fetching.expect([(0, 0, 60), (1, 0, 10)])
    fetching.expect([(0, 40, 100), (1, 0, 10)])
    for each in ((0, 0, 60), (1, 0, 10), (0, 40, 100), (1, 0, 10)):
        assert read(fetching, each, 1000) == store.objects["ab"[each[0]]][each[1] : each[2]]
    fetching.close()
    assert sorted(store.reads) == [("a", 0, 60), ("a", 60, 100), ("b", 0, 10)]


def test_what_was_not_expected_is_fetched_exactly(small_pieces: None) -> None:
    store = held()
    fetching = RangeFetcher(shards_of(store))
    fetching.expect([(0, 0, 10)])
    assert read(fetching, (0, 700, 710), 1000) == store.objects["a"][700:710]
    fetching.close()
    assert ("a", 700, 710) in store.reads


def test_without_a_word_the_rest_of_the_tensor_is_fetched_ahead(small_pieces: None) -> None:
    store = held()
    fetching = RangeFetcher(shards_of(store))
    for at in range(200, 500, 20):
        assert read(fetching, (0, at, at + 20), 500) == store.objects["a"][at : at + 20]
    fetching.close()
    assert sorted(store.reads) == [("a", at, min(at + 64, 500)) for at in range(200, 500, 64)]


def test_small_tensors_come_with_their_neighbours(
    small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LEAST_BYTES", 60)
    store = held()
    fetching = RangeFetcher(shards_of(store))
    for at in (0, 20, 40, 990):
        assert read(fetching, (0, at, at + 10), at + 10) == store.objects["a"][at : at + 10]
    fetching.close()
    assert store.reads == [("a", 0, 60), ("a", 990, 1000)]


def test_pieces_come_in_the_order_of_need(small_pieces: None) -> None:
    found = pieces_of([(1, 0, 10), (0, 0, 100), (0, 100, 120)])
    assert [(p.shard, p.start, p.stop) for p in found] == [(1, 0, 10), (0, 0, 64), (0, 64, 120)]


def test_an_object_that_ends_before(small_pieces: None) -> None:
    store = held()
    shards = shards_of(store)
    store.objects["a"] = store.objects["a"][:50]
    fetching = RangeFetcher(shards)
    fetching.expect([(0, 0, 60)])
    with pytest.raises(
        RunError, match=r"held://here/a: expected 60 bytes from byte 0 on, found 50"
    ):
        read(fetching, (0, 0, 60), 1000)
    fetching.close()
