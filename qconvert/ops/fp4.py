"""E2M1 codes, which NVFP4 and MXFP4 share, and E4M3 scales.

Format source: OCP Microscaling Formats v1.0, 5.3.3 (E2M1). A code is a sign and one of eight sizes; two
are in a byte, the even column in its low half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.core.int_scheme import NVFP4_BLOCK
from qconvert.ops.ints import spread_nibbles

if TYPE_CHECKING:
    from qconvert.core.arrays import Float32s, UInt8s


BLOCK = NVFP4_BLOCK
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# What lies halfway between two sizes, and whether it goes to the larger one: to the even code.
_HALFWAYS = (
    (0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False),
)  # fmt: skip
_SIGN = 8
E4M3_NAN, E4M3_MAX = 0x7F, 448.0


def to_codes(values: Float32s, out: UInt8s, spare: UInt8s) -> None:
    """Float32 -> E2M1 codes, nearest, ties to even, 6 for all that is larger, one a byte. Spends
    `values`, of which none may be NaN; -0 has no sign, as both projects have it."""
    import numpy as np

    flags = spare.view(np.bool_)
    np.less(values, 0, out=flags)
    np.multiply(spare, _SIGN, out=out)
    np.abs(values, out=values)
    for halfway, upwards in _HALFWAYS:
        (np.greater_equal if upwards else np.greater)(values, np.float32(halfway), out=flags)
        np.add(out, spare, out=out)


def pack(codes: UInt8s, spare: UInt8s, out: UInt8s) -> None:
    """Codes, one a byte, to two a byte, the first in the lower half. Spends `codes`."""
    import numpy as np

    pairs, beside = codes.view(np.uint16), spare.view(np.uint16)
    np.right_shift(pairs, 4, out=beside)
    np.bitwise_or(pairs, beside, out=pairs)
    np.copyto(out, pairs, casting="unsafe")


def from_codes(packed: UInt8s) -> Float32s:
    """Bytes [n, K / 2], the first code in the lower half -> float32 [n, K]."""
    import numpy as np

    part = np.ascontiguousarray(packed)
    pairs = np.empty(part.shape, np.uint16)
    spread_nibbles(part, pairs, np.empty_like(pairs))
    sizes = np.array((*SIZES, *(-size for size in SIZES)), np.float32)
    found: Float32s = sizes[pairs.view(np.uint8)]
    return found


def e4m3(values: Float32s, codes: UInt8s) -> None:
    """Float32 from 0 to 448 -> E4M3 codes, nearest, ties to even; `values` become what they mean."""
    import numpy as np

    # A float32 in [2^(23 + k), 2^(24 + k)) counts steps of 2^k, so adding one power of two rounds to a
    # step. E4M3's step is an eighth of a number's own power of two, and of 2^-6 for all below.
    bits = values.view(np.int32) & 0x7F800000
    np.maximum(bits, (127 - 6) << 23, out=bits)
    power = bits >> 23
    bits += 20 << 23
    rounder = bits.view(np.float32)
    np.add(values, rounder, out=values)
    steps = values.view(np.int32) & 0xFF
    # The sum is the rounder and `steps`, 16 at most, in its lowest bits.
    np.copyto(codes, (power - (127 - 6)) * 8 + steps, casting="unsafe")
    np.subtract(values, rounder, out=values)


def from_e4m3(codes: UInt8s) -> Float32s:
    """E4M3 codes -> float32, NaN included."""
    import numpy as np

    bits = codes.astype(np.int32)
    # Exponent and mantissa where float32 keeps them, off by its larger bias, 127 - 7.
    wide = (bits & 0x7F) << 20 | (bits & 0x80) << 24
    found: Float32s = wide.view(np.float32) * np.float32(2.0**120)
    found[(codes & 0x7F) == E4M3_NAN] = np.nan
    return found
