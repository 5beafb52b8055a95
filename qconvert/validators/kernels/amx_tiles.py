"""A Triton kernel reads AMXINT4 and AMXINT8 tiles, on random weights and on experts of the folder: it
must give the result of the format's inverse on the CPU, bit for bit, and the source's weights within the
format's rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qconvert.run.reader import Reader
from qconvert.validation.findings import Rule
from qconvert.validation.runner import Folder, Need, NotChecked
from qconvert.validators.amx.reading import (
    Block,
    Sources,
    matching_source,
    shard_name,
    sound_block,
)
from qconvert.validators.kernels.device import NO_DATA, Case, Said, device, head, read, said
from qconvert.validators.reading.amx import LARGEST, STEP
from qconvert.validators.reading.experts import KINDS, Kind
from qconvert.validators.reading.rows import bf16_rows

if TYPE_CHECKING:
    from torch import Tensor

RULES = (
    Rule(
        "QC072",
        "AMX tiles read by the Triton kernel differ from the format's inverse, or from the source",
        "On random weights, or if bits differ: Triton or the GPU's driver computes differently. "
        "Further from the source than rounding allows: the experts are another's, or broken.",
        "If bits differ: try another release of Triton or of the driver. If the source is too "
        "far: check what --level full --against SRC says about that tensor, and convert again.",
    ),
)

# In steps. Codes are rounded once, to half a step; kt-kernel's int4 to sixteenths of a step first.
_BOUND = {("int4", "peer"): 8.5 / 16}
_SLACK = 2.0**-12  # multiplying by the inverse of a step and back
_FLUSHED = 2.0**-119  # rows whose step would be denormal become zeros: 127 * 2^-126 at most


@dataclass(frozen=True)
class AmxTiles:
    """Kernel against torch and numpy; experts of the folder against the source too, where given."""

    name: str = "amx_tiles"
    proves: str = (
        "the amx_tiles kernel reads tiles bit for bit (its table says which, and on which device)"
    )
    needs: frozenset[Need] = frozenset({"kernels"})

    def random(self) -> Iterator[Said]:
        """On random weights, without a folder."""
        where = device()
        from qconvert.validators.kernels.triton import amx

        yield from said(self.name, "QC072", where, amx.random_cases(where), (), "")

    def __call__(self, folder: Folder) -> Iterator[Said]:
        where = device()
        work, note = _work(folder)
        from qconvert.validators.kernels.triton import amx

        real = work.cases(folder, where) if work is not None else ()
        yield from said(self.name, "QC072", where, amx.random_cases(where), real, note)


def _work(folder: Folder) -> tuple[_Work | None, str]:
    """What to check, and why there is nothing, or nothing to compare with."""
    if "amx" not in (folder.checkpoint.manifest or {}):
        return None, "the folder holds no AMX tiles"
    if folder.request.level == "headers":
        return None, NO_DATA
    try:
        block = sound_block(folder.checkpoint)
    except NotChecked as reason:
        return None, f"no tensor of the folder was checked: {reason}"
    wanted = folder.request.layers or (block.layers[0], block.layers[-1])
    layers = tuple(sorted(set(wanted) & set(block.layers)))
    if not layers:
        return None, "the layers asked for hold no experts"
    work = _Work(block, layers, None)
    if folder.source is None:
        return work, "not compared with the source: give --against SRC"
    if block.rounding == "gptq":
        return work, (
            "not compared with the source weight by weight: calibration found the codes, which "
            "--level full --against SRC judges"
        )
    try:
        return replace(work, sources=matching_source(block, folder)), ""
    except NotChecked as reason:
        return work, f"not compared with the source: {reason}"


@dataclass(frozen=True)
class _Work:
    """Experts of some layers, and the source's matrices where it can be compared with."""

    block: Block
    layers: tuple[int, ...]
    sources: Sources | None

    def cases(self, folder: Folder, where: str) -> Iterator[tuple[str, Case]]:
        """The first and the last expert of each layer, all matrices and NUMA shards."""
        ours = Reader(folder.checkpoint.shards)
        theirs = Reader(folder.source.shards) if folder.source is not None else None
        try:
            for layer in self.layers:
                for expert in dict.fromkeys((0, self.block.experts - 1)):
                    for kind in KINDS:
                        yield from self._matrix(folder, ours, theirs, (layer, kind, expert), where)
        finally:
            ours.close()
            if theirs is not None:
                theirs.close()

    def _matrix(
        self,
        folder: Folder,
        ours: Reader,
        theirs: Reader | None,
        matrix: tuple[int, Kind, int],
        where: str,
    ) -> Iterator[tuple[str, Case]]:
        import torch

        from qconvert.validators.kernels.triton import amx

        layer, kind, expert = matrix
        rows, columns = self.block.shard_shape(kind)
        count = head(rows, columns, STEP[self.block.method], where)
        expected = None
        if self.sources is not None:
            assert theirs is not None
            expected = torch.from_numpy(bf16_rows(theirs, self.sources[matrix]))
        for shard in range(self.block.numa):
            base = shard_name(layer, kind, expert, shard)
            weight, scale = (folder.checkpoint[f"{base}.{part}"] for part in ("weight", "scale"))
            nbytes = weight.type.nbytes // rows * count  # rows lie in bands of a whole step
            packed = read(ours, weight, 0, nbytes).to(where)
            steps = read(ours, scale, 0, 4 * count).view(torch.float32).to(where)
            of = "" if count == rows else f" of {rows}"
            name = f"{base}.weight, {count}{of} x {columns}"
            found = amx.unpacked(self.block.method, packed, steps, columns)
            for case in amx.compared(name, self.block.method, packed, steps, found):
                yield f"{base}.weight", case
            if expected is None:
                continue
            top, left = (0, shard * columns) if kind == "down" else (shard * rows, 0)
            wanted = expected[top : top + count, left : left + columns].to(where)
            if self.block.method == "int4":
                steps = steps * 16
            yield f"{base}.weight", _rounded(self.block, f"{name}, source", wanted, found, steps)


def _rounded(block: Block, name: str, expected: Tensor, found: Tensor, steps: Tensor) -> Case:
    """The largest error in steps. If steps were searched for, the largest code stands for everything
    beyond it too."""
    import torch

    size = steps[:, None]
    error = ((expected - found).abs() - _FLUSHED).clamp_min(0)
    error = torch.where(error == 0, error, error / size)
    if block.rounding == "search":
        beyond = (LARGEST[block.method] - 0.5) * size
        outward = expected * found.sign() >= beyond - _SLACK * size
        error = torch.where((found.abs() > beyond) & outward, 0.0, error)
    bound = _BOUND.get((block.method, block.rounding), 0.5) + _SLACK
    return Case(name, float(error.max().item()), bound)


VALIDATOR = AmxTiles()
