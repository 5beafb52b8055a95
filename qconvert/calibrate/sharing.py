"""The experts of a layer, solved by several processes: each its part, all with what the others found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.calibrate.exchanged import expert_of, get, known_of, note, put
from qconvert.calibrate.experts import Bench, Found, Seen
from qconvert.calibrate.memory import trim
from qconvert.calibrate.model import Layer
from qconvert.calibrate.settings import Matrix
from qconvert.calibrate.taken import Stream, Taken
from qconvert.core.shown import count
from qconvert.matrices.experts import PROJECTIONS, Projection
from qconvert.run.backend import Phase

if TYPE_CHECKING:
    from qconvert.calibrate.layers import Layers

Solving = Callable[[Sequence[Sequence[int]], Sequence[Taken]], Iterator[Matrix]]


@dataclass(frozen=True, eq=False)
class Sharing:
    """A layer in the hands of one of several processes. `solving` solves a group of experts, and leaves
    them in what was taken."""

    layers: Layers
    layer: Layer
    benches: Sequence[Bench]
    matrices: Mapping[tuple[int, str], Projection]
    every: frozenset[int]
    found: Found
    solving: Solving

    def run(self, streams: Sequence[Stream]) -> Iterator[Phase | Matrix]:
        """Solve this process's experts, wait for the others', and let all answer. Matrices are yielded
        by a run that writes them, which a shard does not."""
        exchange, layers, number = self.layers.exchange, self.layers, self.layer.number
        assert exchange is not None
        here: set[int] = set()
        where = f"calibrating layer {number} of {layers.model.layers}"
        seen = streams[0].seen
        yield from self._solve(exchange.mine(number, layers.experts), seen, where, here)
        others = exchange.others(number, layers.experts)
        while True:
            with layers.clock("wait", "cpu"):
                found = next(others, None)
            if found is None:
                break
            text, lost = found
            if not lost:
                yield Phase(f"{where}: {text}")
            yield from self._solve(lost, seen, f"{where} {text}".rstrip(), here)
        yield from self._answer(streams, where, here)

    def _solve(
        self, numbers: Sequence[int], seen: Seen, where: str, here: set[int]
    ) -> Iterator[Phase]:
        exchange, layers, layer = self.layers.exchange, self.layers, self.layer.number
        assert exchange is not None
        for whole in layers.groups(self.layer, self.matrices, self.every, seen, numbers):
            # Others may have solved some of them since.
            group = [[e for e in mine if not exchange.has(layer, e)] for mine in whole]
            if not (todo := sum(map(len, group))):
                continue
            yield Phase(f"{where}: {count(todo, 'expert')} of {layers.experts}")
            taken = [Taken() for _ in group]
            made: dict[int | None, list[Matrix]] = {}
            for matrix in self.solving(group, taken):
                made.setdefault(matrix.expert, []).append(matrix)
            for expert in (one for held in taken for one in held.experts):
                known = known_of(expert, made.pop(expert.number), self.found)
                put(exchange, layer, expert.number, known)
                here.add(expert.number)
            del taken
            trim()

    def _answer(
        self, streams: Sequence[Stream], where: str, here: set[int]
    ) -> Iterator[Phase | Matrix]:
        exchange, layers, layer = self.layers.exchange, self.layers, self.layer.number
        assert exchange is not None
        sides = {
            kind: (self.matrices[0, kind].weight.rows, self.matrices[0, kind].weight.columns)
            for kind in PROJECTIONS
        }
        seen = streams[0].seen
        for group in layers.groups(self.layer, self.matrices, self.every, seen):
            yield Phase(f"{where}: answers of experts {group[0][0]} to {group[-1][-1]}")
            taken = [Taken() for _ in group]
            for bench, mine, held in zip(self.benches, group, taken, strict=False):
                if len(streams) > 1:
                    held.plain.extend(bench.take(mine, self.matrices, self.every))
                for number in mine:
                    known = get(exchange, layer, number, sides, layers.targets)
                    every = number in self.every
                    held.experts.append(expert_of(known, layers.targets, bench.device, every=every))
                    if number not in here:
                        note(known, self.found)
                    if exchange.shard is None:
                        yield from known.matrices
            layers.answer(self.benches, taken, streams)
            del taken
            trim()
