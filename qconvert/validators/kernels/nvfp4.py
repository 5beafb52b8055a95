"""A Triton kernel decodes NVFP4 to BF16, on random weights and on those of the folder: it must give the
bits of the format's definition.

That is a second way to the numbers that `weights` compares with the source's, and the one that runs on
the GPU that may serve them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qconvert.core.graph import Source
from qconvert.run.reader import Reader
from qconvert.validation.findings import Rule
from qconvert.validation.runner import Folder, Need
from qconvert.validators.kernels.device import NO_DATA, Case, Said, chosen, device, head, said
from qconvert.validators.reading.decode import bf16_bits, fp8_floats
from qconvert.validators.reading.nvfp4 import (
    BLOCK,
    GlobalScale,
    Parts,
    all_parts,
    fault,
    fp4_floats,
)

RULES = (
    Rule(
        "QC110",
        "NVFP4 decoded by the Triton kernel differs from torch's BF16, or from the definition",
        "On random weights: Triton or the GPU's driver computes differently from float32 arithmetic. "
        "Only on a tensor of the folder: its global scale is invalid (QC100).",
        "On random weights: try another release of Triton or of the driver. On a tensor: check what "
        "--level full --against SRC says about it.",
    ),
)


@dataclass(frozen=True)
class Nvfp4:
    """Kernel against torch on random weights, and against numpy on the folder's, bit for bit."""

    name: str = "nvfp4"
    proves: str = "the nvfp4 kernel decodes bit for bit (its table says what, and on which device)"
    needs: frozenset[Need] = frozenset({"kernels"})

    def random(self) -> Iterator[Said]:
        """On random weights, without a folder."""
        where = device()
        from qconvert.validators.kernels.triton import nvfp4

        yield from said(self.name, "QC110", where, nvfp4.random_cases(where), (), "")

    def __call__(self, folder: Folder) -> Iterator[Said]:
        where = device()
        matrices, note = _matrices(folder)
        from qconvert.validators.kernels.triton import nvfp4

        real = _cases(folder, matrices, where)
        yield from said(self.name, "QC110", where, nvfp4.random_cases(where), real, note)


def _matrices(folder: Folder) -> tuple[list[Parts], str]:
    """What to check, or why there is nothing."""
    sound = {
        parts.weight.name: parts for parts in all_parts(folder.checkpoint) if fault(parts) is None
    }
    if not sound:
        return [], "no matrix of the folder is NVFP4"
    if folder.request.level == "headers":
        return [], NO_DATA
    found = [sound[name] for name in chosen(sound, folder.request.layers)]
    return found, "" if found else "the layers asked for hold no NVFP4 matrix"


def _cases(folder: Folder, matrices: list[Parts], where: str) -> Iterator[tuple[str, Case]]:
    import numpy as np
    import torch

    from qconvert.validators.kernels.device import bitwise
    from qconvert.validators.kernels.triton import nvfp4

    reader = Reader(folder.checkpoint.shards)

    def lines(source: Source, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        data = np.empty((count, source.type.row_nbytes), np.uint8)
        reader.read(source, 0, data.reshape(-1).data)
        return data

    try:
        for parts in matrices:
            assert parts.scale is not None
            assert parts.global_scale is not None
            rows, columns = parts.weight.type.shape[0], 2 * parts.weight.type.shape[1]
            count = head(rows, columns, 1, where)
            packed, scale = lines(parts.weight, count), lines(parts.scale, count)
            global_scale = GlobalScale(parts.global_scale, parts.dialect.divisor)
            blocks = fp8_floats(scale.reshape(-1), "F8_E4M3").reshape(scale.shape)
            factor = np.repeat(global_scale.applied(reader, blocks), BLOCK, axis=1)
            with np.errstate(all="ignore"):
                values = fp4_floats(packed.reshape(-1)).reshape(factor.shape) * factor
            bits = (bf16_bits(values) >> np.uint32(16)).astype(np.uint16).view(np.int16)
            found = nvfp4.dequant(
                torch.from_numpy(packed).to(where),
                torch.from_numpy(scale).to(where),
                torch.tensor(global_scale.value(reader), dtype=torch.float32, device=where),
                divides=parts.dialect.divisor,
            )
            of = "" if count == rows else f" of {rows}"
            name = f"{parts.weight.name}, {count}{of} x {columns}"
            yield parts.weight.name, bitwise(name, found.cpu(), torch.from_numpy(bits))
    finally:
        reader.close()


VALIDATOR = Nvfp4()
