"""Choice of one option a group at the least cost, under a budget of bytes: the multiple-choice knapsack.

A Lagrange multiplier, a price of a byte, gives a bound and a first choice (Sinha and Zoltners, "The
multiple-choice knapsack problem", 1979). A dynamic programme over the options that the bound leaves then
finds the optimum: of two partial choices the one with more bytes and no less cost is dropped, and any
that cannot come below the best choice so far (Pisinger, "A minimal algorithm for the multiple-choice
knapsack problem", 1995).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from qconvert.core.errors import PlanError

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[tuple[int, ...], np.dtype[Any]]

MOST_STATES = 200_000  # partial choices kept of a group; 376 groups of them take 0.9 GiB
_ROUNDING = 1e-12  # of a cost, by which sums in another order may differ


@dataclass(frozen=True, slots=True)
class Option:
    """Bytes that a group takes in a format, and what that costs: KL in nats a token, or any number that
    adds up."""

    nbytes: int
    cost: float


@dataclass(frozen=True, slots=True)
class Solution:
    """The number of each group's option; bytes and cost of all; and `bound`, which no choice within the
    budget comes below: equal to `cost` where the choice is proved to be the best."""

    chosen: tuple[int, ...]
    nbytes: int
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """The most that another choice may save, as a part of this one's cost."""
        return (self.cost - self.bound) / self.cost if self.cost > 0 else 0.0


def solve(groups: Sequence[Sequence[Option]], budget: int, most: int = MOST_STATES) -> Solution:
    """The choice of least cost within `budget` bytes, of equal ones that with the fewest bytes. `most`
    is how many partial choices are kept of a group: where there are more, those of the least bound, and
    the result's `bound` says what that may have missed.

    Raises PlanError where the smallest option of every group is too much together."""
    least = sum(min(one.nbytes for one in options) for options in groups)
    if least > budget:
        raise PlanError(
            f"budget: expected at least {least} bytes for all matrices that can be quantized, which "
            f"their smallest formats take, found {budget}; give more"
        )
    kept = [_undominated(options) for options in groups]
    price = _price(groups, kept, budget)
    first = _repaired(groups, kept, _at(groups, kept, price), budget)
    return _best(groups, kept, budget, price, first, most)


def _undominated(options: Sequence[Option]) -> list[int]:
    """Numbers of the options that no other has in fewer or as many bytes at no more cost, by bytes."""
    order = sorted(range(len(options)), key=lambda n: (options[n].nbytes, options[n].cost, n))
    found: list[int] = []
    for number in order:
        if not found or options[number].cost < options[found[-1]].cost:
            found.append(number)
    return found


def _at(groups: Sequence[Sequence[Option]], kept: Sequence[list[int]], price: float) -> list[int]:
    """The option of each group that is the cheapest at a price of a byte, of equal ones the smallest."""
    return [
        min(some, key=lambda n: (options[n].cost + price * options[n].nbytes, options[n].nbytes))
        for options, some in zip(groups, kept, strict=True)
    ]


def _bytes(groups: Sequence[Sequence[Option]], chosen: Sequence[int]) -> int:
    return sum(options[n].nbytes for options, n in zip(groups, chosen, strict=True))


def _price(groups: Sequence[Sequence[Option]], kept: Sequence[list[int]], budget: int) -> float:
    """The price of a byte at which the bound is greatest, between those at which the cheapest options
    take too much and fit."""
    if _bytes(groups, _at(groups, kept, 0.0)) <= budget:
        return 0.0
    slopes = [
        (options[a].cost - options[b].cost) / (options[b].nbytes - options[a].nbytes)
        for options, some in zip(groups, kept, strict=True)
        for a, b in pairwise(some)
    ]
    low, high = 0.0, max(2 * max(slopes), sys.float_info.min)
    while _bytes(groups, _at(groups, kept, high)) > budget:  # where a sum rounds a difference away
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if _bytes(groups, _at(groups, kept, middle)) <= budget:
            high = middle
        else:
            low = middle
    return high


