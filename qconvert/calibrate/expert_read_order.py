"""Order in which a process reads experts: what its reader needs to read ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from qconvert.calibrate.reading import Weights
from qconvert.formats.base import Stored
from qconvert.models.experts import PROJECTIONS, Projection


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

    def settle(self, layer: int, experts: Sequence[int]) -> None:
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
