"""Weights of a checkpoint by the names of the model's parameters, each decoded when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from qconvert.calibrate.reading import Weights
from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.core.errors import UsageError
from qconvert.core.extras import require
from qconvert.core.graph import Output, Source
from qconvert.evaluate.side import plain_plan
from qconvert.formats.base import FolderTensors
from qconvert.formats.registry import label
from qconvert.plan.plan import Plan
from qconvert.run.in_memory import tensor_of
from qconvert.service.reading import checkpoint_of

Library = Literal["numpy", "torch"]


@dataclass(frozen=True)
class StoredWeight:
    """A parameter of a model: its `shape`, `dtype` as it is once decoded, the `tensors` of the
    checkpoint that hold it, and how these are `stored` ("INT4 g128 (packed)", "F8_E4M3", "BF16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    tensors: tuple[str, ...]
    stored: str
    _output: Output
    _weights: Weights

    def dequantize(self, library: Library = "numpy") -> Any:
        """The weight as numbers: an array of numpy, where BF16 becomes float32 (numpy has no such
        dtype), or a tensor of torch in its `dtype`. Read and decoded now, whole.

        Raises UsageError for another library, RunError for data that cannot be right and for a dtype
        that numpy lacks, PlanError where torch is missing."""
        if library not in ("numpy", "torch"):
            raise UsageError(f"expected numpy or torch, found {library!r}")
        if library == "torch":
            require("calibrate", "weights are to be tensors of torch", "torch")
            import_module("torch")
        data, kind = self._weights.data(self._output), self._output.type
        if library == "torch" or kind.dtype != "BF16":
            return tensor_of(data, kind, torch=library == "torch")
        import numpy as np

        wide = np.frombuffer(data, "<u2").astype("<u4") << 16  # BF16 is float32's upper half
        return wide.view("<f4").reshape(kind.shape)


class OpenedWeights(Mapping[str, StoredWeight]):
    """Parameters of a model by name, in the order of the checkpoint. Files stay open until `close`,
    which the end of a `with` calls."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        stored = Plan.identity(checkpoint)
        self._plan = plain_plan(stored)
        self._weights = Weights(self._plan)
        self._folder = FolderTensors.of(checkpoint)

    def __getitem__(self, name: str) -> StoredWeight:
        output = self._plan.tensors[name]
        tensors = tuple(dict.fromkeys(_sources(output)))
        first = self.checkpoint[tensors[0]]
        shown = label(self._folder, first.name, first.type.dtype)
        kind = output.type
        return StoredWeight(name, kind.shape, kind.dtype, tensors, shown, output, self._weights)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.tensors)

    def __len__(self) -> int:
        return len(self._plan.tensors)

    def close(self) -> None:
        self._weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _sources(output: Output) -> Iterator[str]:
    """Names of the tensors that an output is made of, in the order of their use."""
    for piece in output.pieces:
        if isinstance(piece.origin, Source):
            yield piece.origin.name
        else:
            for argument in piece.origin.node.args:
                yield from _sources(argument)


def open_weights(source: str | Path | Checkpoint, *, follow_links: bool = False) -> OpenedWeights:
    """Open a checkpoint's weights by the names that the model's parameters have, in whatever form they
    are stored; of a repo on the Hub, or a store, ranges are read. `qconvert.open` is the same.

        >>> with api.open_weights(sample) as weights:
        ...     norm = weights["model.norm.weight"]
        ...     norm.stored, norm.shape, norm.dequantize().dtype.name
        ('BF16', (256,), 'float32')

    Raises CheckpointError for what is no checkpoint, PlanError for weights in a form that is not read.
    """
    return OpenedWeights(checkpoint_of(source, follow_links=follow_links))
