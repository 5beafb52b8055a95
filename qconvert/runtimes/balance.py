"""Pipeline stages cut so that the fullest one holds least. A runtime is told how many layers each stage
owns and nothing else (runtimes/pipeline.py, VARIABLE), so a cut is a list of counts; what lies beside
the layers stays where the runtime builds it: embeddings, head, draft, tower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of a model's layers, and of what each stage holds beside them."""

    layers: tuple[int, ...]
    beside: tuple[int, ...]

    def held(self, partition: Sequence[int]) -> tuple[int, ...]:
        """Bytes of each stage."""
        ends = list(accumulate(partition))
        starts = [0, *ends[:-1]]
        return tuple(
            more + sum(self.layers[start:end])
            for more, start, end in zip(self.beside, starts, ends, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition, and the bytes of each of its stages."""

    partition: tuple[int, ...]
    held: tuple[int, ...]

    @property
    def fullest(self) -> int:
        return max(self.held)


def balanced(weights: Weights) -> Cut:
    """The partition whose fullest stage holds least; among those, the one whose stages differ least (in
    the sum of their squares). Every stage owns a layer: there must be as many layers as stages."""
    starts = tuple(accumulate(weights.layers, initial=0))
    first = _best(weights, starts, max, None)
    cap = weights.held(first)
    partition = _best(weights, starts, lambda so_far, here: so_far + here * here, max(cap))
    return Cut(partition, weights.held(partition))


def _best(
    weights: Weights,
    starts: Sequence[int],
    joined: Callable[[int, int], int],
    cap: int | None,
) -> tuple[int, ...]:
    """The cut of least cost, by dynamic programming over how many layers the first stages own. `joined`
    adds a stage's bytes to the cost of those before it, and grows with both; no stage may hold more than
    `cap`."""
    layers, stages = len(weights.layers), len(weights.beside)
    costs: dict[int, int] = {0: 0}
    cuts: list[dict[int, int]] = []
    for number, beside in enumerate(weights.beside):
        now: dict[int, int] = {}
        came: dict[int, int] = {}
        ends = (
            (layers,) if number == stages - 1 else range(number + 1, layers - stages + number + 2)
        )
        for end in ends:
            for start in range(end - 1, number - 1, -1):
                here = beside + starts[end] - starts[start]
                past = cap is not None and here > cap
                if past or (end in now and joined(0, here) >= now[end]):
                    break  # what an earlier start would hold is more
                if start not in costs:
                    continue
                cost = joined(costs[start], here)
                if end not in now or cost < now[end]:
                    now[end], came[end] = cost, start
        costs = now
        cuts.append(came)
    sizes = list[int]()
    end = layers
    for came in reversed(cuts):
        sizes.append(end - came[end])
        end = came[end]
    return tuple(reversed(sizes))
