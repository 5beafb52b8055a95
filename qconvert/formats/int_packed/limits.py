"""Group sizes that hold a model's matrices, and at which tensor-parallel sizes they load, as sglang
0.5.23 and vLLM 0.33 cut them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from qconvert.core.int_scheme import IntScheme
from qconvert.core.roles import Cut

TP_SIZES = (1, 2, 4, 8, 16)
_GROUPS = (128, 32)  # what all kernels take (sglang's Triton WNA16 no other)
# A scale a row is on every rank; what a rank has of a row fits kernels in multiples of this.
_CHANNEL_STEP = 64


@dataclass(frozen=True, slots=True)
class Matrix:
    """A quantized matrix [rows, columns] by its module's name, and how tensor parallelism cuts it."""

    module: str
    rows: int
    columns: int
    cut: Cut


def loads_at(matrices: Iterable[Matrix], scheme: IntScheme, tp: int, words: bool = False) -> bool:
    """Return whether each of `tp` ranks gets whole groups of every matrix, and whole words of zero
    points where the format packs those along rows: `words`, or asymmetric."""
    for matrix in matrices:
        if matrix.cut is Cut.COLUMNS:
            step = _CHANNEL_STEP if scheme.group is None else scheme.group
            if tp > 1 and matrix.columns % (tp * step):
                return False
        elif matrix.cut is Cut.ROWS:
            step = scheme.word if tp > 1 and (words or not scheme.symmetric) else 1
            if matrix.rows % (tp * step):
                return False
    return True


def fitting_groups(
    matrices: Iterable[Matrix], scheme: IntScheme, tp: int, words: bool = False
) -> list[int]:
    """Group sizes that hold every matrix whole and load at `tp`, largest first."""
    known = list(matrices)
    return [
        group
        for group in _GROUPS
        if all(matrix.columns % group == 0 for matrix in known)
        and loads_at(known, replace(scheme, group=group), tp, words)
    ]
