"""The order of bytes in which kt-kernel's AMX kernels load codes, a tile at a time. Words of four codes
(int8) or eight (int4) lie side by side for 16 rows; see `place`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.formats.amx.format import STEP, Method

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

K_BLOCK = 3584  # columns beyond which rows stay together in blocks of STEP
TILE_ROWS = 32
CELL_BYTES = 2048  # of a K step of a tile of rows: two halves of 16 rows, 64 bytes each

# Elements worked on at a time. Of 2^15 to 2^18 this measured best, for either method and rounding: in
# smaller tiles the cost of numpy's calls shows more than what larger ones lose to the caches.
_TILE_ELEMENTS = 1 << 18


def tile(rows: int, columns: int) -> tuple[int, int]:
    """Rows packed at once, which are whole tiles, and rows computed at once, which divide those."""
    tall = min(rows, TILE_ROWS * max(1, _TILE_ELEMENTS // (TILE_ROWS * columns)))
    some = min(tall, max(1, _TILE_ELEMENTS // columns))
    return tall, some


def place_codes(
    method: Method, codes: np.ndarray[tuple[int, ...], np.dtype[np.int8]], target: Bytes
) -> None:
    """Codes [N, K] of one shard, int4 as -7 to 7, -> its packed bytes."""
    import numpy as np

    rows, columns = codes.shape
    tall, _ = tile(rows, columns)
    lines, spare = np.empty((2, tall, columns), np.uint8)
    for top in range(0, rows, tall):
        count = min(top + tall, rows) - top
        half = lines[:count]
        np.add(codes[top : top + count], 8 if method == "int4" else 0, out=half.view(np.int8))
        if method == "int4":
            half = pair_up(half, spare[:count])
        place(method, half, target, top, rows, columns)


def pair_up(codes: Bytes, spare: Bytes) -> Bytes:
    """Codes plus 8, [r, K] -> bytes [r, K/2]: byte j of a step holds code j in its low half and code
    j + 64 in its high half, as four-bit two's complements."""
    import numpy as np

    rows, columns = codes.shape
    steps = columns // 128
    eight = codes.reshape(rows, steps, 2, 64).view(np.uint64)
    shifted = spare.reshape(-1).view(np.uint64)
    np.left_shift(codes.reshape(-1).view(np.uint64), np.uint64(4), out=shifted)
    paired = shifted.reshape(rows, steps, 2, 8)
    # Written over the shifted low halves, which are not needed, then moved together in `codes`.
    np.bitwise_or(eight[:, :, 0], paired[:, :, 1], out=paired[:, :, 0])
    together = codes.reshape(-1).view(np.uint64)[: rows * steps * 8].reshape(rows, steps, 8)
    np.bitwise_xor(paired[:, :, 0], np.uint64(0x8888888888888888), out=together)
    return together.view(np.uint8).reshape(rows, columns // 2)


def place(method: Method, lines: Bytes, target: Bytes, top: int, rows: int, columns: int) -> None:
    """Put packed rows [top, top + r), r whole tiles, where the format wants them: words go
    [block of STEP rows][K block][tile of 32 rows][K step][half][word][row], the last two 16 each."""
    import numpy as np

    step, width = STEP[method], 64  # bytes of a row in one K step
    steps = columns // step
    words = np.ascontiguousarray(lines).view(np.int32) if not lines.flags.c_contiguous else lines
    source = words.view(np.int32).reshape(-1, 2, 16, steps, 16)
    row_bytes = steps * width
    per_block = K_BLOCK // step
    if steps <= per_block:
        goal = target[top * row_bytes : (top + lines.shape[0]) * row_bytes].view(np.int32)
        np.copyto(goal.reshape(-1, steps, 2, 16, 16), source.transpose(0, 3, 1, 4, 2))
        return
    for number in range(source.shape[0]):
        row = top + number * TILE_ROWS
        block = row // step * step
        for first in range(0, steps, per_block):
            count = min(per_block, steps - first)
            at = block * row_bytes + (step * first + (row - block) * count) * width
            goal = target[at : at + TILE_ROWS * count * width].view(np.int32)
            np.copyto(
                goal.reshape(count, 2, 16, 16),
                source[number, :, :, first : first + count].transpose(2, 0, 3, 1),
            )
