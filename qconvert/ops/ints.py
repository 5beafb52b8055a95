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


def unpacked(words: UInt32s, bits: int, count: int | None = None) -> UInt16s:
    """Words [n, W] -> the first `count` codes in each row, as they are stored, 0 and up, [n, count];
    None: all, [n, W * 32 / bits]."""
    import numpy as np

    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed[:, :count].astype(np.uint16)
    if bits != 4:
        every = 8 * packed.shape[1] // bits
        return bit_fields(packed, bits, every if count is None else count).astype(np.uint16)
    pairs = np.empty(packed.shape, np.uint16)
    spread_nibbles(packed, pairs, np.empty_like(pairs))
    return pairs.view(np.uint8)[:, :count].astype(np.uint16)


def bit_fields(packed: UInt8s, bits: int, count: int) -> UInt8s:
    """Rows of bytes [n, B], each a string of bits, the first the lowest of the first byte -> its first
    `count` fields of `bits`, 2 to 8, one a byte, [n, count]: eight at a time, which are `bits` bytes."""
    import numpy as np

    rows, eights = packed.shape[0], -(-count // 8)
    whole = np.zeros((rows, eights, 8), np.uint8)
    within = packed[:, : eights * bits]
    if within.shape[1] < eights * bits:  # the last eight are not all there
        within = np.pad(within, ((0, 0), (0, eights * bits - within.shape[1])))
    whole[:, :, :bits] = within.reshape(rows, eights, bits)
    strings = whole.view("<u8")  # [n, eights, 1]
    shifts = np.arange(0, 8 * bits, bits, dtype=np.uint64)
    fields = np.empty((rows, eights, 8), np.uint8)
    np.bitwise_and(strings >> shifts, np.uint64((1 << bits) - 1), out=fields, casting="unsafe")
    return fields.reshape(rows, -1)[:, :count]


def bit_string(fields: UInt8s, bits: int) -> UInt8s:
    """Fields [n, K] of `bits`, K in eights -> rows of bytes [n, K * bits / 8], as `bit_fields` reads
    them."""
    import numpy as np

    eights = fields.reshape(fields.shape[0], -1, 8)
    strings = np.zeros(eights.shape[:2], "<u8")
    for at in range(8):
        strings |= eights[:, :, at].astype(np.uint64) << np.uint64(bits * at)
    parts = strings[:, :, None].view(np.uint8)[:, :, :bits]
    return np.ascontiguousarray(parts).reshape(fields.shape[0], -1)
