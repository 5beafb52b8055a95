"""Division of a calibration into batches, which process of a team has which of it, and the order in
which each reads experts.

What is computed must not depend on how many processes there are: samples go through attention in the
same batches, and experts are solved in the same ones, each whole in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import TypeVar

from qconvert.calibrate.reading import Weights
from qconvert.formats.base import Stored
from qconvert.models.experts import PROJECTIONS, Projection

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens [start, stop) of all, being `count` samples of one length from number `first` on."""

    start: int
    stop: int
    first: int
    count: int


def batches(
    lengths: Sequence[int], most: int | None, parts: Sequence[tuple[int, int]]
) -> Iterator[list[Batch]]:
    """For each part of the tokens samples that go through attention together: one by one, or as many
    neighbours of one length as have no more than `most` tokens."""
    at = 0
    number = 0
    for _, end in parts:
        found = []
        while at < end:
            length, count = lengths[number], 1
            while (
                most is not None
                and at + count * length < end
                and lengths[number + count] == length
                and (count + 1) * length <= most
            ):
                count += 1
            stop = at + count * length
            found.append(Batch(at, stop, number, count))
            at, number = stop, number + count
        yield found


def chunks_of(lengths: Sequence[int], most: int | None) -> list[tuple[int, int]]:
    """Ranges of tokens whose expert inputs are worked on together: a sample each, or whole samples of
    no more than `most` tokens."""
    found: list[tuple[int, int]] = []
    at = 0
    for length in lengths:
        if found and most is not None and at + length - found[-1][0] <= most:
            found[-1] = found[-1][0], at + length
        else:
            found.append((at, at + length))
        at += length
    return found


def shares(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Items in `count` runs of neighbours, as many in each as in the others or one less."""
    cuts = [len(items) * n // count for n in range(count + 1)]
    return [items[start:stop] for start, stop in pairwise(cuts)]


def divided(
    numbers: Sequence[int], sizes: Sequence[int], batch: int = 1
) -> Iterator[list[list[int]]]:
    """Groups of numbers, in their order: of each group a process has as many as its size at the most,
    and no more than the others where there are fewer than all could have. Batches, each of `batch`
    numbers from a multiple of it on, stay whole; of half, a quarter, ... where one has space for less:
    so what is solved together is the same for any number of processes of one size."""
    whole = 1 << (min(batch, *sizes).bit_length() - 1)
    runs = [list(run) for _, run in groupby(numbers, lambda number: number // whole)]
    at = 0
    while at < len(runs):
        group = []
        for place, size in enumerate(sizes):
            fair = -(-(len(runs) - at) // (len(sizes) - place))
            mine = runs[at : at + min(size // whole, fair)]
            at += len(mine)
            if mine:
                group.append([number for run in mine for number in run])
        yield group


# Order in which a process reads experts: what its reader needs to read ahead.


@dataclass(eq=False)
class ExpertReadOrder:
    """Has `reader` read ahead, up to `room` bytes. Which experts a process has is taken from the layer
    before: it changes only where groups do, which depend on which experts see every token. `stop` is
    the end of the layers."""

    matrices: Mapping[int, Mapping[tuple[int, str], Projection]]
    reader: Weights
    room: int
    stop: int
    _experts: list[int] = field(default_factory=list)

    def set_experts(self, layer: int, experts: Sequence[int]) -> None:
        """From this layer on it is these experts, in this order."""
        if list(experts) != self._experts:
            self._experts = list(experts)
            self.reader.expect(self._order(range(layer, self.stop), self._experts), self.room)

    def _order(self, layers: range, experts: Sequence[int]) -> Iterator[tuple[str, Stored]]:
        for layer in layers:
            found = self.matrices.get(layer, {})
            for expert in experts if found else ():
                for kind in PROJECTIONS:
                    one = found[expert, kind]
                    yield one.module, one.weight
