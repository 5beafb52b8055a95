"""An oracle of the layout that trtllm-gen's kernels take, which goes byte by byte."""

from __future__ import annotations


def source_row(n: int, rows: int, gated: bool) -> int:
    """The row of [w1; w3] (or of the one matrix) that stands in prepared row n, step by step."""
    block, place = divmod(n, 32)
    c, r = divmod(place, 8)
    n = 32 * block + 4 * r + c
    if not gated:
        return n
    n = n // 2 if n % 2 == 0 else rows // 2 + n // 2  # rows of [w3; w1] in turn
    return n + rows // 2 if n < rows // 2 else n - rows // 2  # which lie as [w1; w3]


def shuffled(data: bytes, rows: int, gated: bool) -> bytes:
    """Prepared weights of one expert, from its rows of w1 followed by those of w3."""
    width = len(data) // rows
    found = (source_row(n, rows, gated) for n in range(rows))
    return b"".join(data[row * width : (row + 1) * width] for row in found)


def interleaved(data: bytes, rows: int, gated: bool) -> bytes:
    """Prepared block scales of one expert."""
    width = len(data) // rows
    result = bytearray(len(data))
    for m in range(rows):
        row = source_row(m, rows, gated)
        for k in range(width):
            tile = (m // 128) * (width // 4) + k // 4
            at = tile * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + k % 4
            result[at] = data[row * width + k]
    return bytes(result)
