"""The one rule behind every fused projection.

Cut each segment (q, k, v, z; or b, a; or gate, up) into `groups` equal runs of rows. Fused, they lie
group by group: of each group, every segment's run in turn. One group is the contiguous order
`[q|k|v|z]` (sglang's Qwen3.5 parameter); as many groups as key heads is the interleaved order of
Qwen3-Next checkpoints; one group a rank is what a tensor-parallel rank holds. Wrong orders have the
same shape and load silently, which is why the order is always stated, never guessed. Which order a
runtime takes for a model class is decided in runtimes/consumers.py.

Sources: transformers `Qwen3NextGatedDeltaNet.fix_query_key_value_ordering`, sglang
`models/qwen3_5.py` (loader), vLLM `Qwen3NextGatedDeltaNet`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qconvert.core.errors import PlanError
from qconvert.core.graph import Output, concat


@dataclass(frozen=True, slots=True)
class RowOrder:
    """An order of rows. `segments` are the rows of each segment; `groups` divides every one."""

    segments: tuple[int, ...]
    groups: int

    def __post_init__(self) -> None:
        if self.groups < 1 or any(rows % self.groups for rows in self.segments):
            raise PlanError(
                f"{self.groups} groups do not divide segments of {list(self.segments)} rows"
            )

    @property
    def rows(self) -> int:
        """Rows of the fused tensor."""
        return sum(self.segments)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(segment, first row, end row) of every run, in fused order."""
        for group in range(self.groups):
            for segment, rows in enumerate(self.segments):
                size = rows // self.groups
                yield segment, group * size, (group + 1) * size

    def fuse(self, parts: Sequence[Output]) -> Output:
        """Segments, each [its rows, ...], to one output in this order. Row ranges only: no byte is
        read. Raises PlanError if a part does not have its segment's rows."""
        for part, rows in zip(parts, self.segments, strict=True):
            if part.type.shape[:1] != (rows,):
                raise PlanError(f"expected a segment of {rows} rows, found {part.type}")
        return concat([parts[segment].rows(start, stop) for segment, start, stop in self.runs()])

    def split(self, fused: Output) -> tuple[Output, ...]:
        """The inverse of `fuse`. Raises PlanError if the fused rows are not this layout's."""
        if fused.type.shape[:1] != (self.rows,):
            raise PlanError(f"expected {self.rows} fused rows, found {fused.type}")
        runs: list[list[Output]] = [[] for _ in self.segments]
        at = 0
        for segment, start, stop in self.runs():
            runs[segment].append(fused.rows(at, at + stop - start))
            at += stop - start
        return tuple(concat(found) for found in runs)

    def scales_may_move(self, block_rows: int) -> bool:
        """Return whether block scales can move with their rows: every run must be whole block rows.
        Otherwise the scales would belong to rows of several segments, and only requantizing could
        help."""
        return all(rows // self.groups % block_rows == 0 for rows in self.segments)

    def of_blocks(self, block_rows: int) -> RowOrder:
        """The layout of the scale grid's rows. Raises PlanError if they cannot move."""
        if not self.scales_may_move(block_rows):
            raise PlanError(
                f"runs of {[rows // self.groups for rows in self.segments]} rows are not whole "
                f"blocks of {block_rows}, so block scales cannot move with their rows; dequantize first"
            )
        return RowOrder(tuple(rows // block_rows for rows in self.segments), self.groups)
