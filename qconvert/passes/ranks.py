"""At which tensor-parallel sizes each rank gets whole blocks of quantized matrices."""

from __future__ import annotations

from collections.abc import Iterable

from qconvert.core.errors import PlanError
from qconvert.core.roles import Cut
from qconvert.formats.int_packed.limits import TP_SIZES, Matrix
from qconvert.passes.replace_weights import Selection

Block = tuple[int, int]  # rows and columns that share a scale; of these a rank gets whole ones


def _cut(matrices: Iterable[Matrix], block: Block, tp: int) -> list[Matrix]:
    """The matrices of which each of `tp` ranks would not get whole blocks."""
    found = []
    for matrix in matrices:
        high, wide = block
        if matrix.cut is Cut.COLUMNS and matrix.columns % (tp * wide if tp > 1 else 1):
            found.append(matrix)
        if matrix.cut is Cut.ROWS and matrix.rows % (tp * high if tp > 1 else 1):
            found.append(matrix)
    return found


def loads_at(chosen: Selection, block: Block) -> list[int]:
    """The usual tensor-parallel sizes at which it does."""
    matrices = chosen.sizes
    return [tp for tp in TP_SIZES if not _cut(matrices, block, tp)]


def check_tp(chosen: Selection, block: Block, tp: int | None) -> None:
    """Raises PlanError where a rank would cut a block, naming the matrix."""
    for matrix in _cut(chosen.sizes, block, tp) if tp is not None else ():
        sizes = loads_at(chosen, block)
        raise PlanError(
            f"{matrix.module}: at tensor parallel {tp} a rank would not get whole blocks of "
            f"[{matrix.rows}, {matrix.columns}]; it loads at "
            + (", ".join(map(str, sizes)) or "none of the usual sizes")
        )


def loads_note(sizes: Iterable[int]) -> str:
    """The same for people."""
    return f"loads at tensor parallel {', '.join(map(str, sizes)) or 'none of the usual sizes'}"


def check_size(tp: int | None) -> None:
    """Raises PlanError for what is no tensor-parallel size."""
    if tp is not None and tp < 1:
        raise PlanError(f"expected a tensor parallel size of 1 or more, found {tp}")
