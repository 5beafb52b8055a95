"""The machine that a model is to be served on."""

from __future__ import annotations

from dataclasses import dataclass

from qconvert.core.errors import UsageError

# Of a GPU's memory for weights: sglang 0.5.23 takes 0.8 to 0.9 for weights and KV cache together
# (`--mem-fraction-static`), and a cache that holds nothing serves nobody.
FOR_WEIGHTS = 0.75
_H200 = 141_000_000_000


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs, the bytes of memory of each, the bytes of main memory (None: not said), bytes a second of
    the disk. By default eight H200 and 1 GB/s."""

    gpus: int = 8
    gpu_memory: int = _H200
    cpu_memory: int | None = None
    disk: int = 1_000_000_000
    capability: tuple[int, int] = (9, 0)

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise UsageError(f"expected at least one GPU, found {self.gpus}")

    @property
    def for_weights(self) -> int:
        """Bytes of weights that one GPU is to hold."""
        return int(self.gpu_memory * FOR_WEIGHTS)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tensor-parallel sizes to try, largest first: powers of two."""
        return tuple(1 << power for power in reversed(range(self.gpus.bit_length())))