def _repaired(
    groups: Sequence[Sequence[Option]], kept: Sequence[list[int]], chosen: list[int], budget: int
) -> list[int]:
    """A choice within the budget: this one, with the steps that save most cost a byte while they fit."""
    found = list(chosen)
    left = budget - _bytes(groups, found)
    assert left >= 0
    while True:
        steps = [
            (
                (options[now].cost - options[n].cost) / (options[n].nbytes - options[now].nbytes),
                g,
                n,
            )
            for g, (options, some, now) in enumerate(zip(groups, kept, found, strict=True))
            for n in some
            if 0 < options[n].nbytes - options[now].nbytes <= left
            and options[n].cost < options[now].cost
        ]
        if not steps:
            return found
        _, group, number = max(steps, key=lambda step: (step[0], -step[1]))
        left -= groups[group][number].nbytes - groups[group][found[group]].nbytes
        found[group] = number


@dataclass(frozen=True, slots=True)
class _Stage:
    """Partial choices up to a group: bytes int64 and cost float64 [S], by bytes; of each the one of the
    group before that it comes from, and the option that it takes, int32 [S]."""

    nbytes: Numbers
    cost: Numbers
    parent: Numbers
    option: Numbers


def _best(
    groups: Sequence[Sequence[Option]],
    kept: Sequence[list[int]],
    budget: int,
    price: float,
    first: list[int],
    most: int,
) -> Solution:
    import numpy as np

    reduced = [
        min(options[n].cost + price * options[n].nbytes for n in some)
        for options, some in zip(groups, kept, strict=True)
    ]
    smallest = [options[some[0]].nbytes for options, some in zip(groups, kept, strict=True)]
    best = sum(options[n].cost for options, n in zip(groups, first, strict=True))
    best_bytes = _bytes(groups, first)
    # The groups that differ most first: what they decide leaves the fewest partial choices.
    order = sorted(range(len(groups)), key=lambda g: -groups[g][kept[g][-1]].nbytes)
    rest = sum(reduced)
    rest_bytes = sum(smallest)
    missed = np.inf
    stages = [_Stage(*(np.zeros(1, kind) for kind in (np.int64, np.float64, np.int32, np.int32)))]
    for group in order:
        rest -= reduced[group]
        rest_bytes -= smallest[group]
        stage, missed_here = _grown(
            stages[-1], [(n, groups[group][n]) for n in kept[group]], budget - rest_bytes,
            price, rest - price * budget, best + _slack(best), most,
        )  # fmt: skip
        missed = min(missed, missed_here)
        stages.append(stage)
    last = stages[-1]
    chosen = list(first)
    if last.cost.size:
        place = int(np.lexsort((last.nbytes, last.cost))[0])
        cost, nbytes = float(last.cost[place]), int(last.nbytes[place])
        if (cost, nbytes) < (best - _slack(best), 0) or (
            cost <= best + _slack(best) and nbytes < best_bytes
        ):
            for group, stage in zip(reversed(order), reversed(stages), strict=False):
                chosen[group] = int(stage.option[place])
                place = int(stage.parent[place])
    total = sum(options[n].cost for options, n in zip(groups, chosen, strict=True))
    return Solution(tuple(chosen), _bytes(groups, chosen), total, min(total, float(missed)))


def _slack(cost: float) -> float:
    return _ROUNDING * max(1.0, abs(cost))


def _grown(
    stage: _Stage,
    options: Sequence[tuple[int, Option]],
    room: int,
    price: float,
    rest: float,
    best: float,
    most: int,
) -> tuple[_Stage, float]:
    """Partial choices with one group more, of at most `room` bytes, that may come to no more than
    `best`: a partial choice comes to its cost, its bytes at the price, and `rest`, or more. Returns
    them, and the least bound of those that were left out because there are too many."""
    import numpy as np

    nbytes = np.concatenate([stage.nbytes + one.nbytes for _, one in options])
    cost = np.concatenate([stage.cost + one.cost for _, one in options])
    count = stage.nbytes.size
    parent = np.tile(np.arange(count, dtype=np.int32), len(options))
    option = np.repeat(np.array([n for n, _ in options], np.int32), count)
    bound = cost + price * nbytes + rest
    fits = np.flatnonzero((nbytes <= room) & (bound <= best))
    missed = np.inf
    order = fits[np.lexsort((cost[fits], nbytes[fits]))]
    if order.size:
        # Of those with fewer bytes the least cost so far: what is not below it is dropped.
        least = np.minimum.accumulate(cost[order])
        order = order[np.concatenate([[True], cost[order][1:] < least[:-1]])]
    if order.size > most:
        ranked = np.argsort(bound[order], kind="stable")
        missed = float(bound[order[ranked[most]]])
        order = order[np.sort(ranked[:most])]
    return _Stage(nbytes[order], cost[order], parent[order], option[order]), missed
