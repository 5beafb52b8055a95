"""Block scales that lose less: of the E4M3 numbers around a block's own, the one whose codes come
nearest to its weights.

Tried are the scale of the block's largest weight / 6, eight codes above it and seven below (about 2 to
.5 of it), in this order. Scales half as large again are often best: they give the largest weight the
code 4, and those near it finer codes than beside a 6. Of gaussian and student-t rows all best ones were
between two codes below and six above. The one that is kept has the least

    sum over the block of (|w| / f - size)^2, times f^2,    f = the scale with the matrix's own

and of equal ones the first. Quotients are float32 products with float32(1 / f), their squares are added
in float32 one column after another, and the sum is multiplied with f^2 in float64, so that a block gets
the same scale on every machine. Blocks whose f is next to the ends of float32 keep their scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qconvert.core.encodings import Dialect
from qconvert.ops.fp4 import from_e4m3

if TYPE_CHECKING:
    import numpy as np

    from qconvert.formats.nvfp4.encode import Float32s, Int32s, UInt8s

# Of E4M3 codes, eight of which are a factor of two.
_OFFSETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, -4, -5, -6, -7)
_HIGHEST_CODE = 0x7E
_FAR = 2.0**120
_ONE, _FOUR = 127 << 23, 129 << 23


def best_scales(
    values: Float32s,
    scale: UInt8s,
    factor: Float32s,
    global_scale: np.float32,
    dialect: Dialect,
    work: Float32s,
    sizes: Float32s,
    spare: Int32s,
) -> None:
    """Blocks [n, 16] of weights, their E4M3 codes and factors [n] -> better ones in place. `work`,
    `sizes` and `spare` are working memory as large as the blocks."""
    import numpy as np

    best = np.full(factor.shape, np.inf)
    first, own = scale.astype(np.int32), factor.copy()
    usual = (own > 1 / _FAR) & (own < _FAR)
    for offset in _OFFSETS:
        code = first + offset
        usable = usual & (code >= 1) & (code <= _HIGHEST_CODE)
        each = from_e4m3(np.where(usable, code, 0x38).astype(np.uint8))
        each = each * global_scale if dialect == "modelopt" else each / global_scale
        if offset == 0:
            each = own
        error = _errors(values, each, work, sizes, spare) * np.square(each.astype(np.float64))
        better = usable & (error < best)
        np.copyto(best, error, where=better)
        np.copyto(scale, code, where=better, casting="unsafe")
        np.copyto(factor, each, where=better)


def _errors(
    values: Float32s, factor: Float32s, work: Float32s, sizes: Float32s, bits: Int32s
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Squared errors [n] of blocks, in units of their factors."""
    import numpy as np

    np.multiply(values, (np.float32(1) / factor)[:, None], out=work)
    np.abs(work, out=work)
    # E2M1's step is half of a number's own power of two, from 1 to 4. Adding 1.5 * 2^23 steps rounds to
    # a step, ties to even.
    np.bitwise_and(work.view(np.int32), 0x7F800000, out=bits)
    np.clip(bits, _ONE, _FOUR, out=bits)
    np.add(bits, (22 << 23) + (1 << 22), out=bits)
    np.add(work, bits.view(np.float32), out=sizes)
    np.subtract(sizes, bits.view(np.float32), out=sizes)
    np.minimum(sizes, np.float32(6), out=sizes)
    np.subtract(work, sizes, out=work)
    np.multiply(work, work, out=work)
    np.add.accumulate(work, axis=1, out=sizes)
    return sizes[:, -1].astype(np.float64)
