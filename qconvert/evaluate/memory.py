"""Memory of an evaluation, of two models: the user's --memory, and what the larger of two stages
takes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from qconvert.calibrate.memory import resident
from qconvert.core.errors import RunError

_MACHINE = 0.75  # of the machine's memory, where the user gives no number
_SLACK = 160 << 20  # what libraries take once they compute: threads, kernels, free lists
_DEVICE = 0.5  # of an accelerator's memory, for experts
# Rows of the head, and tokens, whose logits are in memory at a time: 8 MiB in float64 each.
SLICE, CHUNK = 2048, 512


@dataclass(frozen=True, slots=True)
class Sizes:
    """Memory of a side, of the larger one of both. Bytes: `layer` without routed experts, its largest
    `parameter`. Numbers: `hidden` and `middle` sizes of an expert (`middle` 0: a dense model), `widest`
    output of a linear layer, tokens of the `longest` sample."""

    layer: int
    parameter: int
    hidden: int
    middle: int
    widest: int
    longest: int

    @property
    def expert(self) -> int:
        """One expert in BF16."""
        return 3 * self.hidden * self.middle * 2

    @property
    def one_layer(self) -> int:
        """A layer at work without its experts: weights, one of them being decoded, a sample's tokens."""
        passing = self.longest * (
            24 * self.hidden + 12 * (self.hidden + self.middle) + 12 * self.widest
        )
        # gate and up are put together, and a matrix is decoded through float32.
        decoding = max(4 * self.parameter, 14 * self.hidden * self.middle)
        return self.layer + decoding + passing + 8 * self.longest * self.longest

    def head(self, tokens: int) -> int:
        """Logits of a slice of both models, for hidden states of so many tokens."""
        slices = 2 * SLICE * self.hidden * (2 + 4)
        return slices + 8 * CHUNK * SLICE * 10 + 2 * tokens * self.hidden * 4


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes: `memory` for the whole process, `base` what it took before."""

    memory: int
    base: int
    sizes: Sizes

    @classmethod
    def of(cls, memory: int | None, sizes: Sizes) -> Budget:
        """Raises RunError where a layer with one expert does not fit, or a slice of the logits, with the
        smallest number that is enough."""
        base = resident() + _SLACK
        if memory is None:
            memory = int(_MACHINE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        work = max(sizes.one_layer + sizes.expert, sizes.head(CHUNK))
        if base + work > memory:
            need = ((base + work) >> 20) + 16
            raise RunError(
                f"one decoder layer with an expert, or a slice of the logits, needs {work >> 20} MiB, "
                f"and libraries {base >> 20} MiB, more than this run may take; give --memory {need}MiB"
            )
        return cls(memory, base, sizes)

    def experts(self, device: str) -> int:
        """Return how many experts are in memory together."""
        if not self.sizes.expert:
            return 0
        if device != "cpu":
            import torch

            total = torch.cuda.get_device_properties(device).total_memory
            return max(1, int(_DEVICE * total) // self.sizes.expert)
        return max(1, (self.memory - self.base - self.sizes.one_layer) // self.sizes.expert)

    def tokens(self) -> int:
        """Return how many tokens' hidden states are in memory while the head is read once."""
        left = self.memory - self.base - self.sizes.head(0)
        return max(CHUNK, left // (2 * self.sizes.hidden * 4) // CHUNK * CHUNK)
