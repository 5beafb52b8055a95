"""The experts of a layer, solved by several shards: each its part, all with what the others found.

A shard may be a team of processes, which all do the same: what a file or a clock decides, the first one
decides for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.calibrate.exchanged import expert_of, get, known_of, note, put
from qconvert.calibrate.experts import Bench, Found
from qconvert.calibrate.memory import trim
from qconvert.calibrate.settings import Matrix, Shared
from qconvert.calibrate.taken import Stream, Taken
from qconvert.calibrate.team import decided
from qconvert.core.shown import count
from qconvert.matrices.experts import PROJECTIONS, Projection
from qconvert.run.backend import Phase
from qconvert.run.exchange import Exchange, OutOfTime

if TYPE_CHECKING:
    from qconvert.calibrate.layers import Layers

Solving = Callable[[Sequence[int], Taken], Iterator[Matrix]]


@dataclass(frozen=True, eq=False)
class Sharing:
    """A layer in the hands of one of several shards. `solving` solves some experts, and leaves them in
    what was taken."""

    layers: Layers
    exchange: Exchange
    bench: Bench
    matrices: Mapping[tuple[int, str], Projection]
    every: frozenset[int]
    found: Found
    solving: Solving

    def run(self, streams: Sequence[Stream]) -> Iterator[Phase | Matrix | Shared]:
        """Solve this shard's experts, wait for the others', and let all answer. Matrices are yielded by
        a run that writes them, which a shard does not. Raises OutOfTime, in all processes of a team."""
        layers, number = self.layers, self.bench.layer.number
        here: set[int] = set()
        where = f"calibrating layer {number} of {layers.model.layers}"
        mine = decided(layers.team, self.exchange.mine(number, layers.experts, self._whole))
        yield from self._solve(mine, streams, where, here)
        for text, lost in self._others():
            if not lost:
                yield Phase(f"{where}: {text}")
            yield from self._solve(lost, streams, f"{where} {text}".rstrip(), here)
        yield from self._answer(streams, where, here)

    def _others(self) -> Iterator[tuple[str, list[int]]]:
        """As `exchange.others`, which the first process of a team asks for all."""
        layers = self.layers
        others = self.exchange.others(self.bench.layer.number, layers.experts, self._whole)

        def following() -> tuple[str, list[int]] | OutOfTime | None:
            try:
                return next(others, None)
            except OutOfTime as over:
                return over

        while True:
            with layers.clock("wait", "cpu"):
                # What this shard's processes put is there before the first one looks.
                layers.team.meet()
                found = decided(layers.team, None if layers.team.rank else following())
            if isinstance(found, OutOfTime):
                raise OutOfTime
            if found is None:
                return
            yield found

    def _solve(
        self, numbers: Sequence[int], streams: Sequence[Stream], where: str, here: set[int]
    ) -> Iterator[Phase | Shared]:
        """Solve experts, and put them where the others find them; all that this shard's processes solve
        are added to `here`."""
        layers, layer = self.layers, self.bench.layer
        batches = self._batches(numbers)
        for whole in layers.groups(layer, self.matrices, self.every, streams, batches):
            # Others may have solved some of them since.
            group = decided(layers.team, [self._left(mine) for mine in whole])
            if not (todo := sum(map(len, group))):
                continue
            yield Phase(f"{where}: {count(todo, 'expert')} of {layers.experts}")
            here.update(expert for part in group for expert in part)
            mine, taken = layers.mine(group), Taken()
            made: dict[int | None, list[Matrix]] = {}
            for matrix in self.solving(mine, taken) if mine else ():
                made.setdefault(matrix.expert, []).append(matrix)
            names: list[str] = []
            for expert in taken.experts:
                known = known_of(expert, made.pop(expert.number), self.found)
                if name := put(self.exchange, layer.number, expert.number, known):
                    names.append(name)
            yield Shared(tuple(names))
            del taken
            trim()

    @property
    def _whole(self) -> int:
        return self.layers.batch(self.matrices[0, "down_proj"].weight)

    @property
    def together(self) -> int:
        """Experts that are solved together, whoever solves them: of such a batch an accelerator finds
        other codes where there are fewer in it."""
        return self.exchange.together(self.layers.experts, self._whole)

    def _batches(self, numbers: Sequence[int]) -> list[int]:
        """All experts of the batches that these are of, in their order."""
        size, stop = self.together, self.layers.experts
        firsts = dict.fromkeys(number // size * size for number in numbers)
        return [one for first in firsts for one in range(first, min(first + size, stop))]

    def _left(self, numbers: Sequence[int]) -> list[int]:
        """Those of batches of which not all are there."""
        layer = self.bench.layer.number
        return self._batches([one for one in numbers if not self.exchange.has(layer, one)])

    def _answer(
        self, streams: Sequence[Stream], where: str, here: set[int]
    ) -> Iterator[Phase | Matrix]:
        layers, layer = self.layers, self.bench.layer
        sides = {
            kind: (self.matrices[0, kind].weight.rows, self.matrices[0, kind].weight.columns)
            for kind in PROJECTIONS
        }
        groups = layers.groups(layer, self.matrices, self.every, streams)
        for place, group in enumerate(groups):
            yield Phase(f"{where}: answers of experts {group[0][0]} to {group[-1][-1]}")
            mine, taken = layers.mine(group), Taken()
            if mine and len(streams) > 1:
                taken.plain.extend(self.bench.take(mine, self.matrices, self.every))
            for number in mine:
                known = get(self.exchange, layer.number, number, sides, layers.targets)
                every = number in self.every
                taken.experts.append(
                    expert_of(known, layers.targets, self.bench.device, every=every)
                )
                # What a process of this shard found is joined with what the others did.
                if number not in here:
                    note(known, self.found)
                if self.exchange.shard is None:
                    yield from known.matrices
            layers.answer(self.bench, group, taken, streams, self.matrices, first=place == 0)
            del taken
            trim()
