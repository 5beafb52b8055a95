"""Largest keys and values of a layer, as its attention caches them: keys after rotary embedding.

Classes of transformers hand both to `past_key_values.update` there, so a layer is called with a cache
that notes how large they are and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

from qconvert.calibrate.settings import Matrix
from qconvert.core.errors import RunError
from qconvert.core.int_scheme import Codes
from qconvert.layouts.derived.running import Call

if TYPE_CHECKING:
    import torch

_CACHE = "past_key_values"
Maxima = tuple[int, float, float]  # calls, the largest key and value


@dataclass(eq=False)
class CacheMaxima:
    """A cache that a layer is called with, a batch after another; `module` is its attention."""

    module: str
    calls: int = 0
    largest: list[torch.Tensor] = field(default_factory=list)

    def watched(self, call: Call) -> Call:
        """Return a call of the layer with this cache. Raises RunError where it has no place for one."""
        if _CACHE not in call.named:
            raise RunError(f"{self.module}: its layer is called without {_CACHE}{_INSTEAD}")
        return replace(call, named={**call.named, _CACHE: self})

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, heads, T, D] as they are, once they are looked at."""
        import torch

        both = [keys.abs().amax().float(), values.abs().amax().float()]
        self.largest = [*map(torch.maximum, self.largest or both, both)]
        self.calls += 1
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        return 0

    @property
    def found(self) -> Maxima:
        """Return what this process saw."""
        keys, values = (float(one) for one in self.largest or (0.0, 0.0))
        return self.calls, keys, values


def joined_maxima(layer: int, module: str, found: Sequence[Maxima]) -> Matrix:
    """The largest of all processes, as the scales [2, 1] of a matrix. Raises RunError where nothing was
    seen, or no number."""
    import numpy as np

    calls, *largest = (max(each) for each in zip(*found, strict=True))
    if not calls or not all(one < inf for one in largest):
        why = f"keys and values are not kept in {_CACHE}" if not calls else "they are not finite"
        raise RunError(f"{module}: {why}{_INSTEAD}")
    scale = np.array(largest, np.float32)[:, None]
    return Matrix(layer, None, module, [Codes(np.zeros((2, 1), np.int8), scale)], [])


_INSTEAD = ", so no scale of them can be found: give --kv-scale a number"
