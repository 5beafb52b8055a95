"""The order of linear attention's fused rows, found from the source's rows: every order has the same
shape and loads silently.

QC063 the rows are in another order than the folder states.
QC064 the rows are in no known order.
QC065 block scales are in another order than the rows they belong to.

Each row is identified by a hash. Orders that are tried: every number of groups that divides the key
heads (1: contiguous, number of key heads: interleaved, others: rank-major), segments swapped, and rows
of a fused source that were cut as if they had been contiguous. Split projections are checked in the
same way, as if they were one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from qconvert.checkpoint.checkpoint import Checkpoint
from qconvert.validation.findings import Finding, OnlyRead, Skipped
from qconvert.validation.runner import Folder, NotChecked, Yield, validator
from qconvert.validation.workers import Folders, Reads
from qconvert.validators.reading.adapters import additions_to
from qconvert.validators.reading.decode import bf16_bits
from qconvert.validators.reading.forms import Unread
from qconvert.validators.reading.matrices import (
    BA,
    FUSED,
    GROUPS_FACT,
    QKVZ,
    Key,
    Matrix,
    gdn_groups,
    matrices,
    segment_rows,
    segment_runs,
    whole,
)
from qconvert.validators.reading.rows import row_bytes, rows, scales, scratch, tile_rows

if TYPE_CHECKING:
    import numpy as np

    Ids = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

_RULES = {"weights": "QC063", "scales": "QC065"}


@dataclass(frozen=True, slots=True)
class Order:
    """One fused tensor, or the split ones that would make it. `stored` are the folder's tensors,
    `sizes` the segments' rows, `groups` what `who` states, `parts` the source's segments,
    `source_groups` the source's own groups."""

    segments: tuple[str, ...]
    stored: tuple[Matrix, ...]
    sizes: tuple[int, ...]
    heads: int
    groups: int
    who: str
    parts: tuple[Matrix, ...]
    source_groups: int

    @property
    def where(self) -> str:
        return self.stored[0].tensor

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in (*self.stored, *self.parts))

    @property
    def scratch(self) -> int:
        hashes = 64 * sum(self.sizes)
        return hashes + max(scratch(matrix) for matrix in (*self.stored, *self.parts))

    def run(self, folders: Folders) -> Iterator[Finding | OnlyRead]:
        import numpy as np

        codes = all(m.format == "fp8" for m in (*self.stored, *self.parts))
        ids: dict[bytes, int] = {}
        found = np.concatenate([_row_ids(folders.output, m, ids, codes) for m in self.stored])
        parts = [_row_ids(folders.source, m, ids, codes) for m in self.parts]
        yield from self._judge("weights", found, parts, self._orders(self.sizes))
        blocks = self._blocks()
        if not codes or blocks is None:
            return
        step, sizes = blocks
        ids = {}
        found = np.concatenate([_scale_ids(folders.output, m, ids, step) for m in self.stored])
        parts = [_scale_ids(folders.source, m, ids, step) for m in self.parts]
        yield from self._judge("scales", found, parts, self._orders(sizes))

    def _blocks(self) -> tuple[int, tuple[int, ...]] | None:
        """Rows of a block and the segments' blocks, None if blocks do not move as rows do."""
        grids = [m.form.grid for m in (*self.stored, *self.parts)]
        heights = {grid.block[0] for grid in grids if grid is not None}
        if len(heights) != 1:
            return None
        (high,) = heights
        if any(size // self.heads % high for size in self.sizes):
            return None
        return high, tuple(size // high for size in self.sizes)

    def _orders(self, sizes: tuple[int, ...]) -> dict[str, list[int]]:
        """By name, the numbers of the segments' rows (counted one segment after the other) in the
        order that a tensor would hold them. The stated order comes first."""
        usual = [g for g in range(1, self.heads + 1) if self.heads % g == 0]
        usual.sort(key=lambda groups: groups != self.groups)
        plain = list(range(sum(sizes)))
        orders = {}
        for groups in usual:
            orders[order_name(groups, self.heads)] = _fused(plain, sizes, groups)
        swapped = _swapped(sizes)
        for groups in usual:
            name = f"{order_name(groups, self.heads)}, with the segments in another order"
            orders.setdefault(name, [swapped[0][i] for i in _fused(plain, swapped[1], groups)])
        if self.source_groups > 1:
            # The source's own rows, cut as if contiguous, and fused (or left) so.
            stored = _fused(plain, sizes, self.source_groups)
            for groups in usual:
                again = [stored[i] for i in _fused(plain, sizes, groups)]
                name = (
                    f"cut from the source as if contiguous (there G={self.source_groups}), then "
                    f"{order_name(groups, self.heads)}"
                )
                orders.setdefault(name, again)
        return orders

    def _judge(
        self, what: str, found: Ids, parts: Sequence[Ids], orders: dict[str, list[int]]
    ) -> Iterator[Finding | OnlyRead]:
        """Compare the rows with every order. A few rows that match none are QC060's."""
        import numpy as np

        segments = np.concatenate(parts)
        name = "|".join(self.segments)
        first = next(iter(orders))
        scores = {n: int(np.count_nonzero(segments[o] == found)) for n, o in orders.items()}
        best = max(scores, key=lambda n: (scores[n], n == first))
        is_said = f"{self.who} {first}"
        if 2 * scores[best] < found.size:
            if what == "weights":
                row = int(np.argmax(segments[orders[first]] != found))
                message = (
                    f"{name}: {is_said}; row {row} is the first that does not match, and no known "
                    f"order has half of the rows in place (best: {best}, "
                    f"{scores[best]} of {found.size})"
                )
                yield Finding("QC064", "error", self.where, message)
            else:
                message = f"the scales of {name} are in no known order; {is_said}"
                yield Finding("QC065", "error", self.where, message)
            return
        if scores[best] > scores[first]:
            row = int(np.argmax(segments[orders[first]] != found))
            of = "the bytes" if what == "weights" else "the block scales"
            message = f"{name}: {of} are {best}; {is_said} (row {row} is the first to differ)"
            yield Finding(_RULES[what], "error", self.where, message)
            return
        alike = [n for n in orders if n != first and scores[n] == scores[first]]
        # An order that moves no row (one key head) is the same order, not a similar one.
        alike = [n for n in alike if orders[n] != orders[first]]
        if alike:
            yield OnlyRead(
                f"{self.where}: {is_said}; its {what} are so similar that {alike[0]} would look the same"
            )


def _fused(rows_in: list[int], sizes: Sequence[int], groups: int) -> list[int]:
    """Rows of segments one after the other, in fused order."""
    runs = segment_runs(sizes, groups)
    placed: list[tuple[int, list[int]]] = []
    begin = 0
    for size, segment in zip(sizes, runs, strict=True):
        at = begin
        for start, stop in segment:
            placed.append((start, rows_in[at : at + stop - start]))
            at += stop - start
        begin += size
    return [row for _, run in sorted(placed) for row in run]


def _swapped(sizes: tuple[int, ...]) -> tuple[list[int], tuple[int, ...]]:
    """The rows with two segments of a kind exchanged, k|q|v|z or a|b; and their sizes."""
    first, second = sizes[0], sizes[1]
    order = [*range(first, first + second), *range(first), *range(first + second, sum(sizes))]
    return order, (second, first, *sizes[2:])


def _row_ids(reader: Reads, matrix: Matrix, ids: dict[bytes, int], codes: bool) -> Ids:
    """A number for each row, equal if rows are equal: of its codes, or of its weights as bf16."""
    import numpy as np

    found: list[int] = []
    for start in range(0, matrix.rows, tile_rows(matrix)):
        stop = min(start + tile_rows(matrix), matrix.rows)
        data: Any
        if codes or matrix.format == "bf16":
            data = row_bytes(reader, matrix, start, stop)
        else:
            data = (bf16_bits(rows(reader, matrix, start, stop)) >> np.uint32(16)).astype("<u2")
        found += _numbered(data.reshape(stop - start, -1), ids)
    return np.array(found, np.int64)


def _scale_ids(reader: Reads, matrix: Matrix, ids: dict[bytes, int], step: int) -> Ids:
    """The same for rows of scales, one for each block of rows."""
    import numpy as np

    found: list[int] = []
    for row in range(0, matrix.rows, step):
        found += _numbered(scales(reader, matrix, row, row + 1), ids)
    return np.array(found, np.int64)


def _numbered(lines: Any, ids: dict[bytes, int]) -> list[int]:
    return [ids.setdefault(xxhash.xxh3_128_digest(line.data), len(ids)) for line in lines]


def order_name(groups: int, heads: int) -> str:
    """The common name of an order."""
    kind = {1: "contiguous", heads: "interleaved"}.get(groups, "rank-major")
    return f"{kind}, G={groups}"


_LAYERS = 4  # at level sample
# For segments: the module that holds all of them, and those that hold some.
_MODULES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    QKVZ: (FUSED[0], "in_proj_qkv", "in_proj_z"),
    BA: (FUSED[1], "in_proj_b", "in_proj_a"),
}


@validator("linear-attention rows are in the order that the folder states", "data", "gdn", "source")
def gdn_order(folder: Folder) -> Iterator[Yield]:
    """Two tasks a layer: q, k, v, z and b, a."""
    checkpoint, source = folder.checkpoint, folder.source
    assert source is not None
    if source.role_index.dims.gdn != checkpoint.role_index.dims.gdn:
        raise NotChecked("the source has linear attention of other sizes, or none")
    theirs, additions = matrices(source), additions_to(folder)
    layers = []
    unread: list[str] = []
    for layer, modules in sorted(_modules(checkpoint).items()):
        tasks = []
        for segments in (QKVZ, BA):
            try:
                task = _task(checkpoint, modules, segments)
                parts = _parts(theirs, layer, segments)
            except Unread as why:
                unread.append(str(why))
                continue
            stored = () if task is None else task[1]
            added = additions is not None and any(map(additions.to, (*stored, *parts)))
            if task is not None and (added or _rounded_anew(checkpoint, stored, parts)):
                unread.append(f"{stored[0].tensor}: its rows are rounded anew, see `weights`")
            elif task is not None and parts:
                tasks.append(Order(*task, parts, _cuts(source)))
        if tasks:
            layers.append(tasks)
    if not layers:
        raise NotChecked(
            unread[0] if unread else "no layer has projections in both the folder and its source"
        )
    if unread:
        more = f", and {len(unread) - 1} more" if len(unread) > 1 else ""
        yield Skipped(f"the order of linear attention's rows: {unread[0]}{more}")
    for tasks in folder.some(layers, _LAYERS):
        yield from tasks


def said(checkpoint: Checkpoint, *, fused: bool) -> tuple[int | None, str]:
    """In how many groups (1 for split ones: segment by segment) rows should be, and who states it."""
    if not fused:
        return 1, "split projections are"
    manifest = checkpoint.manifest or {}
    if manifest.get(GROUPS_FACT):
        return gdn_groups(checkpoint), "qconvert.json says"
    if checkpoint.family.name == "qwen3_next":
        return gdn_groups(checkpoint), "Qwen3-Next is"
    return 1, "sglang, which alone takes them fused from a Qwen3.5 repo, takes"


def _rounded_anew(
    checkpoint: Checkpoint, stored: tuple[Matrix, ...], parts: tuple[Matrix, ...]
) -> bool:
    """Tell whether no row can be found again: these were rounded to codes from the source's numbers."""
    steps = {step.get("name") for step in (checkpoint.manifest or {}).get("passes", [])}
    coded = {m.format for m in stored if m.format == "fp8" or m.form.codes is not None}
    others = {matrix.format for matrix in parts}
    return bool(coded) and (others != coded or not steps.isdisjoint(("fp8", "int8", "mx")))


def _modules(checkpoint: Checkpoint) -> dict[int, dict[str, str]]:
    """For each layer, its projections' weights by their last name."""
    found: dict[int, dict[str, str]] = {}
    for name, place in checkpoint.role_index.places.items():
        role = place.role.name
        if role.startswith("gdn.in_proj_") and place.parameter == "weight":
            assert place.layer is not None
            found.setdefault(place.layer, {})[role.removeprefix("gdn.")] = name
    return found


def _parts(
    theirs: Mapping[Key, Matrix], layer: int, segments: tuple[str, ...]
) -> tuple[Matrix, ...]:
    """The source's segments, () if it has none. Raises Unread if they cannot be read as rows."""
    found = [theirs.get((f"gdn.{s}", layer, None, "weight")) for s in segments]
    parts = tuple(part for part in found if part is not None)
    if len(parts) == len(segments):
        return parts
    for module in _MODULES[segments]:
        bare = theirs.get((f"gdn.{module}", layer, None, "weight"))
        if bare is not None and bare.note:
            raise Unread(f"{bare.tensor} of the source: {bare.note}")
    return ()


def _task(
    checkpoint: Checkpoint, modules: dict[str, str], segments: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[Matrix, ...], tuple[int, ...], int, int, str] | None:
    """Facts that `Order` needs of the folder, None if the layer is in another stage, or incomplete.
    Raises Unread, naming the tensor, if its rows cannot be read."""
    fused, *split = _MODULES[segments]
    if fused in modules:
        names, (groups, who) = [modules[fused]], said(checkpoint, fused=True)
    elif all(part in modules for part in split):
        names, (groups, who) = [modules[part] for part in split], said(checkpoint, fused=False)
    else:
        return None  # missing tensors and incomplete sets are found in the headers
    dims = checkpoint.role_index.dims
    assert dims.gdn is not None
    sizes = segment_rows(dims)
    stored = tuple(_whole(checkpoint, name) for name in names)
    if groups is None:
        raise Unread(f"{names[0]}: the number of groups that its rows are fused in is unknown")
    if sum(m.rows for m in stored) != sum(sizes[s] for s in segments):
        return None  # QC014
    return segments, stored, tuple(sizes[s] for s in segments), dims.gdn[0], groups, who


def _whole(checkpoint: Checkpoint, name: str) -> Matrix:
    try:
        return whole(checkpoint, name)
    except Unread as why:
        raise Unread(f"{name}: {why}") from why


def _cuts(source: Checkpoint) -> int:
    """Groups of the source's fused rows, 0 if they are split."""
    fused = any(f".{name}." in tensor for tensor in source for name in FUSED)
    return (gdn_groups(source) or 0) if fused else 0
