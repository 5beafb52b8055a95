"""Processes that calibrate a model together, an accelerator each: what one has to know of the others.

Each runs attention over its own samples, and lets all experts answer these. What goes into experts is
shared, so that each counts all tokens in for the experts that it solves; then it shares what their codes
mean. Threads of one process, for two GPUs, waited for Python's lock: 2.51 s a layer of Qwen3-30B-A3B for
2.09 of two processes, and they found other codes than one GPU does.

Every process makes the same calls in the same order, or all of them wait for ever: what depends on a
clock, on free memory or on a file is decided by one of them, for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from qconvert.calibrate.rows import Rows

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_ROWS = 1 << 16  # sent at a time
# A process waits as long as another one solves, or its results are written.
_PATIENCE = timedelta(days=2)


class Team(Protocol):
    """`rank` of `count` processes."""

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...

    def send(self, tensor: torch.Tensor, source: int) -> None:
        """Give all what the process `source` has in this tensor, which is contiguous and of one shape
        and dtype everywhere."""

    def gathered(self, value: T) -> list[T]:
        """What each process gave here, by rank."""

    def meet(self) -> None:
        """Wait for all."""

    def meet_behind(self) -> None:
        """Wait for all, in a thread that writes behind the computation."""


class Alone:
    """A process without others."""

    rank, count = 0, 1

    def send(self, tensor: torch.Tensor, source: int) -> None:
        pass

    def gathered(self, value: T) -> list[T]:
        return [value]

    def meet(self) -> None:
        pass

    def meet_behind(self) -> None:
        pass


ALONE = Alone()


def decided(team: Team, value: T) -> T:
    """What the first process says."""
    return team.gathered(value)[0]


def share(team: Team, rows: Rows, cuts: Sequence[tuple[int, int]], device: str) -> None:
    """Give all processes the rows that each has of its own tokens, cuts[rank]."""
    import torch

    for source in range(team.count if team.count > 1 else 0):
        first, last = cuts[source]
        for start in range(first, last, _ROWS):
            mine = rows.read(start, min(start + _ROWS, last))
            if source == team.rank:
                team.send(mine.to(device).contiguous(), source)
            else:
                there = torch.empty_like(mine, device=device)
                team.send(there, source)
                rows.write(start, there)


class Processes:
    """A process of a team by torch.distributed: NCCL between GPUs, Gloo for what lies in host memory.
    They find one another through a file in `meeting`, and must all be on one host."""

    def __init__(self, rank: int, count: int, device: str, meeting: str) -> None:
        import torch
        import torch.distributed as distributed

        self.rank, self.count = rank, count
        group: Any = distributed  # typed in parts
        self._group = group
        gpu = device != "cpu"
        group.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=group.FileStore(f"{meeting}/store", count),
            rank=rank, world_size=count, timeout=_PATIENCE,
            device_id=torch.device(device) if gpu else None,
        )  # fmt: skip
        # Threads must not share a group: its calls are told apart by their order.
        self._hosts = group.new_group(backend="gloo", timeout=_PATIENCE)
        self._behind = group.new_group(backend="gloo", timeout=_PATIENCE)

    def send(self, tensor: torch.Tensor, source: int) -> None:
        import torch

        if tensor.numel():  # as bytes: Gloo does not know every dtype
            self._group.broadcast(tensor.view(torch.uint8), source)

    def gathered(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.count
        self._group.all_gather_object(found, value, group=self._hosts)
        return found

    def meet(self) -> None:
        self._group.barrier(group=self._hosts)

    def meet_behind(self) -> None:
        self._group.barrier(group=self._behind)
