"""A team of threads, which says what a team of processes does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from qconvert.calibrate.distributed import Communicator
from qconvert.calibrate.engine import Event

T = TypeVar("T")
_SECONDS = 120


class _Place:
    """Where threads meet, and put what they give."""

    def __init__(self, count: int) -> None:
        self.given: list[Any] = [None] * count
        self._barrier = threading.Barrier(count, timeout=_SECONDS)

    def barrier(self) -> None:
        self._barrier.wait()

    def gathered(self, rank: int, value: T) -> list[T]:
        self.given[rank] = value
        self.barrier()
        found = list(self.given)
        self.barrier()
        return found

    def abort(self) -> None:
        self._barrier.abort()


class ThreadRank:
    """One thread of a team."""

    def __init__(self, rank: int, place: _Place, behind: _Place) -> None:
        self.rank, self.count = rank, len(place.given)
        self._place, self._behind = place, behind

    def send(self, tensor: torch.Tensor, source: int) -> None:
        given = self._place.gathered(self.rank, tensor.clone() if self.rank == source else None)
        assert tensor.is_contiguous()
        sent = given[source]
        if self.rank != source:
            assert sent is not None
            assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
            tensor.copy_(sent)

    def gathered(self, value: T) -> list[T]:
        return self._place.gathered(self.rank, value)

    def barrier(self) -> None:
        self._place.barrier()

    def background_barrier(self) -> None:
        self._behind.barrier()


def run_ranks(count: int, events: Callable[[Communicator], Generator[Event]]) -> list[list[Event]]:
    """What each thread of a team yields. What one raises is raised, and ends the others."""
    places = _Place(count), _Place(count)

    def run(rank: int) -> list[Event]:
        try:
            return list(events(ThreadRank(rank, *places)))
        except BaseException:
            for place in places:
                place.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        jobs = [pool.submit(run, rank) for rank in range(count)]
    errors = [e for job in jobs if (e := job.exception())]
    own = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (own or errors)[0]
    return [job.result() for job in jobs]
