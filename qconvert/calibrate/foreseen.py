"""Which experts each device will read, and in what order: what its reader needs to read ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from qconvert.calibrate.ahead import THREADS
from qconvert.calibrate.reading import Weights
from qconvert.matrices.experts import PROJECTIONS, Projection
from qconvert.matrices.stored import Stored


@dataclass(eq=False)
class Foreseen:
    """Has `readers`, one for each device, read ahead, each up to `room` bytes. Which experts a device
    has is taken from the layer before: it changes only where groups do, which depend on how many
    tokens experts get. `stop` is the end of the layers."""

    matrices: Mapping[int, Mapping[tuple[int, str], Projection]]
    readers: Sequence[Weights]
    room: int
    stop: int
    _division: list[list[int]] = field(default_factory=list)

    def settle(self, layer: int, groups: Sequence[Sequence[Sequence[int]]]) -> None:
        """From this layer on devices have these experts, in this order."""
        division: list[list[int]] = [[] for _ in self.readers]
        for group in groups:
            for place, mine in enumerate(group):
                division[place] += mine
        if division == self._division:
            return
        self._division = division
        # All of them wait for Python's lock, as those do that launch kernels.
        threads = max(2, THREADS // len(self.readers))
        for reader, mine in zip(self.readers, division, strict=True):
            reader.expect(self._order(range(layer, self.stop), mine), self.room, threads)

    def _order(self, layers: range, experts: Sequence[int]) -> Iterator[tuple[str, Stored]]:
        for layer in layers:
            found = self.matrices.get(layer, {})
            for expert in experts if found else ():
                for kind in PROJECTIONS:
                    one = found[expert, kind]
                    yield one.module, one.weight
