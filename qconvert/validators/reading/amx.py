"""AMXINT4 and AMXINT8 by their definition: sizes, byte order, codes and scales.
No code is shared with the encoder.

Format source: kt-kernel (`kt_kernel/utils/loader.py` for names and cuts; the byte order is
that of its own converter's output). A matrix [N, K] is codes and one float32 scale per row, no zero
point. A weight is code * scale (int8) or code * 16 * scale (int4). Rows are stored in blocks of `STEP`;
in a block, columns in blocks of 3584, the last one shorter; in those, tiles of 32 rows; in a tile,
`STEP` columns at a time; in these, two halves of 16 rows, each as 16 words of 4 bytes for 16 rows side
by side. For int8 the 64 bytes of a row are 64 codes; for int4 byte j holds code j in its low half and
code j + 64 in its high one, as four-bit two's complements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from qconvert.core.errors import PlanError
from qconvert.validation.compiled import LOOPS, done

if TYPE_CHECKING:
    import numpy as np

    from qconvert.validators.reading.decode import Bytes, Floats

    Codes = np.ndarray[tuple[int, ...], np.dtype[np.int8]]

Method = Literal["int4", "int8"]

RUNTIME_NAME: dict[Method, str] = {"int4": "AMXINT4", "int8": "AMXINT8"}
BITS: dict[Method, int] = {"int4": 4, "int8": 8}
# Rows that are stored together, and columns that a tile load takes at once.
STEP: dict[Method, int] = {"int4": 128, "int8": 64}
LARGEST: dict[Method, int] = {"int4": 7, "int8": 127}
_K_BLOCK, _TILE = 3584, 32


def size_fault(method: Method, hidden: int, intermediate: int, numa: int) -> str | None:
    """Why kt-kernel's kernels cannot hold experts of these sizes; None if they can."""
    step = STEP[method]
    if hidden % step:
        return f"{RUNTIME_NAME[method]} takes hidden sizes in multiples of {step}, found {hidden}"
    if intermediate % (numa * step):
        return (
            f"{RUNTIME_NAME[method]} takes intermediate sizes in multiples of {step} for each of {numa} "
            f"NUMA nodes, found {intermediate}"
        )
    return None


def tile_codes(method: Method, packed: Bytes, rows: int, columns: int) -> Codes:
    """Codes int8 [rows, columns] of whole blocks of rows, as stored in a file. Raises PlanError if
    the sizes do not fit."""
    import numpy as np

    _check_size(method, packed, rows, columns)
    step = STEP[method]
    count = columns // step
    words = np.empty((rows // step, step // _TILE, 2, 16, count, 16), "<u4")
    blocks = packed.view("<u4").reshape(rows // step, -1)
    of_block = step * 16
    for first in range(0, count, _K_BLOCK // step):
        last = min(first + _K_BLOCK // step, count)
        part = blocks[:, first * of_block : last * of_block]
        # [block, tile, step, half, word, row] -> [block, tile, half, row, step, word]
        cells = part.reshape(rows // step, step // _TILE, last - first, 2, 16, 16)
        words[:, :, :, :, first:last] = cells.transpose(0, 1, 3, 5, 2, 4)
    lines = words.reshape(rows, -1).view(np.uint8).reshape(rows, count, 64)
    if method == "int8":
        return lines.reshape(rows, columns).view(np.int8)
    both = np.concatenate([lines & np.uint8(15), lines >> np.uint8(4)], axis=2).view(np.int8)
    codes: Codes = ((both ^ np.int8(8)) - np.int8(8)).reshape(rows, columns)
    return codes


def _check_size(method: Method, packed: Bytes, rows: int, columns: int) -> None:
    step = STEP[method]
    if rows % step or columns % step or packed.size * 8 != rows * columns * BITS[method]:
        raise PlanError(
            f"{packed.size} bytes are not an {RUNTIME_NAME[method]} matrix of {rows} x {columns}"
        )


def tile_floats(method: Method, packed: Bytes, scales: Floats, columns: int) -> Floats:
    """The weights float32 [N, columns] that the consumer computes with, of codes and scales [N]."""
    import numpy as np

    with np.errstate(all="ignore"):  # QC041 judges the scales
        step = steps(method, scales)
        if LOOPS.in_use() is not None:
            _check_size(method, packed, scales.size, columns)
            made = np.empty((scales.size, columns), np.float32)
            if done("amx_tiles", packed.view("<u4"), step, STEP[method], _K_BLOCK, made):
                return made
        values = tile_codes(method, packed, scales.size, columns).astype(np.float32)
        np.multiply(values, step[:, None], out=values)
    return values


def steps(method: Method, scales: Floats) -> Floats:
    """The distance between two codes of each row."""
    import numpy as np

    return scales if method == "int8" else scales * np.float32(16)
