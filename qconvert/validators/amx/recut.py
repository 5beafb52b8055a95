"""Tiles made of other tiles, for another number of NUMA nodes: they must hold the same weights.

Rows of gate and up only move between shards, so their bytes are compared. A shard of down holds columns
of one or of several shards of before. Of one: the weights that the consumer computes with are equal. Of
several: its step is the largest of theirs, row by row, and no weight is off by more than half of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qconvert.checkpoint.checkpoint import MANIFEST, Checkpoint
from qconvert.core.errors import PlanError
from qconvert.core.graph import Source
from qconvert.validation.findings import Finding, Measure
from qconvert.validation.workers import Folders, Reads
from qconvert.validators.amx.reading import Block, read_block, read_bytes, shard_name, shard_weights
from qconvert.validators.reading.amx import STEP
from qconvert.validators.reading.experts import Kind
from qconvert.validators.weights.sums import Sums

if TYPE_CHECKING:
    from qconvert.validators.reading.decode import Floats

_TILES = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(\d+)\.numa\.(\d+)\.(weight|scale)")
_FIRST: tuple[Kind, Kind] = ("gate", "down")
# In steps: a code times the ratio of two scales, in float32, next to the border between two codes.
_SLACK = 2.0**-12


def tiles_in(source: Checkpoint) -> Block | None:
    """The tiles that a source holds, None for a model. One without a manifest is kt-kernel's own, and
    has its method and sizes from its tensors. Raises PlanError where they are invalid."""
    if "amx" in (source.manifest or {}):
        return read_block(source)
    places = [match.groups() for name in source if (match := _TILES.fullmatch(name))]
    if not places:
        return None
    layers = sorted({int(place[0]) for place in places})
    numa, experts = (max(int(place[at]) for place in places) + 1 for at in (3, 2))
    gate, down = (shard_name(layers[0], kind, 0, 0) for kind in _FIRST)
    try:
        part, hidden, codes = (
            source[name].type.nbytes
            for name in (f"{gate}.scale", f"{down}.scale", f"{gate}.weight")
        )
    except KeyError as error:
        raise PlanError(f"{error.args[0]!r} is missing") from error
    part, hidden = part // 4, hidden // 4  # float32 each
    method = "int8" if codes == part * hidden else "int4"
    return Block(
        "int8" if method == "int8" else "int4", "reference", numa, hidden, part * numa, experts,
        tuple(layers),
    )  # fmt: skip


def tile_mismatches(block: Block, before: Block) -> list[str]:
    """Differences between what a folder states of its tiles and those of before."""
    pairs = (
        ("the method", block.method, before.method),
        ("the rounding", block.rounding, before.rounding),
        ("the hidden size", block.hidden, before.hidden),
        ("the experts' intermediate size", block.intermediate, before.intermediate),
        ("the number of experts", block.experts, before.experts),
        ("the layers", block.layers, before.layers),
        ("the NUMA counts before", block.cut_from, (*before.cut_from, before.numa)),
    )
    return [
        f"{MANIFEST}: {what}: {here} here, {there} in the source"
        for what, here, there in pairs
        if here != there
    ]


@dataclass(frozen=True)
class RecutTask:
    """One matrix: its tensors here, and those of the tiles before."""

    block: Block
    before: Block
    layer: int
    kind: Kind
    expert: int
    tensors: Mapping[str, Source]
    theirs: Mapping[str, Source]

    @property
    def where(self) -> str:
        return next(iter(self.tensors))

    @property
    def nbytes(self) -> int:
        both = (*self.tensors.values(), *self.theirs.values())
        return sum(tensor.type.nbytes for tensor in both)

    @property
    def scratch(self) -> int:
        """Rows that are stored together, in float32 of both sides, their difference, and what reading
        them takes: some twelve times float32."""
        columns = self.block.intermediate if self.kind == "down" else self.block.hidden
        return 48 * STEP[self.block.method] * columns

    @property
    def computes(self) -> bool:
        return True

    def run(self, folders: Folders) -> Iterator[Finding | Measure]:
        sums = Sums()
        faults = self._down(folders, sums) if self.kind == "down" else self._rows(folders, sums)
        for base, fault in faults:
            where, text = f"{base}.weight", f"expert {self.expert}, {fault}"
            yield Finding("QC042", "error", where, text)
            return
        yield sums.measure(
            self.where, f"{self.kind}_proj", self.layer, self.expert, f"amx{self.block.method}"
        )

    def _rows(self, folders: Folders, sums: Sums) -> Iterator[tuple[str, str]]:
        """Faults of a matrix that is cut by rows, a block of rows at a time."""
        step = STEP[self.block.method]
        for top in range(0, self.block.intermediate, step):
            sides = [
                (self.block, self.tensors, folders.output),
                (self.before, self.theirs, folders.source),
            ]
            found = []
            for block, tensors, reader in sides:
                height = block.shard_shape(self.kind)[0]
                shard, first = divmod(top, height)
                base = shard_name(self.layer, self.kind, self.expert, shard)
                found.append((base, _bytes_of(tensors, reader, base, first, step, height)))
            (base, (codes, scales)), (other, (wanted, scales_before)) = found
            for here, there, what in ((codes, wanted, "codes"), (scales, scales_before, "scales")):
                if here != there:
                    yield (
                        base,
                        f"{what} of rows from {top} on: expected those of {other} in the source",
                    )
                    return
            weights, _ = shard_weights(
                self.block, self.tensors, folders.output, base, self.kind,
                top % self.block.shard_shape(self.kind)[0],
                top % self.block.shard_shape(self.kind)[0] + step,
            )  # fmt: skip
            sums.add(weights, weights)

    def _down(self, folders: Folders, sums: Sums) -> Iterator[tuple[str, str]]:
        """Faults of a matrix that is cut by columns, a block of rows at a time."""
        import numpy as np

        step = STEP[self.block.method]
        width, wide = (one.shard_shape("down")[1] for one in (self.block, self.before))
        for top in range(0, self.block.hidden, step):
            before = [
                self._part(self.before, self.theirs, folders.source, shard, top)
                for shard in range(self.before.numa)
            ]
            row = np.concatenate([weights for weights, _ in before], axis=1)
            for shard in range(self.block.numa):
                base = shard_name(self.layer, self.kind, self.expert, shard)
                found, size = self._part(self.block, self.tensors, folders.output, shard, top)
                first, last = shard * width, (shard + 1) * width
                spanned = range(first // wide, (last - 1) // wide + 1)
                wanted = np.ascontiguousarray(row[:, first:last])
                largest = np.max([before[one][1] for one in spanned], axis=0)
                if (off := size != largest).any():
                    at = int(np.argmax(off))
                    yield (
                        base,
                        f"row {top + at}: expected a step of {largest[at]:g}, found {size[at]:g}",
                    )
                    return
                sums.add(wanted, found)
                allowed = (
                    np.float32(0.5 + _SLACK) * size if len(spanned) > 1 else np.zeros_like(size)
                )
                far = ~(np.abs(found - wanted) <= allowed[:, None])
                if far.any():
                    at, column = divmod(int(np.argmax(far)), width)
                    place = f"row {top + at}, column {first + column}"
                    there = f"expected {wanted[at, column]:g}, as in the source"
                    bound = f"within {allowed[at]:g}; found {found[at, column]:g}"
                    yield base, f"{place}: {there}, {bound}"
                    return

    def _part(
        self, block: Block, tensors: Mapping[str, Source], reader: Reads, shard: int, top: int
    ) -> tuple[Floats, Floats]:
        """Weights and steps of a block of rows of a shard."""
        base = shard_name(self.layer, self.kind, self.expert, shard)
        stop = top + STEP[block.method]
        return shard_weights(block, tensors, reader, base, self.kind, top, stop)


def _bytes_of(
    tensors: Mapping[str, Source], reader: Reads, base: str, first: int, count: int, rows: int
) -> tuple[bytes, bytes]:
    """Codes and scales of rows that are stored together, as they are stored."""
    codes, scale = tensors[f"{base}.weight"], tensors[f"{base}.scale"]
    line = codes.type.nbytes // rows
    return (
        read_bytes(reader, codes, first * line, (first + count) * line).tobytes(),
        read_bytes(reader, scale, 4 * first, 4 * (first + count)).tobytes(),
    )


def shard_tensors(
    block: Block, checkpoint: Checkpoint, layer: int, kind: Kind, expert: int
) -> dict[str, Source]:
    """A matrix's tensors of all NUMA shards, by name."""
    names = [shard_name(layer, kind, expert, number) for number in range(block.numa)]
    parts = [f"{name}.{part}" for name in names for part in ("weight", "scale")]
    return {name: checkpoint[name] for name in parts}
