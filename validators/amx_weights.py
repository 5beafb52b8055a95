"""Experts for KTransformers' CPU kernels: the weights they give must be the source's, rounded.

QC042 a weight is further from the source's than the format's rounding can bring it.

Up to four experts of each layer are looked at, evenly spread, all their matrices and NUMA shards
whole. What is judged is rounding, so every element has to fit; which codes are best is not asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.run.reader import Reader
from qconvert.validation import Finding, Folder, Need
from qconvert.validators._amx import (
    KINDS,
    Block,
    Kind,
    matching_source,
    shard_name,
    shard_weights,
    sound_block,
    source_weights,
)

if TYPE_CHECKING:
    from qconvert.validators._amx import Floats

_SAMPLE = 4
_LARGEST = {"int4": 7, "int8": 127}
# Half a step where codes are rounded once. kt-kernel's int4 rounds to sixteenths of a step first, and
# what that made a half of is rounded up.
_BOUND = {("int4", "peer"): 8.5 / 16}
# In steps: multiplying by the inverse of a step and back is exact to some 2^-22 of the largest code.
_SLACK = 2.0**-12
# Rows so small that their step would be denormal become zeros: they are at most 127 * 2^-126.
_FLUSHED = 2.0**-119


@dataclass(frozen=True)
class AmxWeights:
    """A sample of matrices, as the consumer computes them, against the source decoded to BF16."""

    name: str = "amx_weights"
    proves: str = (
        f"the weights are the source's within the format's rounding (a sample: up to {_SAMPLE} "
        "experts of each layer)"
    )
    needs: frozenset[Need] = frozenset({"amx", "data", "source"})

    def __call__(self, folder: Folder) -> Iterator[Finding]:
        assert folder.source is not None
        block = sound_block(folder.checkpoint)
        sources = matching_source(block, folder)
        ours, theirs = Reader(folder.checkpoint.shards), Reader(folder.source.shards)
        try:
            for layer in block.layers:
                for expert in sampled(block.experts):
                    for kind in KINDS:
                        expected = source_weights(theirs, sources[layer, kind, expert])
                        finding = _compare(block, folder, ours, (layer, kind, expert), expected)
                        if finding is not None:
                            yield finding
        finally:
            ours.close()
            theirs.close()


def sampled(experts: int) -> list[int]:
    """Up to four experts, evenly spread, the first and the last among them."""
    count = min(_SAMPLE, experts)
    return sorted({i * (experts - 1) // max(1, count - 1) for i in range(count)})


def _compare(
    block: Block, folder: Folder, reader: Reader, matrix: tuple[int, Kind, int], expected: Floats
) -> Finding | None:
    """The first weight of a matrix that does not fit, None where all do."""
    layer, kind, expert = matrix
    rows, columns = block.shard_shape(kind)
    for shard in range(block.numa):
        base = shard_name(layer, kind, expert, shard)
        found, step = shard_weights(block, folder.checkpoint, reader, base, kind)
        top, left = (0, shard * columns) if kind == "down" else (shard * rows, 0)
        wanted = expected[top : top + rows, left : left + columns]
        at = _misfit(block, wanted, found, step)
        if at is not None:
            row, column = at
            return Finding(
                "QC042", "error", f"{base}.weight",
                f"expert {expert}, row {top + row}, column {left + column}: expected "
                f"{wanted[at]:g}, as in the source, within the rounding of a step of "
                f"{step[row]:g}; found {found[at]:g}",
            )  # fmt: skip
    return None


def _misfit(block: Block, expected: Floats, found: Floats, step: Floats) -> tuple[int, int] | None:
    """Row and column of the first weight that is too far off. Where steps are searched for, the
    largest code stands for all that lies beyond it too."""
    import numpy as np

    bound = _BOUND.get((block.method, block.rounding), 0.5)
    with np.errstate(all="ignore"):
        size = step[:, None]
        fits = np.abs(expected - found) <= (bound + _SLACK) * size + _FLUSHED
        if block.rounding == "search":
            beyond = (_LARGEST[block.method] - 0.5) * size
            outward = expected * np.sign(found) >= beyond - _SLACK * size
            fits |= (np.abs(found) > beyond) & outward
    if fits.all():
        return None
    row, column = divmod(int(np.argmin(fits)), expected.shape[1])
    return row, column


VALIDATOR = AmxWeights()
