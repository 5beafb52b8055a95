"""Work on several devices at once: a thread for each, in which its device is the current one.

What is computed must not depend on how many there are: samples go through attention in the same
batches, each whole on one device, and experts answer a token in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from queue import Queue
from typing import TypeVar

_WAITING = 2  # items between two devices

T = TypeVar("T")
Item = TypeVar("Item")


def use_device(device: str) -> None:
    """Make a device the one that this thread launches kernels on: Triton's go nowhere else."""
    if device != "cpu":
        import torch

        torch.cuda.set_device(device)


def load_solvers(devices: Sequence[str]) -> None:
    """Let torch load its linear algebra for GPUs, which it does at the first call and not in two threads
    (2.11: "lazy wrapper should be called at most once")."""
    gpus = [device for device in devices if device != "cpu"]
    if len(gpus) > 1:
        import torch

        for device in gpus:
            one = torch.eye(2, device=device)
            lower = torch.linalg.cholesky(one)
            torch.linalg.solve_triangular(lower, one, upper=False)
            torch.cholesky_solve(one, lower)
            torch.cholesky_inverse(lower)


def on_each(devices: Sequence[str], work: Callable[[int], T]) -> list[T]:
    """What `work` makes of the number of each device; of one device in this thread. What one raises is
    raised once all have ended."""
    if len(devices) == 1:
        return [work(0)]

    def run(place: int) -> T:
        use_device(devices[place])
        return work(place)

    with ThreadPoolExecutor(len(devices), "qconvert-device") as pool:
        jobs = [pool.submit(run, place) for place in range(len(devices))]
    return [job.result() for job in jobs]


def shares(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Items in `count` runs of neighbours, as many in each as in the others or one less."""
    cuts = [len(items) * n // count for n in range(count + 1)]
    return [items[start:stop] for start, stop in pairwise(cuts)]


def in_turn(
    devices: Sequence[str], items: Sequence[Item], begin: Callable[[Item], T],
    work: Callable[[int, Item, T], T], end: Callable[[Item, T], None],
) -> None:  # fmt: skip
    """Each item goes through all devices in their order, from what `begin` gives for it to what `end`
    takes; a device is at one item while the next is at the one before."""
    last = len(devices) - 1
    # None ends a way, early where the device before raised something.
    ways: list[Queue[T | None]] = [Queue(_WAITING) for _ in devices]

    def run(place: int) -> None:
        ended = place == 0
        try:
            for item in items:
                given = begin(item) if place == 0 else ways[place].get()
                if given is None:
                    ended = True
                    return
                made = work(place, item, given)
                del given
                if place == last:
                    end(item, made)
                else:
                    ways[place + 1].put(made)
                del made
        finally:
            if place < last:
                ways[place + 1].put(None)
            while not ended:  # the device before must not wait for ever
                ended = ways[place].get() is None

    on_each(devices, run)
