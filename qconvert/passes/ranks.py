"""At which tensor-parallel sizes each rank gets whole blocks of quantized matrices.

What runtimes compute as one matrix has one grid of scales, in which each part begins where its first row
lies. A part that is no whole blocks puts all behind it out of step: sglang refuses such a matrix
at one rank, too, and vLLM loads it with the scales of other blocks, without a word
(`layers/linear.py`, adjust_block_scale_shard)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from qconvert.core.errors import PlanError
from qconvert.core.roles import Cut, Kind, joined_with
from qconvert.core.versions import SGLANG, VLLM
from qconvert.passes.selection import Sized

TP_SIZES = (1, 2, 4, 8, 16)
Grid = tuple[
    int, int
]  # rows and columns that share a scale or a word; of these a rank gets whole ones


def _is_cut(matrix: Sized, grid: Grid, tp: int) -> bool:
    """Return whether each of `tp` ranks would not get whole blocks of a matrix, or of its part of a
    fused one."""
    _, kind, rows, columns = matrix
    high, wide = grid
    if kind.cut is Cut.COLUMNS:
        return tp > 1 and columns % (tp * wide) != 0
    joined = joined_with(kind)
    # Of what all ranks have whole, the last part may end within a block.
    parted = len(joined) > 1 and (kind.cut is Cut.ROWS or kind is not joined[-1])
    ranks = tp if kind.cut is Cut.ROWS else 1
    if kind is Kind.GATE_UP:
        return rows % (2 * ranks * high) != 0
    return (parted or ranks > 1) and rows % (ranks * high) != 0


def loads_at(matrices: Collection[Sized], grid: Grid, sizes: Iterable[int] = TP_SIZES) -> list[int]:
    """The tensor-parallel sizes, of the usual ones by default, at which it does."""
    return [tp for tp in sizes if not any(_is_cut(one, grid, tp) for one in matrices)]


_NO_BLOCKS = "a scale a row has no blocks: --channel"


def check_tp(matrices: Collection[Sized], grid: Grid, tp: int | None) -> None:
    """Raises PlanError where a rank would cut a block, naming the matrix."""
    for matrix in matrices if tp is not None else ():
        if tp is not None and _is_cut(matrix, grid, tp):
            module, _, rows, columns = matrix
            size = "" if grid == (1, 1) else f" ({grid[0]} x {grid[1]})"
            held = loads_at(matrices, grid)
            rows_alone = "" if grid[0] == 1 else f"; {_NO_BLOCKS}"
            raise PlanError(
                f"{module}: at tensor parallel {tp} a rank would not get whole blocks{size} of "
                f"[{rows}, {columns}]; ranks do at {listed(held)}{rows_alone}"
            )


def listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes)) or "none of the usual sizes"


def loads_note(sizes: Iterable[int], what: str = "blocks", grid: Grid | None = None) -> str:
    """The same for people; of scales a row there are no blocks. Whether a runtime loads the folder, its
    simulator says."""
    found, what = list(sizes), "rows" if grid == (1, 1) else what
    if not found:
        return f"ranks get whole {what} at none of the usual tensor-parallel sizes"
    return f"ranks get whole {what} at tensor parallel {listed(found)}"


def cut_notes(matrices: Iterable[Sized], grid: Grid) -> list[str]:
    """Return what happens to a part of a fused matrix that is no whole blocks, even at one rank."""
    cut = [one for one in matrices if _is_cut(one, grid, 1)]
    if not cut:
        return []
    module, kind, rows, _ = cut[0]
    said = f"{module} has {rows} rows, no whole blocks of {grid[0]}, and runtimes fuse it"
    mended = _NO_BLOCKS
    if kind.routed:
        return [f"{said}: {SGLANG} refuses it ({mended})"]
    return [f"{said}: {SGLANG} refuses it, {VLLM} gives rows another block's scale ({mended})"]


def check_size(tp: int | None) -> None:
    """Raises PlanError for what is no tensor-parallel size."""
    if tp is not None and tp < 1:
        raise PlanError(f"expected a tensor parallel size of 1 or more, found {tp}")
