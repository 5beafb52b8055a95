"""Codes out of the bytes and words that hold several."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qconvert.core.arrays import UInt8s, UInt16s, UInt32s


def spread_nibbles(source: UInt8s, out: UInt16s, spare: UInt16s) -> None:
    """Each byte's low and high nibble -> the low and high byte of a 16-bit entry of `out`."""
    import numpy as np

    np.copyto(out, source)
    np.left_shift(out, 4, out=spare)
    np.bitwise_or(out, spare, out=out)
    np.bitwise_and(out, 0x0F0F, out=out)


def unpacked(words: UInt32s, bits: int) -> UInt16s:
    """Words [n, W] -> the codes in them as they are stored, 0 and up, [n, W * 32 / bits]."""
    import numpy as np

    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed.astype(np.uint16)
    pairs = np.empty(packed.shape, np.uint16)
    spread_nibbles(packed, pairs, np.empty_like(pairs))
    return pairs.view(np.uint8).astype(np.uint16)
